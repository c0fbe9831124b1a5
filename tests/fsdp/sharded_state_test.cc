#include "brigade/fsdp/checkpoint/sharded_state.h"

#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "brigade/fsdp/checkpoint/shard_files.h"
#include "brigade/tests/fsdp/sharded_net.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace sharded_state_test {

using ::testing::HasSubstr;
using testing::loss_of;
using testing::Net;
using testing::run_ranks;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

class ShardedStateTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(::testing::TempDir()) /
              ("brigade_state_" + std::to_string(getpid()));
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string path() const { return folder_ / "model.safetensors"; }

 private:
  std::filesystem::path folder_;
};

// SGD with momentum, whose buffers are kept here.
class Momentum {
 public:
  explicit Momentum(const ShardedRoot& root) : shards_(root.shards()) {
    for (const at::Tensor& shard : shards_) {
      buffers_[shard.unsafeGetTensorImpl()] = torch::zeros_like(shard);
    }
  }
  at::Tensor of(const at::Tensor& shard) const {
    return buffers_.at(shard.unsafeGetTensorImpl());
  }
  void step() {
    const torch::NoGradGuard no_grad;
    for (at::Tensor& shard : shards_) {
      at::Tensor buffer = of(shard);
      buffer.mul_(0.5).add_(shard.grad());
      shard.sub_(buffer, 0.125);
      shard.mutable_grad() = at::Tensor();
    }
  }
  std::vector<ShardedTensors> saved() const {
    return {parameters_of_shards(),
            {.suffix = ".momentum",
             .of = [this](const at::Tensor& shard) { return of(shard); }}};
  }

 private:
  std::vector<at::Tensor> shards_;
  std::map<const void*, at::Tensor> buffers_;
};

void train(ShardedRoot& root, const Net& net, Momentum& optimizer, int from,
           int to) {
  for (int step = from; step < to; ++step) {
    // The same batch on all ranks, so that their number changes nothing.
    loss_of(root.forward([&] {
      return net.run(root, net.input(0, step));
    })).backward();
    optimizer.step();
  }
}

std::vector<at::Tensor> whole_of(ShardedRoot& root, const Net& net) {
  std::vector<at::Tensor> whole;
  root.unshard();
  for (const at::Tensor& parameter : net.parameters()) {
    whole.push_back(parameter.detach().clone());
  }
  root.reshard(/*writes=*/false);
  return whole;
}

// Powers of two of equal gradients add up and divide exactly.
TEST_F(ShardedStateTest, ResumesOnAnyNumberOfRanksBitForBit) {
  std::vector<at::Tensor> expected;
  run_ranks(2, [&](const Group& group) {
    Net net;
    ShardedRoot root(net.units(), group, {});
    Momentum optimizer(root);
    train(root, net, optimizer, 0, 3);
    save_whole(root, path(), optimizer.saved(), {{"step", "3"}});
    train(root, net, optimizer, 3, 6);
    std::vector<at::Tensor> whole = whole_of(root, net);
    if (group->getRank() == 0) expected = std::move(whole);
  });
  for (const auto& [num_ranks, num_shards] :
       {std::pair(1, 1), std::pair(2, 1), std::pair(4, 4), std::pair(4, 2)}) {
    run_ranks(num_ranks, [&, num_shards = num_shards](const Group& group) {
      Net net({5, 7, 3, 6, 4}, /*seed=*/99);
      ShardedRoot root(net.units(), group, {.num_shards = num_shards});
      Momentum optimizer(root);
      load_whole(root, path(), optimizer.saved());
      train(root, net, optimizer, 3, 6);
      const std::vector<at::Tensor> found = whole_of(root, net);
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(at::equal(found[i], expected[i])) << "parameter " << i;
      }
    });
  }
}

TEST_F(ShardedStateTest, NamesAndShapesAreTheParameters) {
  run_ranks(2, [&](const Group& group) {
    Net net;
    ShardedRoot root(net.units(), group, {.param_dtype = torch::kBFloat16});
    save_whole(root, path());
  });
  auto reader = SafetensorsReader::open(path());
  ASSERT_TRUE(reader.ok()) << reader.status();
  const SafetensorsEntry* const weight = reader->find("blocks.1.weight");
  ASSERT_NE(weight, nullptr);
  EXPECT_EQ(weight->shape, (std::vector<int64_t>{7, 3}));
  EXPECT_EQ(weight->dtype, SafetensorsDtype::kF32) << "the master's";
  const Net plain;
  at::Tensor found = torch::empty({7, 3});
  ASSERT_TRUE(
      reader
          ->read("blocks.1.weight", 0,
                 {static_cast<std::byte*>(found.data_ptr()), found.nbytes()})
          .ok());
  EXPECT_TRUE(at::equal(found, plain.blocks[1].weight));
}

