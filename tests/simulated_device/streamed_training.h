// Training steps of a reducer, and of a sharded model, on a simulated device in
// a group of identical ranks, and the gradients that they must leave.

#ifndef BRIGADE_TESTS_SIMULATED_DEVICE_STREAMED_TRAINING_H_
#define BRIGADE_TESTS_SIMULATED_DEVICE_STREAMED_TRAINING_H_

#include <c10/core/StreamGuard.h>

#include <chrono>
#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "brigade/fsdp/segmented_model.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/simulated_device/streamed_model.h"
#include "brigade/tests/support/recording_group.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gtest/gtest.h"

namespace brigade::testing {

constexpr int kWorldSize = 4;

// How long the host waits for a status.
void set_timeout(RecordingGroup& recording, std::chrono::milliseconds timeout);

class StreamedTraining {
 public:
  // Replica r is on device r. The calling thread's streams are the layout's
  // until the end.
  StreamedTraining(
      const StreamLayout& layout, int num_replicas = 1,
      const StreamedModel::Sizes& sizes = StreamedModel::default_sizes(),
      at::ScalarType dtype = at::kFloat);

  // To be called once. Buckets of 64 bytes unless `options` say otherwise.
  void make_reducer(ReducerOptions options);
  void end_reducer() { reducer_.reset(); }

  RecordingGroup& recording() { return recording_; }
  Reducer& reducer() { return *reducer_; }
  const StreamedModel& model() const { return models_[0]; }

  // The losses of all replicas, on device 0.
  at::Tensor loss(int step, const std::set<size_t>& left_out = {});

  // Forward and a backward that is reduced.
  void step(int step, const std::set<size_t>& left_out = {});

  // Gradients are now `factor` times those of step `step`, but for these.
  void expect_gradients(int step, const std::set<size_t>& but_for = {},
                        double factor = 1.0);
  void expect_gradient(size_t parameter, int step, double factor = 1.0);

  void update();
  void zero_grad(bool set_to_none = true);

 private:
  const StreamLayout layout_;
  std::optional<c10::MultiStreamGuard> on_caller_;
  RecordingGroup recording_{kWorldSize};
  std::vector<StreamedModel> models_;
  std::optional<Reducer> reducer_;
  ExpectedGradients expected_;
};

struct ShardedProgram {
  // Inner units compute on the stream of their first parameter, and not on the
  // caller's.
  bool calls_on_own_stream = false;
  std::set<size_t> frozen = {};  // parameters
  // Each inner unit is computed again in backward.
  bool is_checkpointed = false;
  // Gradients are written where gradient_slot() says.
  bool writes_into_slots = false;
  // By unit; others are on the model's.
  std::map<size_t, UnitMesh> meshes = {};
  std::set<size_t> spanning = {};  // units, as norms of blocks are
  // How long the host waits for a status.
  std::optional<std::chrono::milliseconds> timeout = std::nullopt;
};

class ShardedTraining {
 public:
  // Of two parameters each. Unit 0 is around the others, and uses its own last.
  static constexpr size_t kNumUnits = 3;

  // The calling thread's stream is the layout's until the end.
  ShardedTraining(const StreamLayout& layout, const FullyShardOptions& options,
                  ShardedProgram program = {});

  RecordingGroup& recording() { return recording_; }
  SegmentedModel& sharded() { return *sharded_; }
  const at::Tensor& parameter(size_t unit, size_t i) const;
  // Gradients that were written into slots.
  int num_in_slots() const { return num_in_slots_; }

  // Without the inner units that are left out.
  at::Tensor forward(int step, const std::set<size_t>& left_out = {});
  // Calls these inner units, in that order.
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
  at::Tensor call(size_t unit, const at::Tensor& input, int step);
  at::Tensor terms(size_t unit, at::Tensor h, int step) const;

  const ShardedProgram program_;
  const c10::StreamGuard on_caller_;
  RecordingGroup recording_{kWorldSize};
  StreamedModel model_;
  ExpectedGradients expected_;
  std::optional<SegmentedModel> sharded_;
  int num_in_slots_ = 0;
};

// Whether a call of a unit computes on one stream. A checkpoint orders nothing
// else: one of its nodes recomputes tensors that nodes on other streams read.
bool has_one_stream(const StreamLayout& layout, const ShardedProgram& program);

// On every layout, `body` with a training that ends before races are counted.
template <typename Body>
void on_every_layout(const FullyShardOptions& options,
                     const ShardedProgram& program, const Body& body) {
  for (const StreamLayout& layout : all_stream_layouts()) {
    if (program.is_checkpointed && !has_one_stream(layout, program)) continue;
    SCOPED_TRACE(name_of(layout));
    {
      ShardedTraining training(layout, options, program);
      body(training);
    }
    simulated::expect_no_races();
  }
}

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_SIMULATED_DEVICE_STREAMED_TRAINING_H_
