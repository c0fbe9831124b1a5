// Checkpoints of shards on a device: files are written from the host, and read
// into it.

#include <torch/torch.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "brigade/comm/recording_group.h"
#include "brigade/fsdp/segmented_model.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

namespace fs = std::filesystem;

using simulated::on_device;

// One rank: in a group of alike ones there are no peers to write the others'.
class ShardedFilesTest : public simulated::StreamTest {
 protected:
  // A unit whose parameters are `value`, one of them not in C order.
  struct Training {
    explicit Training(double value)
        : parameters({at::full({3, 2}, value, on_device()),
                      at::full({2, 3}, value, on_device()).t(),
                      at::full({5}, value, on_device())}),
          model(
              make_sharded_units({unit_of(parameters)}, recording.group(), {}),
              recording.group(), {}),
          optimizer(parameters, 0.5) {}

    static UnitRequest unit_of(std::vector<at::Tensor>& parameters) {
      UnitRequest unit = {.name = "unit"};
      for (at::Tensor& parameter : parameters) {
        unit.parameters.push_back(
            {.name = c10::str("p", unit.parameters.size()),
             .tensor = parameter.requires_grad_()});
      }
      return unit;
    }

    void step() {
      const at::NoGradGuard no_grad;
      for (const at::Tensor& parameter : parameters) {
        parameter.mutable_grad() = at::ones_like(parameter);
      }
      optimizer.step();
    }

    std::vector<at::Tensor> values() const {
      std::vector<at::Tensor> values;
      for (const at::Tensor& parameter : parameters) {
        values.push_back(shard_of(parameter)->local.cpu());
      }
      return values;
    }

    RecordingGroup recording{1};
    std::vector<at::Tensor> parameters;
    SegmentedModel model;
    torch::optim::Adagrad optimizer;
  };

  // What is loaded goes on as what was saved would.
  template <typename Save, typename Load>
  static void expect_same(const Save& save, const Load& load) {
    Training saved(3);
    saved.step();
    save(saved);
    Training loaded(7);
    load(loaded);
    for (int step = 0; step < 2; ++step) {
      const std::vector<at::Tensor> expected = saved.values();
      const std::vector<at::Tensor> found = loaded.values();
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(at::equal(found[i], expected[i]))
            << "parameter " << i << ": " << found[i] << ", expected "
            << expected[i];
      }
      saved.step();
      loaded.step();
    }
  }

  void SetUp() override {
    StreamTest::SetUp();
    base_ = fs::path(::testing::TempDir()) /
            ("brigade_device_shards_" + std::to_string(getpid()));
    fs::create_directories(base_);
  }
  void TearDown() override {
    fs::remove_all(base_);
    StreamTest::TearDown();
  }

  std::string path() const { return base_ / "checkpoint"; }

 private:
  fs::path base_;
};

TEST_F(ShardedFilesTest, PartsAreSavedAndLoaded) {
  expect_same(
      [&](Training& t) {
        save_checkpoint(path(), checkpoint_model(t.model), t.optimizer);
      },
      [&](Training& t) {
        load_checkpoint(path(), checkpoint_model(t.model), t.optimizer);
      });
}

TEST_F(ShardedFilesTest, WholeTensorsAreSavedAndLoaded) {
  expect_same(
      [&](Training& t) {
        save_checkpoint(path() + ".safetensors", checkpoint_model(t.model),
                        t.optimizer);
      },
      [&](Training& t) {
        load_checkpoint(path() + ".safetensors", checkpoint_model(t.model),
                        t.optimizer);
      });
}

}  // namespace
}  // namespace brigade
