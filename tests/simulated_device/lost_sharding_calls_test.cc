// Each call by which sharding orders streams is needed: without it, a race is
// found. By the parts that make the calls: docs/sharding_streams.md
// has them in a table.

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "brigade/comm/recording_group.h"
#include "brigade/fsdp/make_units.h"
#include "brigade/fsdp/memory/gradient_memory.h"
#include "brigade/fsdp/memory/memory_pool.h"
#include "brigade/fsdp/units/mesh_transports.h"
#include "brigade/fsdp/units/reduction_hook.h"
#include "brigade/fsdp/units/unit_gathers.h"
#include "brigade/fsdp/units/unit_reduction.h"
#include "brigade/fsdp/units/used_sum.h"
#include "brigade/tests/support/simulated_device/ordering_calls.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gtest/gtest.h"

namespace brigade {
namespace lost_sharding_calls_test {

using simulated::DropCalls;
using simulated::make_wait;
using simulated::new_stream;
using simulated::on_device;
using simulated::OrderingCall;

constexpr int kNumRanks = 4;
constexpr int kNeighbours = 2;  // of them
constexpr int64_t kNumel = 64;

// The streams of a call, as a test names them.
struct Named {
  std::optional<c10::Stream> stream;
  std::string name;
};

class LostShardingCallsTest : public simulated::StreamTest {
 protected:
  // Runs `body` whole, which finds no race, and then again and again, each time
  // without another one of the calls that it makes between known streams. Each
  // of these is lost once, and leads to a race, but for `needless`.
  //
  // Calls are told as "gathers waits for a", "records a", "a uses memory".
  void expect_needed(const std::string& call,
                     const std::function<void()>& body) {
    const auto count = [&](int nth) {
      const DropCalls lost([&](const OrderingCall& found) {
        return is_armed_ && tell(found) == call && nth-- == 0;
      });
      run(body);
      return lost.num_dropped();
    };
    EXPECT_EQ(count(-1), 0);
    simulated::expect_no_races();
    for (int nth = 0; count(nth) > 0; ++nth) {
      EXPECT_FALSE(simulated::take_races().empty())
          << call << ", the " << nth + 1 << "th, is not needed";
      num_lost_ = nth + 1;
    }
    simulated::take_races();
    EXPECT_GT(std::exchange(num_lost_, 0), 0)
        << "there is no such call: " << call;
  }

  // From here on calls may be lost.
  void arm() { is_armed_ = true; }
  void disarm() { is_armed_ = false; }

  void name(const c10::Stream& stream, std::string name) {
    names_.push_back({.stream = stream, .name = std::move(name)});
  }

  // A stream of the program, behind the default one.
  c10::Stream stream_named(const std::string& as) {
    const c10::Stream stream = new_stream();
    make_wait(stream, simulated::default_stream());
    name(stream, as);
    return stream;
  }

 private:
  void run(const std::function<void()>& body) {
    names_.clear();
    is_armed_ = false;
    body();
    is_armed_ = false;
  }

  // Whatever has no name is a stream of a group's.
  std::string name_of(const std::optional<c10::Stream>& stream) const {
    for (const Named& named : names_) {
      if (named.stream == stream) return named.name;
    }
    if (stream == simulated::default_stream()) return "default";
    return "group";
  }

  std::string tell(const OrderingCall& call) const {
    const std::string stream = name_of(call.stream);
    switch (call.kind) {
      case OrderingCall::kRecord:
        return "records " + stream;
      case OrderingCall::kWait:
        return stream + " waits for " + name_of(call.other);
      case OrderingCall::kHostWait:
        return "host waits for " + stream;
      case OrderingCall::kRecordUse:
        return stream + " uses memory";
      case OrderingCall::kHoldPinned:
        return "pinned memory is held";
      case OrderingCall::kSwitch:
        return "switches to " + stream;
    }
    return "";
  }

