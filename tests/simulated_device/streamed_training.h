// Training steps with a reducer on a simulated device, in a group of identical
// ranks, and what gradients must be afterwards.
//
// Values are looked at when it is all over: who reads them waits for the
// device, and orders by that what nothing else does.

#ifndef BRIGADE_TESTS_SIMULATED_DEVICE_STREAMED_TRAINING_H_
#define BRIGADE_TESTS_SIMULATED_DEVICE_STREAMED_TRAINING_H_

#include <c10/core/StreamGuard.h>

#include <cstddef>
#include <optional>
#include <set>
#include <vector>

#include "brigade/comm/recording_group.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/simulated_device/stream_layout.h"
#include "brigade/tests/simulated_device/streamed_model.h"

namespace brigade::testing {

constexpr int kWorldSize = 4;

class StreamedTraining {
 public:
  // Replica r is on device r. The calling thread's streams are the layout's
  // until the end.
  StreamedTraining(const StreamLayout& layout, int num_replicas = 1,
                   StreamedModel::Sizes sizes = StreamedModel::default_sizes(),
                   at::ScalarType dtype = at::kFloat);

  // Fails the current test where gradients were not what was expected.
  ~StreamedTraining();

  // To be called once. Buckets of 64 bytes unless `options` say otherwise.
  void make_reducer(ReducerOptions options);
  void end_reducer() { reducer_.reset(); }

  RecordingGroup& recording() { return recording_; }
  Reducer& reducer() { return *reducer_; }
  const StreamedModel& model(size_t replica = 0) { return models_[replica]; }

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
  struct Expected {
    at::Tensor found;
    at::Tensor expected;
    size_t parameter;
    int step;
  };

  const StreamLayout layout_;
  std::optional<c10::MultiStreamGuard> on_caller_;
  RecordingGroup recording_;
  std::vector<StreamedModel> models_;
  std::optional<Reducer> reducer_;
  std::vector<Expected> expected_;
};

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_SIMULATED_DEVICE_STREAMED_TRAINING_H_