// Parts are in the order of memory, files in that of the dimensions.
TEST_F(ShardedStateTest, TransposedParametersAreSavedAndLoaded) {
  const at::Tensor expected = torch::arange(35.0).view({5, 7});
  for (const int num_saving : {1, 3}) {
    for (const int num_loading : {1, 2}) {
      const auto transposed = [](const at::Tensor& values) {
        at::Tensor weight = torch::empty({7, 5}).t();
        weight.copy_(values);
        return weight.requires_grad_();
      };
      run_ranks(num_saving, [&](const Group& group) {
        ShardedRoot root(
            {{.name = "", .parameters = {{"w", transposed(expected)}}}}, group,
            {});
        save_whole(root, path());
      });
      run_ranks(num_loading, [&](const Group& group) {
        const at::Tensor weight = transposed(torch::zeros({5, 7}));
        ShardedRoot root({{.name = "", .parameters = {{"w", weight}}}}, group,
                         {});
        load_whole(root, path());
        root.unshard();
        EXPECT_TRUE(at::equal(weight, expected))
            << num_saving << " to " << num_loading;
        root.reshard(/*writes=*/false);
      });
    }
  }
}

TEST_F(ShardedStateTest, AFileThatDoesNotFitChangesNothing) {
  run_ranks(2, [&](const Group& group) {
    Net net;
    ShardedRoot root(net.units(), group, {});
    save_whole(root, path());
  });
  const auto error_of = [](const std::function<void()>& run) {
    try {
      run();
    } catch (const c10::Error& error) {
      return std::string(error.what_without_backtrace());
    }
    return std::string();
  };
  run_ranks(2, [&](const Group& group) {
    Net other({5, 7, 3, 6, 5});
    ShardedRoot root(other.units(), group, {});
    const std::vector<at::Tensor> before = whole_of(root, other);
    EXPECT_THAT(error_of([&] { load_whole(root, path()); }),
                HasSubstr("tensor 'blocks.3.weight' is F32 of ["));
    EXPECT_THAT(error_of([&] { load_whole(root, path() + ".none"); }),
                HasSubstr("model.safetensors.none"));
    const std::vector<at::Tensor> after = whole_of(root, other);
    for (size_t i = 0; i < before.size(); ++i) {
      EXPECT_TRUE(at::equal(before[i], after[i]));
    }
  });
  // One byte of the data.
  const auto size = std::filesystem::file_size(path());
  std::fstream file(path(), std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(size) - 5);
  const char flipped = static_cast<char>(file.get() ^ 1);
  file.seekp(static_cast<std::streamoff>(size) - 5);
  file.put(flipped);
  file.close();
  run_ranks(2, [&](const Group& group) {
    Net net;
    ShardedRoot root(net.units(), group, {});
    EXPECT_THAT(error_of([&] { load_whole(root, path()); }),
                HasSubstr("blocks.3"));
  });
}

// As of hosts that have copies: whichever of them it is that reads a tensor.
TEST_F(ShardedStateTest, EachCopyOfAFileIsVerified) {
  run_ranks(2, [&](const Group& group) {
    Net net;
    ShardedRoot root(net.units(), group, {});
    save_whole(root, path());
  });
  const auto reader = SafetensorsReader::open(path());
  ASSERT_TRUE(reader.ok());
  const std::string copy = path() + ".copy";
  const auto size = std::filesystem::file_size(path());
  int64_t end = 0;  // of tensors, from the end of the file
  for (size_t i = reader->entries().size(); i-- > 0;) {
    const SafetensorsEntry& entry = reader->entries()[i];
    end += entry.num_bytes();
    std::filesystem::copy_file(
        path(), copy, std::filesystem::copy_options::overwrite_existing);
    std::fstream file(copy, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(size) - end);
    const char flipped = static_cast<char>(file.get() ^ 1);
    file.seekp(static_cast<std::streamoff>(size) - end);
    file.put(flipped);
    file.close();
    run_ranks(3, [&](const Group& group) {
      Net net;
      ShardedRoot root(net.units(), group, {});
      const std::vector<at::Tensor> before = whole_of(root, net);
      const bool has_copy = group->getRank() == 2;
      EXPECT_THAT([&] { load_whole(root, has_copy ? copy : path()); },
                  ::testing::Throws<c10::ValueError>(::testing::Property(
                      &c10::Error::what_without_backtrace,
                      HasSubstr("tensor '" + entry.name + "'"))));
      const std::vector<at::Tensor> after = whole_of(root, net);
      for (size_t j = 0; j < before.size(); ++j) {
        EXPECT_TRUE(at::equal(before[j], after[j]));
      }
    });
  }
}