  std::vector<Named> names_;
  bool is_armed_ = false;
  int num_lost_ = 0;
};

// What a root has, made anew for each run.
struct Parts {
  explicit Parts(int num_shards = kNumRanks, size_t max_reducing = 1,
                 int num_units = 2, at::ScalarType reduce = at::kFloat,
                 const std::optional<UnitMesh>& mesh_of_last = std::nullopt,
                 bool sums_in_order = false) {
    std::vector<UnitSpec> specs;
    for (int u = 0; u < num_units; ++u) {
      specs.push_back(
          {.name = c10::str(u),
           .parameters = {
               {"a", at::ones({kNumel}, on_device()).requires_grad_()},
               {"b", at::ones({kNumel}, on_device()).requires_grad_()}}});
    }
    specs.back().mesh = mesh_of_last;
    units = make_units(specs, recording.group(),
                       {.num_shards = num_shards, .reduce_dtype = reduce});
    units.front().settings.reshards_to = kNeighbours;  // so there are groups
    transports = std::make_unique<MeshTransports>(recording.group(), num_shards,
                                                  simulated::device(), units,
                                                  sums_in_order);
    pool = std::make_unique<MemoryPool>(simulated::device());
    gradients = std::make_unique<GradientMemory>(
        *pool, transports->root().streams(), max_reducing);
    gathers = std::make_unique<UnitGathers>(units, *transports, *pool,
                                            /*depth=*/0);
  }

  Segment& segment(size_t unit) { return *units[unit].segments[0]; }
  at::Tensor parameter(size_t unit, size_t i = 0) {
    return segment(unit).parameters()[i].tensor.detach();
  }
  void need(size_t unit) {
    gathers->need(unit, {}, [] {});
  }
  UnitReduction reduction(size_t unit) {
    return {unit, units[unit], segment(unit), transports->of(units[unit]),
            *gradients};
  }
  void take(size_t unit, size_t i = 0) {
    segment(unit).take(i, gradient, *gradients);
  }
  void drop_gradients(size_t unit) {
    gradients->release(segment(unit).take_gradient_memory());
  }

  RecordingGroup recording{kNumRanks};
  std::vector<Unit> units;
  std::unique_ptr<MeshTransports> transports;
  std::unique_ptr<MemoryPool> pool;
  std::unique_ptr<GradientMemory> gradients;
  std::unique_ptr<UnitGathers> gathers;
  at::Tensor gradient = at::ones({kNumel}, on_device());
};

class LostGatherCallsTest : public LostShardingCallsTest {
 protected:
  // `program` runs behind the default stream, with all memory that it makes
  // used by all of its streams.
  void expect_needed_of(const std::string& call,
                        const std::function<void(Parts&)>& program,
                        int num_shards = kNumRanks) {
    expect_needed(call, [&] {
      Parts parts(num_shards);
      simulated::synchronize_all();
      name_streams(parts);
      program(parts);
      simulated::synchronize_all();
    });
  }

