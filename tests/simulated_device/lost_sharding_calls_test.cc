// Each stream-ordering call of sharding is needed: without it the race detector
// finds a race. docs/internals.md, "Streams", lists them.

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "brigade/fsdp/segmented_model.h"
#include "brigade/fsdp/sharded_model.h"
#include "brigade/fsdp/unshard_buffers.h"
#include "brigade/hooks/autograd_hooks.h"
#include "brigade/tests/simulated_device/lost_calls.h"
#include "brigade/tests/support/recording_group.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gtest/gtest.h"

namespace brigade {
namespace lost_sharding_calls_test {

using simulated::make_wait;
using simulated::new_stream;
using simulated::on_device;
using testing::LostCallsTest;

constexpr int kNumRanks = 4;
constexpr int kReshardTo = 2;
constexpr int64_t kNumel = 64;

// A model of two units with two parameters each; each run makes a new one.
struct Parts {
  // `accumulate_on`: streams that accumulate the gradients of a unit, by
  // parameter.
  explicit Parts(const FullyShardOptions& options,
                 const std::vector<c10::Stream>& accumulate_on = {},
                 const std::optional<UnitMesh>& mesh_of_last = std::nullopt) {
    std::vector<UnitRequest> requests;
    for (const char* unit : {"0", "1"}) {
      UnitRequest& request = requests.emplace_back(UnitRequest{.name = unit});
      for (size_t i = 0; i < 2; ++i) {
        parameters.push_back(at::ones({kNumel}, on_device()).requires_grad_());
        request.parameters.push_back(
            {.name = c10::str("p", i), .tensor = parameters.back()});
        if (accumulate_on.empty()) continue;
        const c10::StreamGuard on_stream(accumulate_on[i]);
        accumulators.push_back(
            torch::autograd::impl::grad_accumulator(parameters.back()));
      }
    }
    requests.back().mesh = mesh_of_last;
    model = std::make_unique<SegmentedModel>(
        make_sharded_units(requests, recording.group(), options),
        recording.group(), options);
  }

  const at::Tensor& parameter(size_t unit, size_t i = 0) const {
    return parameters[2 * unit + i];
  }
  // Reads the unit's parameters on the current stream.
  at::Tensor read(size_t unit) const {
    return (parameter(unit, 0) * parameter(unit, 0) +
            parameter(unit, 1) * parameter(unit, 1))
        .sum();
  }
  // Runs `body` as a forward without backward.
  void evaluate(const std::function<void()>& body) const {
    const at::NoGradGuard no_grad;
    model->forward([&] {
      body();
      return at::Tensor();
    });
  }
  at::Tensor loss(const std::vector<size_t>& units = {0, 1}) const {
    return model->forward([&] {
      at::Tensor loss = at::zeros({}, on_device());
      for (const size_t unit : units) loss = loss + read(unit);
      return loss;
    });
  }
  void write_shards() const {
    const at::NoGradGuard no_grad;
    for (at::Tensor parameter : parameters) parameter.mul_(1);
  }
  void read_gradients() const {
    for (const at::Tensor& parameter : parameters) {
      if (!parameter.grad().defined()) continue;
      shard_of(parameter.grad())->local.sum();
      parameter.mutable_grad().reset();
    }
  }

  RecordingGroup recording{kNumRanks};
  std::vector<at::Tensor> parameters;
  std::vector<NodePtr> accumulators;
  std::unique_ptr<SegmentedModel> model;
};

// Drops calls of `program` only, not of the construction of its model.
class LostCallsOfModelTest : public LostCallsTest {
 protected:
  void expect_needed_of(const std::string& call,
                        const std::function<void(Parts&)>& program,
                        FullyShardOptions options = {}, bool some = false) {
    options.prefetch_depth = 0;
    expect_needed(
        call,
        [&] {
          const c10::Stream a = stream_named("a");
          const c10::Stream b = stream_named("b");
          streams_ = {a, b};
          Parts parts(options, accumulates_here_ ? streams_
                                                 : std::vector<c10::Stream>());
          parts.model->set_max_reducing(1);
          simulated::synchronize_all();
          name_streams(parts);
          program(parts);
          disarm();
          simulated::synchronize_all();
        },
        some);
  }

