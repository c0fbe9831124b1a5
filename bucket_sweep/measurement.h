// Times the training steps of a model with several bucket sizes; knows no
// statistics.
//
// All arms, and the same steps without a reducer, take turns in one run, in
// alternating order, so that a slow minute of the machine hits all of them.

#ifndef BRIGADE_BUCKET_SWEEP_MEASUREMENT_H_
#define BRIGADE_BUCKET_SWEEP_MEASUREMENT_H_

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/reducer/reducer_options.h"

namespace brigade {

// A model whose steps are timed: the source of its gradients, and their check
// after averaging. Knows nothing of buckets or clocks.
//
// Thread safety: none; backwards may run on other threads.
class SweepWorkload {
 public:
  virtual ~SweepWorkload() = default;

  // Those that are trained.
  virtual const std::vector<at::Tensor>& parameters() const = 0;

  // Makes the parameters' gradients undefined, and other preparations that must
  // not be timed.
  virtual void set_up_step() = 0;

  // The loss, on which backward() can be called once per set_up_step().
  virtual at::Tensor forward() = 0;

  // Steps between these can be checked; they are slower, and not timed.
  virtual void begin_check() {}
  virtual void end_check() {}

  // Whether the parameters' gradients are the averages over all ranks, for this
  // rank. May be collective. REQUIRES: the last step began after begin_check().
  virtual bool gradients_are_averages() = 0;
};

// A module's parameters and a function that runs its forward on this rank's
// data and returns the loss. Its check records gradients where autograd hands
// them out, before anything else sees them, so the loss need not be the same
// twice.
class ModuleWorkload final : public SweepWorkload {
 public:
  // Skips parameters that require no gradient.
  ModuleWorkload(const std::vector<at::Tensor>& parameters,
                 std::function<at::Tensor()> loss,
                 c10::intrusive_ptr<c10d::ProcessGroup> group);
  ~ModuleWorkload() override { end_check(); }

  const std::vector<at::Tensor>& parameters() const override {
    return parameters_;
  }
  void set_up_step() override;
  at::Tensor forward() override { return loss_(); }
  void begin_check() override;
  void end_check() override;
  bool gradients_are_averages() override;  // collective

 private:
  bool is_average(size_t parameter) const;
  at::Tensor average(const at::Tensor& tensor) const;

  std::vector<at::Tensor> parameters_;
  const std::function<at::Tensor()> loss_;
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  // While gradients are checked.
  std::vector<at::Tensor> local_;  // undefined: no gradient came
  std::vector<unsigned> hooks_;
};

// A bucket size that a sweep tries.
struct BucketArm {
  std::string label;
  std::vector<int64_t> caps_bytes;  // ReducerOptions::bucket_caps_bytes
};

// The reducer's default.
BucketArm default_arm();

// "0.25": buckets of so many MiB; "one" bucket for all parameters; one for
// "each". Errors: ValueError if it is none of these.
BucketArm arm_of(std::string_view cap);
std::vector<BucketArm> arms_of(const std::vector<std::string>& caps);

// One per parameter, 0.25 to 100 MiB, and one for all.
std::vector<BucketArm> usual_arms();

struct SweepOptions {
  int64_t rounds = 8;  // visits to each arm
  int64_t steps = 3;   // timed per visit, after one that is not

  // How the model is trained, but for sizes of buckets and the plan. With a
  // comm hook that does anything but average, sums are not right.
  ReducerOptions reducer = {};
};

// Arms that give the same buckets, and their times on the slowest rank.
struct SweepTrack {
  std::vector<BucketArm> arms = {};  // none: without a reducer
  std::vector<std::vector<size_t>> buckets = {};
  std::vector<int64_t> bucket_bytes = {};
  std::vector<std::vector<double>> rounds_ms = {};  // by round, then by step
  std::vector<double> alone_ms = {};  // the buckets' all-reduces, by round
  bool sums_verified = false;         // on all ranks
};

struct SweepSamples {
  int64_t num_parameters = 0;
  int64_t gradient_bytes = 0;
  std::vector<std::vector<double>> local_ms =
      {};                               // without a reducer, by round
  std::vector<SweepTrack> tracks = {};  // the first has the default's buckets
};

// Collective. Times steps with the default's buckets and those of each arm.
// Parameters keep their values and end without gradients. `after_visit` may be
// null; it is called at most (arms + 2) * (rounds + 1) times.
//
// Errors: ValueError if rounds or steps are < 1 or there is no parameter; what
// a Reducer throws. Thread safety: one call at a time.
SweepSamples measure(
    SweepWorkload& workload, const std::vector<BucketArm>& arms,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const SweepOptions& options = {},
    const std::function<void(const std::string& arm)>& after_visit = nullptr);

}  // namespace brigade

#endif  // BRIGADE_BUCKET_SWEEP_MEASUREMENT_H_