  void name_streams(Parts& parts) {
    {
      const auto scope = parts.transports->root().streams().for_gathers();
      name(simulated::current_stream_of(), "gathers");
    }
    const auto scope = parts.transports->root().streams().for_sums();
    name(simulated::current_stream_of(), "sums");
    name(*parts.pool->owner(), "pool");
  }
};

TEST_F(LostGatherCallsTest, GathersAreBehindWhoWritesTheShards) {
  const auto program = [&](Parts& parts) {
    const c10::StreamGuard on_a(stream_named("a"));
    at::Tensor(parts.segment(0).shard()).mul_(1);
    arm();
    parts.gathers->shards_are_written();
    parts.gathers->begin({0});
    parts.need(0);
  };
  expect_needed_of("gathers waits for a", program);
  expect_needed_of("records a", program);
}

TEST_F(LostGatherCallsTest, EachStreamThatNeedsAUnitIsBehindItsGather) {
  const auto program = [&](Parts& parts) {
    const c10::Stream a = stream_named("a");
    const c10::Stream b = stream_named("b");
    arm();
    parts.gathers->begin({0});
    for (const c10::Stream& stream : {a, b}) {
      const c10::StreamGuard on_stream(stream);
      parts.need(0);
      parts.parameter(0).sum();
    }
  };
  expect_needed_of("a waits for group", program);
  expect_needed_of("b waits for group", program);
}

// Which an optimizer writes, whether anybody has needed the units or not.
TEST_F(LostGatherCallsTest, WhoWritesTheShardsIsBehindWhatGathersReadOfThem) {
  const auto program = [&](Parts& parts) {
    const c10::StreamGuard on_a(stream_named("a"));
    parts.gathers->begin({0, 1});
    arm();
    parts.gathers->launch_rest();
    at::Tensor(parts.segment(0).shard()).mul_(1);
  };
  expect_needed_of("a waits for gathers", program);
  expect_needed_of("records gathers", program);
}

// The second unit gets the memory of the first one.
TEST_F(LostGatherCallsTest, GathersAreBehindWhoHasReadTheMemory) {
  const auto program = [&](Parts& parts) {
    const c10::Stream a = stream_named("a");
    const c10::Stream b = stream_named("b");
    const c10::Stream c = stream_named("c");
    parts.gathers->begin({0, 1});
    for (const c10::Stream& stream : {a, b, c}) {
      const c10::StreamGuard on_stream(stream);
      parts.need(0);
      parts.parameter(0).sum();
    }
    arm();
    {
      const c10::StreamGuard on_stream(c);
      parts.gathers->release(0);
    }
    parts.need(1);
    EXPECT_EQ(parts.pool->num_allocations(), 1);
  };
  for (const std::string stream : {"a", "b", "c"}) {
    expect_needed_of("gathers waits for " + stream, program);
    expect_needed_of("records " + stream, program);
  }
}

// Which has read it behind somebody who needed it, and is told of.
TEST_F(LostGatherCallsTest, StreamsThatAreNotedAreWaitedFor) {
  expect_needed_of("gathers waits for b", [&](Parts& parts) {
    const c10::Stream a = stream_named("a");
    const c10::Stream b = stream_named("b");
    parts.gathers->begin({0, 1});
    const c10::StreamGuard on_a(a);
    parts.need(0);
    make_wait(b, a);
    arm();
    {
      const c10::StreamGuard on_b(b);
      parts.parameter(0).sum();
      parts.gathers->record_use(0);
    }
    parts.gathers->release(0);
    parts.need(1);
  });
}

// Its memory goes to a gradient.
TEST_F(LostGatherCallsTest, WhoGetsMemoryThatNobodyReadIsBehindTheGather) {
  const auto program = [&](Parts& parts) {
    parts.gathers->begin({0});
    parts.gathers->launch_rest();
    arm();
    parts.gathers->begin({});
    const c10::StreamGuard on_a(stream_named("a"));
    parts.take(0);
    EXPECT_EQ(parts.pool->num_allocations(), 1);
    parts.drop_gradients(0);
  };
  expect_needed_of("gathers waits for group", program);
  expect_needed_of("records gathers", program);
  expect_needed_of("a waits for gathers", program);
}

// The gather for peers of a unit that is whole.
TEST_F(LostGatherCallsTest, GathersForPeersAreWaitedForToo) {
  expect_needed_of("gathers waits for group", [&](Parts& parts) {
    parts.gathers->begin({0});
    parts.need(0);
    parts.gathers->begin({0});
    parts.gathers->launch_rest();
    arm();
    parts.gathers->begin({});
    const c10::StreamGuard on_a(stream_named("a"));
    parts.take(0);
    EXPECT_EQ(parts.pool->num_allocations(), 2);
    parts.drop_gradients(0);
  });
}

// Which nobody on this rank has needed.
TEST_F(LostGatherCallsTest, SlicesAreCopiedBehindTheGather) {
  expect_needed_of("gathers waits for group", [&](Parts& parts) {
    parts.gathers->begin({0});
    parts.gathers->launch_rest();
    arm();
    parts.gathers->keep_slices(0, kNeighbours);
    disarm();
    parts.gathers->release(0);
  });
}

// It goes to a gradient.
TEST_F(LostGatherCallsTest, WhoGetsTheMemoryOfAUnitIsBehindTheCopyOfItsSlice) {
  const auto program = [&](Parts& parts) {
    parts.gathers->begin({0});
    const c10::StreamGuard on_a(stream_named("a"));
    parts.need(0);
    parts.gathers->keep_slices(0, kNeighbours);
    arm();
    parts.gathers->release(0);
    const c10::StreamGuard on_b(stream_named("b"));
    parts.take(0);
    EXPECT_EQ(parts.pool->num_allocations(), 2);
    parts.drop_gradients(0);
    disarm();
  };
  expect_needed_of("b waits for gathers", program);
  expect_needed_of("records gathers", program);
}

TEST_F(LostGatherCallsTest, SlicesAreWrittenBehindWhoHadTheirMemory) {
  expect_needed_of("gathers waits for a", [&](Parts& parts) {
    parts.gathers->begin({0});
    parts.need(0);
    {
      const c10::StreamGuard on_a(stream_named("a"));
      Buffer buffer =
          parts.pool->acquire(parts.segment(0).whole_bytes() / kNeighbours);
      buffer.last_use.wait();
      buffer.memory.fill_(1);
      buffer.last_use = StreamPoint::now(simulated::device());
      parts.pool->release(std::move(buffer));
    }
    arm();
    parts.gathers->keep_slices(0, kNeighbours);
    EXPECT_EQ(parts.pool->num_allocations(), 2);
  });
}

// The gather among neighbours reads them, and is the last to do so.
TEST_F(LostGatherCallsTest, WhoGetsTheMemoryOfASliceIsBehindItsGather) {
  const auto program = [&](Parts& parts) {
    parts.gathers->begin({0});
    parts.need(0);
    parts.gathers->keep_slices(0, kNeighbours);
    parts.gathers->release(0);
    parts.gathers->launch_rest();
    arm();
    parts.gathers->begin({0}, GatheredIn::kBackward);
    parts.gathers->launch_rest();
    EXPECT_EQ(parts.gathers->num_near(), 1);
    const c10::StreamGuard on_a(stream_named("a"));
    Buffer buffer =
        parts.pool->acquire(parts.segment(0).whole_bytes() / kNeighbours);
    buffer.last_use.wait();
    buffer.memory.fill_(1);
    EXPECT_EQ(parts.pool->num_allocations(), 2);
    buffer.last_use = StreamPoint::now(simulated::device());
    parts.pool->release(std::move(buffer));
  };
  expect_needed_of("a waits for gathers", program);
  expect_needed_of("records gathers", program);
}

TEST_F(LostGatherCallsTest, WhoNeedsAUnitIsBehindTheGatherAmongNeighbours) {
  expect_needed_of("a waits for group", [&](Parts& parts) {
    parts.gathers->begin({0});
    parts.need(0);
    parts.gathers->keep_slices(0, kNeighbours);
    parts.gathers->release(0);
    arm();
    parts.gathers->begin({0}, GatheredIn::kBackward);
    const c10::StreamGuard on_a(stream_named("a"));
    parts.need(0);
    parts.parameter(0).sum();
  });
}

class LostSumCallsTest : public LostGatherCallsTest {};

// Units on different meshes lend each other their memory.
class LostMeshCallsTest : public LostGatherCallsTest {
 protected:
  void expect_needed_of(const std::string& call,
                        const std::function<void(Parts&)>& program) {
    expect_needed(call, [&] {
      Parts parts(kNumRanks, /*max_reducing=*/1, /*num_units=*/2, at::kFloat,
                  UnitMesh{.ranks = {0, 2}});
      simulated::synchronize_all();
      name_streams(parts);
      program(parts);
      simulated::synchronize_all();
    });
  }
};

TEST_F(LostMeshCallsTest, GathersAreBehindWhoHasReadTheMemory) {
  const auto program = [&](Parts& parts) {
    const c10::StreamGuard on_a(stream_named("a"));
    parts.gathers->begin({0, 1});
    parts.need(0);
    parts.parameter(0).sum();
    arm();
    parts.gathers->release(0);
    parts.need(1);
    parts.parameter(1).sum();
    EXPECT_EQ(parts.pool->num_allocations(), 1);
  };
  expect_needed_of("gathers waits for a", program);
  expect_needed_of("a waits for group", program);
}

TEST_F(LostMeshCallsTest, WhoGetsTheMemoryOfASumIsBehindIt) {
  for (const size_t first : {0, 1}) {
    const auto program = [&](Parts& parts) {
      {
        const c10::StreamGuard on_a(stream_named("a"));
        parts.take(first);
      }
      parts.reduction(first).launch();
      arm();
      const c10::StreamGuard on_b(stream_named("b"));
      parts.take(1 - first);
      EXPECT_EQ(parts.pool->num_allocations(), 1);
      parts.drop_gradients(1 - first);
    };
    expect_needed_of("b waits for sums", program);
    expect_needed_of("sums waits for group", program);
  }
}

TEST_F(LostSumCallsTest, SumsAreBehindAllGradients) {
  const auto program = [&](Parts& parts) {
    const c10::Stream a = stream_named("a");
    const c10::Stream b = stream_named("b");
    parts.gradients->release(
        {.memory = at::empty({4096}, on_device(at::kByte)), .last_use = {}});
    size_t i = 0;
    for (const c10::Stream& stream : {a, b}) {
      const c10::StreamGuard on_stream(stream);
      parts.take(0, i++);
    }
    arm();
    parts.reduction(0).launch();
  };
  expect_needed_of("sums waits for a", program);
  expect_needed_of("sums waits for b", program);
  expect_needed_of("records a", program);
}

// Of a parameter whose gradients come on two streams.
TEST_F(LostSumCallsTest, AGradientIsAddedBehindTheFirst) {
  expect_needed_of("b waits for a", [&](Parts& parts) {
    const c10::Stream a = stream_named("a");
    const c10::Stream b = stream_named("b");
    {
      const c10::StreamGuard on_a(a);
      parts.take(0);
    }
    arm();
    const c10::StreamGuard on_b(b);
    parts.take(0);
    parts.drop_gradients(0);
  });
}

// Each stream, and the sum itself, which writes zeros where nothing came.
TEST_F(LostSumCallsTest, WhoGetsTheMemoryOfASumIsBehindIt) {
  const auto program = [&](Parts& parts) {
    const c10::Stream a = stream_named("a");
    const c10::Stream b = stream_named("b");
    {
      const c10::StreamGuard on_a(a);
      parts.take(0);
    }
    parts.reduction(0).launch();
    arm();
    size_t i = 0;
    for (const c10::Stream& stream : {a, b}) {
      const c10::StreamGuard on_stream(stream);
      parts.take(1, i++);
    }
    EXPECT_EQ(parts.pool->num_allocations(), 1);
    parts.drop_gradients(1);
  };
  expect_needed_of("a waits for sums", program);
  expect_needed_of("b waits for sums", program);
  expect_needed_of("sums waits for group", program);
  expect_needed_of("records sums", program);
}

// And of a slot, which its owner writes.
TEST_F(LostSumCallsTest, WhoGetsASlotIsBehindTheSumThatHadItsMemory) {
  const auto program = [&](Parts& parts) {
    const c10::Stream a = stream_named("a");
    {
      const c10::StreamGuard on_a(a);
      parts.take(0);
    }
    parts.reduction(0).launch();
    arm();
    const c10::StreamGuard on_b(stream_named("b"));
    parts.segment(1).gradient_slot(0, *parts.gradients).fill_(1);
    EXPECT_EQ(parts.pool->num_allocations(), 1);
    parts.drop_gradients(1);
  };
  expect_needed_of("b waits for sums", program);
  expect_needed_of("sums waits for group", program);
  expect_needed_of("records sums", program);
}

// Which is written on one stream, and taken on another.
TEST_F(LostSumCallsTest, SumsAreBehindWhoWritesASlot) {
  expect_needed_of("sums waits for a", [&](Parts& parts) {
    const c10::StreamGuard on_a(stream_named("a"));
    const at::Tensor slot = parts.segment(0).gradient_slot(0, *parts.gradients);
    slot.fill_(1);
    arm();
    parts.segment(0).take(0, slot, *parts.gradients);
    parts.reduction(0).launch();
  });
}

TEST_F(LostSumCallsTest, ASumOfNothingIsBehindWhoHadItsMemory) {
  const auto program = [&](Parts& parts) {
    const c10::Stream a = stream_named("a");
    {
      const c10::StreamGuard on_a(a);
      parts.take(0);
    }
    arm();
    parts.drop_gradients(0);
    parts.reduction(1).launch();
    EXPECT_EQ(parts.pool->num_allocations(), 1);
  };
  expect_needed_of("sums waits for a", program);
  expect_needed_of("records a", program);
}

// Two sums of one unit without gradients: nothing else is between them.
TEST_F(LostSumCallsTest, TheNextSumIsBehindWhoReadTheLast) {
  const auto program = [&](Parts& parts) {
    for (at::Tensor shard : parts.segment(0).shards()) {
      shard.mutable_grad() = at::zeros_like(shard);
    }
    const c10::Stream a = stream_named("a");
    UnitReduction reduction = parts.reduction(0);
    const auto sum = reduction.launch();
    arm();
    {
      const c10::StreamGuard on_a(a);
      sum->waitAndThrow();
      parts.segment(0).commit({1, 1}, 0.25);
    }
    reduction.launch();
  };
  expect_needed_of("a waits for group", program);
  expect_needed_of("sums waits for a", program);
  expect_needed_of("records a", program);
}

// It is written where the sum of what has travelled is.
TEST_F(LostSumCallsTest, WhatHasTravelledIsReadBehindTheSum) {
  const auto program = [&](Parts& parts) {
    parts.units[0].comm_hook = compression_hook(at::kHalf);
    const c10::StreamGuard on_a(stream_named("a"));
    arm();
    const auto sum = parts.reduction(0).launch();
    sum->waitAndThrow();
    parts.segment(0).commit({1, 1}, 0.5);
  };
  expect_needed_of("sums waits for group", program);
  expect_needed_of("a waits for sums", program);
  expect_needed_of("sums waits for group", program, /*num_shards=*/2);
}

// On a mesh of 2 x 2.
TEST_F(LostSumCallsTest, TheColumnsSumIsBehindTheRows) {
  expect_needed_of(
      "sums waits for group",
      [&](Parts& parts) {
        const c10::StreamGuard on_a(stream_named("a"));
        parts.take(0);
        arm();
        const auto sum = parts.reduction(0).launch();
        disarm();
        sum->waitAndThrow();
        parts.segment(0).commit({1, 1}, 0.25);
      },
      /*num_shards=*/2);
}

// Of what a row's ranks have sent, and of what the column's have.
TEST_F(LostSumCallsTest, SumsInTheOrderOfTheRanksAreBehindWhatTheyAddUp) {
  for (const int num_shards : {kNumRanks, 2, 1}) {
    for (const std::string call :
         {"sums waits for group", "a waits for sums"}) {
      expect_needed(call, [&] {
        Parts parts(num_shards, /*max_reducing=*/1, /*num_units=*/2, at::kFloat,
                    std::nullopt, /*sums_in_order=*/true);
        simulated::synchronize_all();
        name_streams(parts);
        const c10::StreamGuard on_a(stream_named("a"));
        parts.take(0);
        arm();
        const auto sum = parts.reduction(0).launch();
        sum->waitAndThrow();
        parts.segment(0).commit({1, 1}, 0.5);
        simulated::synchronize_all();
      });
    }
  }
}

// On a mesh of 2 x 2: what a row has summed twice is added up on one stream,
// and added to the next sum on another.
TEST_F(LostSumCallsTest, WhatARowHasSummedIsAddedUpBehindTheSums) {
  const auto program = [&](Parts& parts) {
    parts.gradients->set_max_reducing(2);  // so that no memory's wait is enough
    UnitReduction reduction = parts.reduction(0);
    reduction.set_sums_over_replicas(false);
    for (const char* stream : {"a", "b"}) {
      const c10::StreamGuard on_stream(stream_named(stream));
      const auto sum = reduction.launch();
      if (std::string(stream) == "b") arm();
      sum->waitAndThrow();
      reduction.commit({});
    }
    reduction.set_sums_over_replicas(true);
    reduction.launch();
  };
  expect_needed_of("b waits for group", program, /*num_shards=*/2);
  expect_needed_of("sums waits for b", program, /*num_shards=*/2);
  expect_needed_of("records b", program, /*num_shards=*/2);
}

// But for a parameter that is frozen in between.
TEST_F(LostSumCallsTest, WhatARowHasSummedIsForgottenBehindTheSum) {
  const auto program = [&](Parts& parts) {
    parts.gradients->set_max_reducing(2);
    UnitReduction reduction = parts.reduction(0);
    reduction.set_sums_over_replicas(false);
    const auto sum = reduction.launch();
    {
      const c10::StreamGuard on_a(stream_named("a"));
      sum->waitAndThrow();
      reduction.commit({});
    }
    arm();
    {
      const c10::StreamGuard on_b(stream_named("b"));
      parts.segment(0).shards()[0].set_requires_grad(false);
      parts.segment(0).follow_shards();
    }
    reduction.set_sums_over_replicas(true);
    reduction.launch();
  };
  expect_needed_of("b waits for a", program, /*num_shards=*/2);
  expect_needed_of("sums waits for b", program, /*num_shards=*/2);
  expect_needed_of("records b", program, /*num_shards=*/2);
}

// Which the allocator lends to the stream that has given it back.
TEST_F(LostSumCallsTest, NewMemoryOfASumIsBehindWhoHadItBefore) {
  const auto program = [&](Parts& parts) {
    parts.take(0);
    const c10::StreamGuard on_a(stream_named("a"));
    const int64_t numel = parts.segment(0).shard().numel();
    const void* before = nullptr;
    {
      const at::Tensor other = at::ones({numel}, on_device());
      before = other.const_data_ptr();
    }
    arm();
    parts.reduction(0).launch();
    EXPECT_EQ(parts.segment(0).shard_gradient().pending().const_data_ptr(),
              before);
  };
  expect_needed_of("sums waits for a", program);
  expect_needed_of("records a", program);
}

TEST_F(LostSumCallsTest, WhatIsUsedTravelsFromMemoryThatStays) {
  std::vector<int32_t> is_used = {1, 0};
  expect_needed_of("pinned memory is held", [&](Parts& parts) {
    UsedSum used(is_used, parts.transports->root());
    arm();
    used.launch();
    is_used = {0, 1};
    used.launch();
    is_used = {1, 0};
  });
  expect_needed_of("default waits for group", [&](Parts& parts) {
    UsedSum used(is_used, parts.transports->root());
    arm();
    used.launch();
    used.read();
    is_used = {1, 0};
  });
}

class LostMemoryCallsTest : public LostShardingCallsTest {};

// Memory that was given up comes back when it is asked for again.
TEST_F(LostMemoryCallsTest, NewMemoryIsBehindWhoHadItBefore) {
  const auto program = [&] {
    MemoryPool pool(simulated::device());
    name(*pool.owner(), "pool");
    const c10::Stream a = stream_named("a");
    const c10::Stream b = stream_named("b");
    simulated::synchronize_all();
    const void* address = nullptr;
    arm();
    {
      const c10::StreamGuard on_a(a);
      Buffer small = pool.acquire(512);
      small.last_use.wait();
      address = small.memory.unsafeGetTensorImpl()->data();
      small.memory.fill_(1);
      small.last_use = StreamPoint::now(simulated::device());
      pool.release(std::move(small));
    }
    const Buffer large = pool.acquire(1024);  // gives the small one up
    const c10::StreamGuard on_b(b);
    Buffer small = pool.acquire(512);
    small.last_use.wait();
    EXPECT_EQ(small.memory.unsafeGetTensorImpl()->data(), address);
    small.memory.fill_(2);
    small.memory.record_stream(b);
  };
  expect_needed("pool waits for a", program);
  expect_needed("b waits for pool", program);
}

TEST_F(LostMemoryCallsTest, MemoryEndsBehindWhoHadIt) {
  expect_needed("pool waits for a", [&] {
    MemoryPool pool(simulated::device());
    name(*pool.owner(), "pool");
    const c10::StreamGuard on_a(stream_named("a"));
    Buffer buffer = pool.acquire(512);
    buffer.last_use.wait();
    buffer.memory.fill_(1);
    arm();
    pool.release({.memory = std::move(buffer.memory),
                  .last_use = StreamPoint::now(simulated::device())});
  });
}

class LostUsesTest : public LostGatherCallsTest {};

// It becomes the gradient, which is given back on the stream that reads it; the
// sum's future tells of the stream that waits for it.
TEST_F(LostUsesTest, TheAllocatorIsToldWhoReadsASum) {
  expect_needed("b uses memory", [&] {
    Parts parts;
    simulated::synchronize_all();
    const c10::Stream a = stream_named("a");
    const c10::Stream b = stream_named("b");
    {
      const c10::StreamGuard on_a(a);
      parts.take(0);
      parts.reduction(0).launch()->waitAndThrow();
      parts.gradients->reclaim_all();
      simulated::synchronize_all();
      parts.reduction(1).launch();  // the group lets go of what has travelled
      const c10::StreamGuard on_b(b);
      arm();
      parts.segment(0).commit({1, 1}, 1);
    }
    {
      const c10::StreamGuard on_b(b);
      for (at::Tensor shard : parts.segment(0).shards()) {
        shard.grad().neg();
        shard.mutable_grad().reset();
      }
    }
    disarm();
    const c10::StreamGuard on_a(a);
    std::vector<at::Tensor> next;  // all that the allocator has free
    for (int i = 0; i < 16; ++i) {
      next.push_back(at::ones_like(parts.segment(0).shard()));
    }
    simulated::synchronize_all();
  });
}

// On a mesh of 2 x 2: what rows have added up goes with its unit.
TEST_F(LostUsesTest, TheAllocatorIsToldWhoHasUsedASumThatIsDropped) {
  expect_needed("b uses memory", [&] {
    Parts parts(/*num_shards=*/2);
    simulated::synchronize_all();
    const c10::Stream a = stream_named("a");
    const c10::Stream b = stream_named("b");
    const at::Tensor like = at::empty_like(parts.segment(0).shard());
    UnitReduction reduction = parts.reduction(0);
    UnitReduction other = parts.reduction(1);
    reduction.set_sums_over_replicas(false);
    other.set_sums_over_replicas(false);
    const c10::StreamGuard on_a(a);
    for (int i = 0; i < 2; ++i) {
      const auto sum = reduction.launch();
      simulated::synchronize_all();
      other.launch();  // the group lets go of what has travelled
      const c10::StreamGuard on_b(b);
      reduction.commit({});
    }
    parts.gathers.reset();
    arm();
    parts.units.clear();
    disarm();
    std::vector<at::Tensor> next;  // all that the allocator has free
    for (int i = 0; i < 16; ++i) next.push_back(at::ones_like(like));
    simulated::synchronize_all();
  });
}

// Units are made on a stream of their own.
TEST_F(LostUsesTest, TheAllocatorIsToldWhoReadsParametersThatAreSharded) {
  const RecordingGroup recording(kNumRanks);
  expect_needed("a uses memory", [&] {
    const c10::Stream a = stream_named("a");
    at::Tensor parameter = at::ones({kNumel}, on_device());
    make_wait(a, simulated::default_stream());
    {
      const c10::StreamGuard on_a(a);
      arm();
      make_units({{.name = "", .parameters = {{"p", parameter}}}},
                 recording.group(), {.broadcasts_parameters = false});
    }
    simulated::synchronize_all();
  });
}

// Which belong to the stream that made them. The gathers' has no name yet.
TEST_F(LostUsesTest, TheAllocatorIsToldWhoUsesShards) {
  expect_needed("a uses memory", [&] {
    Parts parts;
    const c10::StreamGuard on_a(stream_named("a"));
    arm();
    parts.gathers->shards_are_written();
    for (const Unit& unit : parts.units) {
      at::Tensor(unit.segments[0]->shard()).mul_(1);
    }
    parts.gathers.reset();
    parts.units.clear();
  });
  expect_needed("group uses memory", [&] {
    arm();
    Parts parts;
    parts.gathers->shards_are_written();
    const c10::StreamGuard on_a(stream_named("a"));
    parts.gathers->begin({0, 1});
    parts.gathers->launch_rest();
    parts.gathers.reset();
    parts.units.clear();
  });
}

// Views of what is whole outlive it: those who wait for a gather are told of by
// its future, others are not.
TEST_F(LostUsesTest, TheAllocatorIsToldWhoReadsWhatIsLeftWhole) {
  expect_needed("b uses memory", [&] {
    Parts parts;
    simulated::synchronize_all();
    const c10::Stream b = stream_named("b");
    parts.gathers->begin({0, 1});
    parts.need(0);
    simulated::synchronize_all();  // what has travelled is let go of
    {
      const c10::StreamGuard on_b(b);
      parts.parameter(0).sum();
      parts.gathers->record_use(0);
    }
    parts.need(1);
    arm();
    parts.gathers.reset();
    parts.units.clear();
  });
}

}  // namespace lost_sharding_calls_test
}  // namespace brigade
