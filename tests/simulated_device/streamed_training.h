// Training steps of a reducer and of a sharded model on a simulated device, in
// a group of identical ranks, with every layout of streams.
//
// The model runs its forward on the streams of a layout and orders them
// correctly. LibTorch guarantees a correct backward for each of these layouts.
// Gradients are known integers. No code here blocks the host, which would hide
// races.

#ifndef BRIGADE_TESTS_SIMULATED_DEVICE_STREAMED_TRAINING_H_
#define BRIGADE_TESTS_SIMULATED_DEVICE_STREAMED_TRAINING_H_

#include <c10/core/StreamGuard.h>
#include <torch/torch.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "brigade/fsdp/segmented_model.h"
#include "brigade/hooks/autograd_hooks.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/support/recording_group.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gtest/gtest.h"

namespace brigade::testing {

struct StreamLayout {
  // Streams that use parameters and compute their gradients.
  enum class Forward {
    kCaller,  // that of the thread that calls backward
    kSide,    // one other stream
    kTwo,     // two other streams in turn
    kOwn,     // one for each parameter
    kBoth,    // each parameter on its own and on the next one's
  };

  Forward forward = Forward::kCaller;
  // Backward is called on a stream other than the default one.
  bool calls_from_side = false;
  // The reducer and its first buckets are made on another stream.
  bool is_made_on_side = false;
  // Gradients are accumulated and buckets packed on the stream that used the
  // parameter in forward; otherwise on the stream that made the reducer.
  bool accumulates_in_forward = false;
};

std::string name_of(const StreamLayout& layout);

// Returns all layouts; under AddressSanitizer, one for each Forward.
const std::vector<StreamLayout>& all_stream_layouts();

class StreamedModel {
 public:
  // Parameters are ones. Backward is called on the current stream.
  explicit StreamedModel(const StreamLayout& layout, int device_index = 0);

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  size_t size() const { return parameters_.size(); }

  // Makes forward compute with `read(parameter)`, on the stream that uses the
  // parameter.
  void read_through(std::function<at::Tensor(const at::Tensor&)> read) {
    read_ = std::move(read);
  }

  // Returns the stream on which forward uses parameter i.
  const c10::Stream& stream_of(size_t i) const { return streams_[i]; }

  // Returns the gradient of loss(step) for parameter i, on the CPU.
  at::Tensor gradient(size_t i, int step) const {
    return weights_on_cpu_[i] * (step + 1) * (uses_both_ ? 2 : 1);
  }

  // Computes after the work of the current stream, which then waits for it.
  at::Tensor loss(int step, const std::set<size_t>& left_out = {}) const;

  // Returns the contribution of parameter i to the loss.
  at::Tensor term(size_t i, int step) const;

  // Steps like an optimizer with learning rate 0, on the current stream.
  void update() const;

  void zero_grad(bool set_to_none) const;

 private:
  at::Tensor use(size_t i, const c10::Stream& stream, int step) const;

  const bool uses_both_;
  const int device_index_;
  std::function<at::Tensor(const at::Tensor&)> read_;  // empty: identity
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> weights_on_cpu_;  // by parameter, integers
  std::vector<at::Tensor> weights_;
  std::vector<c10::Stream> streams_;   // by parameter
  std::vector<NodePtr> accumulators_;  // fix the accumulating streams
};

// Copies of gradients and their expected values. The destructor compares them,
// since a comparison blocks the host and would hide missing waits.
class ExpectedGradients {
 public:
  // Fails the current test for each difference.
  ~ExpectedGradients();
  // REQUIRES: the device's current stream is ordered after the write of
  // `found`.
  void add(const at::Tensor& found, at::Tensor expected,
           const std::string& name);

 private:
  struct Expected {
    at::Tensor found;
    at::Tensor expected;
    std::string name;
  };
  std::vector<Expected> expected_;
};

constexpr int kWorldSize = 4;

// Sets how long the host waits for a status.
void set_timeout(RecordingGroup& recording, std::chrono::milliseconds timeout);

class StreamedTraining {
 public:
  // Replica r is on device r. Sets the calling thread's streams until
  // destroyed.
  explicit StreamedTraining(const StreamLayout& layout, int num_replicas = 1);

  // Call it once. Buckets have 64 bytes by default.
  void make_reducer(ReducerOptions options);
  void end_reducer() { reducer_.reset(); }

  RecordingGroup& recording() { return recording_; }
  Reducer& reducer() { return *reducer_; }
  const StreamedModel& model() const { return models_[0]; }

  // Returns the sum of the losses of all replicas, on device 0.
  at::Tensor loss(int step, const std::set<size_t>& left_out = {});

  // Runs a forward and a synchronized backward.
  void step(int step, const std::set<size_t>& left_out = {});

  // Expects `factor` times the gradients of step `step`.
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
  // Inner units compute on the stream of their first parameter, not on the
  // caller's.
  bool calls_on_own_stream = false;
  std::set<size_t> frozen = {};  // parameters
  // Backward recomputes each inner unit.
  bool is_checkpointed = false;
  // Gradients are written into gradient_slot().
  bool writes_into_slots = false;
  // By unit; other units use the model's mesh.
  std::map<size_t, UnitMesh> meshes = {};
  std::set<size_t> spanning = {};  // units with spans_segments
  // How long the host waits for a status.
  std::optional<std::chrono::milliseconds> timeout = std::nullopt;
};

class ShardedTraining {
 public:
  // Each has two parameters. Unit 0 encloses the others and computes last.
  static constexpr size_t kNumUnits = 3;

  // Sets the calling thread's stream until destroyed.
  ShardedTraining(const StreamLayout& layout, const FullyShardOptions& options,
                  ShardedProgram program = {});

  RecordingGroup& recording() { return recording_; }
  SegmentedModel& sharded() { return *sharded_; }
  const at::Tensor& parameter(size_t unit, size_t i) const;
  // Number of gradients that were written into slots.
  int num_in_slots() const { return num_in_slots_; }

  // Runs the inner units that are not left out.
  at::Tensor forward(int step, const std::set<size_t>& left_out = {});
  // Runs these inner units in this order.
  at::Tensor forward_through(const std::vector<size_t>& units, int step);
  void step(int step, const std::set<size_t>& left_out = {});

  // Expects `factor` times the gradients of step `step`.
  void expect_gradients(int step, double factor = 1.0,
                        const std::set<size_t>& but_for = {});
  void expect_gradients_of(size_t unit, int step, double factor);

  // Steps like an optimizer with learning rate 0, on the current stream, and
  // sets gradients to none.
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

// Returns true if each unit computes on one stream. Activation checkpoints
// require it: one of their nodes recomputes tensors that nodes on other streams
// read.
bool has_one_stream(const StreamLayout& layout, const ShardedProgram& program);

// Runs `body` on every layout, then expects no races.
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