  void name_streams(const Parts& parts) {
    const ShardingStreams& streams =
        parts.model->units().front().transport->streams();
    {
      const auto scope = streams.for_gathers();
      name(simulated::current_stream_of(), "gathers");
    }
    const auto scope = streams.for_reductions();
    name(simulated::current_stream_of(), "sums");
  }

  const c10::Stream& a() const { return streams_[0]; }
  const c10::Stream& b() const { return streams_[1]; }
  void accumulate_here() { accumulates_here_ = true; }

 private:
  std::vector<c10::Stream> streams_;
  bool accumulates_here_ = false;  // on a and b
};

using LostGatherCallsTest = LostCallsOfModelTest;

TEST_F(LostGatherCallsTest, GathersWaitForWritersOfTheShards) {
  expect_needed_of("gathers waits for a", [&](Parts& parts) {
    const c10::StreamGuard on_a(a());
    parts.write_shards();
    arm();
    parts.evaluate([&] { parts.read(0); });
  });
  expect_needed_of("gathers waits for a", [&](Parts& parts) {
    const c10::StreamGuard on_a(a());
    parts.write_shards();
    arm();
    const std::vector<size_t> units = {0};
    parts.model->unshard(units);
    disarm();
    parts.model->reshard(units);
  });
}

TEST_F(LostGatherCallsTest, EachStreamThatUsesAUnitWaitsForItsGather) {
  for (const char* stream : {"a", "b"}) {
    expect_needed_of(c10::str(stream, " waits for group"), [&](Parts& parts) {
      arm();
      parts.evaluate([&] {
        for (const c10::Stream& stream : {a(), b()}) {
          const c10::StreamGuard on_stream(stream);
          parts.read(0);
        }
      });
    });
  }
}

// An optimizer writes the shards, even if no stream used the units.
TEST_F(LostGatherCallsTest, WritersOfTheShardsWaitForGathers) {
  expect_needed_of("a waits for gathers", [&](Parts& parts) {
    parts.evaluate([&] {
      parts.read(0);
      parts.read(1);
    });
    const c10::StreamGuard on_a(a());
    arm();
    parts.evaluate([] {});
    parts.write_shards();
  });
}

// The second unit reuses the buffer of the first one.
TEST_F(LostGatherCallsTest, GathersWaitForReadersOfTheBuffer) {
  for (const char* stream : {"a", "b"}) {
    expect_needed_of(c10::str("gathers waits for ", stream), [&](Parts& parts) {
      parts.evaluate([&] {
        for (const c10::Stream& stream : {a(), b()}) {
          const c10::StreamGuard on_stream(stream);
          parts.read(0);
        }
        arm();
        parts.read(1);
      });
    });
  }
}

TEST_F(LostGatherCallsTest, GathersWaitForReadersOfKeptStorage) {
  expect_needed_of("gathers waits for a", [&](Parts& parts) {
    parts.model->settings(0).keeps_storage = true;
    const c10::StreamGuard on_a(a());
    parts.evaluate([&] { parts.read(0); });
    const c10::StreamGuard on_b(b());
    arm();
    parts.evaluate([&] { parts.read(0); });
  });
}

TEST_F(LostGatherCallsTest, GathersWaitForReadersBetweenUnshardAndReshard) {
  expect_needed_of("gathers waits for b", [&](Parts& parts) {
    const std::vector<size_t> units = {0};
    const at::NoGradGuard no_grad;
    {
      const c10::StreamGuard on_a(a());
      parts.model->unshard(units);
    }
    const c10::StreamGuard on_b(b());
    make_wait(b(), a());
    parts.read(0);
    const c10::StreamGuard on_a(a());
    arm();
    parts.model->reshard(units);
    parts.evaluate([&] { parts.read(1); });
  });
}

// Two units that no stream uses take the same buffer, one after the other.
TEST_F(LostGatherCallsTest, GathersWaitForUnusedGathersIntoTheSameBuffer) {
  expect_needed_of(
      "gathers waits for group",
      [&](Parts& parts) {
        parts.evaluate([&] {
          parts.read(0);
          parts.read(1);
        });
        parts.evaluate([&] { arm(); });
      },
      {}, /*some=*/true);
}

TEST_F(LostGatherCallsTest, ReshardsToSomeRanksWaitForTheGather) {
  expect_needed_of(
      "gathers waits for group",
      [&](Parts& parts) {
        const at::Tensor loss = parts.loss({0, 1});
        arm();
        parts.loss({0, 1});
      },
      {.reshard_after_forward = kReshardTo}, /*some=*/true);
}

TEST_F(LostGatherCallsTest, UnitsOfDifferentMeshesShareBuffers) {
  expect_needed("gathers waits for a", [&] {
    const c10::Stream on = stream_named("a");
    Parts parts({.prefetch_depth = 0}, {}, UnitMesh{.ranks = {0, 2}});
    simulated::synchronize_all();
    name_streams(parts);
    const c10::StreamGuard on_a(on);
    parts.evaluate([&] {
      parts.read(0);
      arm();
      parts.read(1);
      disarm();
    });
    simulated::synchronize_all();
  });
}

class LostSumCallsTest : public LostCallsOfModelTest {
 protected:
  void SetUp() override { accumulate_here(); }

