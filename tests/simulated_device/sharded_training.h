// Training steps of a sharded model on a simulated device, in a group of
// identical ranks, and what gradients must be afterwards.
//
// Values are looked at when it is all over: see streamed_training.h.

#ifndef BRIGADE_TESTS_SIMULATED_DEVICE_SHARDED_TRAINING_H_
#define BRIGADE_TESTS_SIMULATED_DEVICE_SHARDED_TRAINING_H_

#include <c10/core/StreamGuard.h>

#include <chrono>
#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "brigade/comm/recording_group.h"
#include "brigade/fsdp/segmented_model.h"
#include "brigade/hooks/checkpoint.h"
#include "brigade/tests/simulated_device/stream_layout.h"
#include "brigade/tests/simulated_device/streamed_model.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gtest/gtest.h"

namespace brigade::testing {

struct ShardedProgram {
  // Inner units compute on the stream of their first parameter, and not on the
  // caller's.
  bool calls_on_own_stream = false;
  // Parameters.
  std::set<size_t> frozen = {};
  // Each inner unit is computed again in backward.
  std::optional<CheckpointOptions> checkpoint = std::nullopt;
  // Gradients are written where gradient_slot() says.
  bool writes_into_slots = false;
  // By unit; others are on the model's.
  std::map<size_t, UnitMesh> meshes = {};
  // Units, as norms of blocks are.
  std::set<size_t> spanning = {};
  // How long the host waits for a status.
  std::optional<std::chrono::milliseconds> timeout = std::nullopt;
};

class ShardedTraining {
 public:
  static constexpr int kNumRanks = 4;
  // Of two parameters each. Unit 0 is around the others, and uses its own last.
  static constexpr size_t kNumUnits = 3;

  // The calling thread's stream is the layout's until the end.
  ShardedTraining(const StreamLayout& layout, const FullyShardOptions& options,
                  ShardedProgram program = {});

  // Fails the current test where gradients were not what was expected.
  ~ShardedTraining();

  RecordingGroup& recording() { return recording_; }
  SegmentedModel& sharded() { return *sharded_; }
  const StreamedModel& model() const { return model_; }
  const at::Tensor& parameter(size_t unit, size_t i) const;
  // Gradients that were written into slots.
  int num_in_slots() const { return num_in_slots_; }

  // Without the inner units that are left out.
  at::Tensor forward(int step, const std::set<size_t>& left_out = {});
  // Of inner units those, in that order, each as often as it is named.
  at::Tensor forward_through(const std::vector<size_t>& units, int step);
  void step(int step, const std::set<size_t>& left_out = {});

  // Gradients are now `factor` times those of step `step`, but for these units.
  void expect_gradients(int step, double factor = 1.0,
                        const std::set<size_t>& but_for = {});
  // The same of one unit.
  void expect_gradients_of(size_t unit, int step, double factor);

  // As an optimizer on the current stream, which keeps parameters as they are,
  // and sets gradients to none.
  void update();

 private:
  struct Expected {
    at::Tensor found;  // this rank's piece
    int64_t offset;
    size_t parameter;
    int step;
    double factor;
  };

  at::Tensor call(size_t unit, const at::Tensor& input, int step);
  at::Tensor terms(size_t unit, at::Tensor h, int step) const;

  const ShardedProgram program_;
  const c10::StreamGuard on_caller_;
  RecordingGroup recording_;
  StreamedModel model_;
  std::optional<SegmentedModel> sharded_;
  int num_in_slots_ = 0;
  std::vector<Expected> expected_;
};

// A call of a unit, with all that it computes. A checkpoint orders nothing
// else: what one node of it computes again, nodes on other streams read.
bool has_one_stream(const StreamLayout& layout, const ShardedProgram& program);

// On every layout, `body` with a training that ends before races are counted.
template <typename Body>
void on_every_layout(const FullyShardOptions& options,
                     const ShardedProgram& program, const Body& body) {
  for (const StreamLayout& layout : all_stream_layouts()) {
    if (program.checkpoint && !has_one_stream(layout, program)) continue;
    SCOPED_TRACE(name_of(layout));
    {
      ShardedTraining training(layout, options, program);
      body(training);
    }
    simulated::expect_no_races();
  }
}

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_SIMULATED_DEVICE_SHARDED_TRAINING_H_