// Counts what the process has allocated for tensors on the CPU while it lives,
// and not given back, on whatever thread. One at a time.
class PeakMemory final : public c10::Allocator {
 public:
  PeakMemory() : inner_(c10::GetAllocator(c10::DeviceType::CPU)) {
    c10::SetAllocator(c10::DeviceType::CPU, this, /*priority=*/1);
  }
  // Memory that was counted must be free by then.
  ~PeakMemory() override {
    EXPECT_EQ(bytes_, 0);
    c10::SetAllocator(c10::DeviceType::CPU, inner_, /*priority=*/1);
  }

  c10::DataPtr allocate(size_t num_bytes) override {
    auto counted = std::make_unique<Counted>(Counted{
        inner_->allocate(num_bytes), static_cast<int64_t>(num_bytes), this});
    const int64_t bytes = bytes_ += counted->num_bytes;
    int64_t peak = peak_bytes_;
    while (bytes > peak && !peak_bytes_.compare_exchange_weak(peak, bytes)) {
    }
    void* const data = counted->memory.get();
    return {data, counted.release(), &free, at::kCPU};
  }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    default_copy_data(to, from, num_bytes);
  }

  int64_t peak_bytes() const { return peak_bytes_; }

 private:
  struct Counted {
    c10::DataPtr memory;
    int64_t num_bytes;
    PeakMemory* counter;
  };
  static void free(void* context) {
    const std::unique_ptr<Counted> counted(static_cast<Counted*>(context));
    counted->counter->bytes_ -= counted->num_bytes;
  }

  c10::Allocator* const inner_;
  std::atomic<int64_t> bytes_ = 0;
  std::atomic<int64_t> peak_bytes_ = 0;
};

// Two units, if the last one's goes a little late, and this rank's part of one:
// however many units there are.
TEST_F(ShardedStateTest, SavingTakesMemoryForFewUnits) {
  constexpr int kNumRanks = 2;
  constexpr int kNumBlocks = 20;
  constexpr int64_t kWidth = 64;
  constexpr int64_t kUnitBytes = (kWidth + 1) * kWidth * 4;
  std::optional<PeakMemory> peak;
  run_ranks(kNumRanks, [&](const Group& group) {
    const Net net(std::vector<int64_t>(kNumBlocks + 1, kWidth));
    ShardedRoot root(net.units(), group, {});
    save_whole(root, path());  // makes what stays
    group->barrier()->wait();
    if (group->getRank() == 0) peak.emplace();
    group->barrier()->wait();
    save_whole(root, path());
    group->barrier()->wait();
    if (group->getRank() == 0) {
      EXPECT_GE(peak->peak_bytes(), kUnitBytes);
      EXPECT_LE(peak->peak_bytes(), kNumRanks * 3 * kUnitBytes);
    }
  });
  peak.reset();
}

// A part of one tensor on each rank, however many there are.
TEST_F(ShardedStateTest, LoadingTakesMemoryForOneTensor) {
  constexpr int kNumRanks = 2;
  constexpr int64_t kWidth = 64;
  constexpr int64_t kTensorBytes = kWidth * kWidth * 4;
  const std::string folder = path() + "_shards";
  for (const bool is_whole : {true, false}) {
    std::optional<PeakMemory> peak;
    run_ranks(kNumRanks, [&](const Group& group) {
      const Net net(std::vector<int64_t>(21, kWidth));
      ShardedRoot root(net.units(), group, {});
      is_whole ? save_whole(root, path()) : save_shards(root, folder);
      group->barrier()->wait();
      if (group->getRank() == 0) peak.emplace();
      group->barrier()->wait();
      is_whole ? load_whole(root, path()) : load_shards(root, folder);
      group->barrier()->wait();
      if (group->getRank() == 0) {
        EXPECT_GE(peak->peak_bytes(), kTensorBytes / kNumRanks);
        EXPECT_LE(peak->peak_bytes(), 2 * kTensorBytes);
      }
    });
    peak.reset();
  }
}

TEST_F(ShardedStateTest, AFolderThatIsMissingIsAnErrorOnAllRanks) {
  run_ranks(2, [&](const Group& group) {
    Net net;
    ShardedRoot root(net.units(), group, {});
    EXPECT_THROW(save_whole(root, path() + "/no/such/folder"), c10::Error);
    loss_of(root.forward([&] {
      return net.run(root, net.input(0, 0));
    })).backward();
    EXPECT_TRUE(root.shards()[0].grad().defined());
  });
}

}  // namespace sharded_state_test
}  // namespace brigade