  std::function<void(Parts&)> reduces_and_reads() {
    return [this](Parts& parts) {
      const at::Tensor loss = parts.loss({0});
      arm();
      loss.backward();
      disarm();
      parts.read_gradients();
    };
  }
};

TEST_F(LostSumCallsTest, ReductionsWaitForAllGradients) {
  for (const char* stream : {"a", "b"}) {
    expect_needed_of(c10::str("sums waits for ", stream), [&](Parts& parts) {
      parts.loss({0}).backward();  // learns
      const at::Tensor loss = parts.loss({0});
      arm();
      loss.backward();
    });
  }
}

// The next user of a gradient buffer waits on each stream that writes to it.
TEST_F(LostSumCallsTest, NewGradientsWaitForTheReductionOfTheBuffer) {
  for (const char* call :
       {"a waits for sums", "b waits for sums", "sums waits for group"}) {
    expect_needed_of(
        call,
        [&](Parts& parts) {
          // Only gradient buffers are free.
          for (const size_t unit : {0, 1}) {
            parts.model->settings(unit).reshard_after_forward = false;
            parts.model->settings(unit).reshard_after_backward = false;
          }
          for (int step = 0; step < 3; ++step) parts.loss().backward();
          const at::Tensor loss = parts.loss();
          arm();
          loss.backward();
        },
        {}, /*some=*/true);
  }
}

TEST_F(LostSumCallsTest, GradientsAreReadAfterTheirReduction) {
  expect_needed_of("default waits for group", reduces_and_reads());
}

TEST_F(LostSumCallsTest, CompressedGradientsAreReadAfterTheirReduction) {
  for (const char* call : {"sums waits for group", "default waits for sums"}) {
    expect_needed_of(call, reduces_and_reads(),
                     {.comm_hook = compression_hook(at::kHalf)});
  }
}

// The mesh is 2 x 2.
TEST_F(LostSumCallsTest, AllReducesOverReplicasWaitForReduceScatters) {
  expect_needed_of("sums waits for group", reduces_and_reads(),
                   {.num_shards = 2}, /*some=*/true);
}

// Sums in rank order follow an all-to-all, within shard and replica groups.
TEST_F(LostSumCallsTest, SumsInRankOrderWaitForTheirInputs) {
  for (const int num_shards : {kNumRanks, 2, 1}) {
    for (const char* call :
         {"sums waits for group", "default waits for sums"}) {
      expect_needed_of(call, reduces_and_reads(),
                       {.num_shards = num_shards, .reproducible = true});
    }
  }
}

// On a mesh of 2 x 2, one stream adds up two partial sums, and another one adds
// them to the next sum.
TEST_F(LostSumCallsTest, TheNextSumWaitsForPartialSums) {
  expect_needed_of("sums waits for c",
                   [&](Parts& parts) {
                     parts.model->settings(0).sums_over_replicas = false;
                     const c10::Stream c = stream_named("c");
                     {
                       const c10::StreamGuard on_c(c);
                       parts.loss({0}).backward();
                       parts.loss({0}).backward();
                     }
                     parts.model->settings(0).sums_over_replicas = true;
                     const c10::StreamGuard on_d(stream_named("d"));
                     const at::Tensor loss = parts.loss({0});
                     arm();
                     loss.backward();
                   },
                   {.num_shards = 2});
}

// The allocator reuses memory on the stream that freed it.
TEST_F(LostSumCallsTest, ReductionsWaitForEarlierUsersOfNewMemory) {
  expect_needed_of("sums waits for c", [&](Parts& parts) {
    const c10::StreamGuard on_c(stream_named("c"));
    const at::Tensor loss = parts.loss({0});
    loss.backward({}, /*retain_graph=*/true);
    for (const at::Tensor& parameter : parts.parameters) {
      parameter.mutable_grad().reset();
    }
    at::ones({kNumel / 2}, on_device());
    parts.model->set_requires_gradient_sync(false);
    loss.backward();
    parts.model->set_requires_gradient_sync(true);
    std::vector<at::Tensor> others;
    for (int i = 0; i < 8; ++i) {
      others.push_back(at::ones({kNumel / 2}, on_device()));
    }
    others.clear();
    arm();
    parts.model->reduce();
  });
}

using LostMemoryCallsTest = LostCallsTest;

// The allocator returns freed memory to the next request.
TEST_F(LostMemoryCallsTest, NewBuffersWaitForEarlierUsersOfTheMemory) {
  const auto program = [&] {
    UnshardBuffers memory(simulated::device());
    const c10::Stream a = stream_named("a");
    const c10::Stream b = stream_named("b");
    simulated::synchronize_all();
    const auto use = [&](const c10::Stream& stream) {
      const c10::StreamGuard on_stream(stream);
      Lease lease = memory.acquire(512);
      const void* const address = lease.bytes.const_data_ptr();
      lease.last_use.wait();
      lease.bytes.fill_(1);
      memory.release(std::move(lease), StreamPoint::now(simulated::device()));
      memory.shrink_to(0);
      return address;
    };
    arm();
    const void* const address = use(a);
    EXPECT_EQ(use(b), address);
  };
  expect_needed("b waits for group", program);  // the allocating stream
}

TEST_F(LostMemoryCallsTest, MemoryIsFreedAfterItsUsers) {
  expect_needed("group waits for a", [&] {
    UnshardBuffers memory(simulated::device());
    const c10::StreamGuard on_a(stream_named("a"));
    Lease lease = memory.acquire(512);
    lease.last_use.wait();
    lease.bytes.fill_(1);
    arm();
    memory.release(std::move(lease), StreamPoint::now(simulated::device()));
  });
}

class LostUsesTest : public LostCallsOfModelTest {};

// make_sharded_units() reads the parameters on another stream.
TEST_F(LostUsesTest, ReadsOfParametersToBeShardedAreRecorded) {
  const RecordingGroup recording(kNumRanks);
  expect_needed("a uses memory", [&] {
    const c10::Stream a = stream_named("a");
    at::Tensor parameter = at::ones({kNumel}, on_device());
    make_wait(a, simulated::default_stream());
    {
      const c10::StreamGuard on_a(a);
      arm();
      make_sharded_units({{.name = "", .parameters = {{"p", parameter}}}},
                         recording.group(), {.broadcast_parameters = false});
      disarm();
    }
    simulated::synchronize_all();
  });
}

// Shards belong to the stream that made them.
TEST_F(LostUsesTest, UsesOfShardsAreRecorded) {
  expect_needed_of("a uses memory", [&](Parts& parts) {
    const c10::StreamGuard on_a(a());
    parts.evaluate([&] { parts.read(0); });
    parts.write_shards();
    arm();
    parts.model.reset();
    parts.parameters.clear();
  });
}

}  // namespace lost_sharding_calls_test
}  // namespace brigade
