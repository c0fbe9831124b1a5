// A model whose steps are timed: how its gradients come to be, and what they
// must be after averaging. Knows nothing of buckets or clocks.
//
// Thread safety: none; backwards may run on other threads.

#ifndef BRIGADE_BUCKET_SWEEP_WORKLOAD_H_
#define BRIGADE_BUCKET_SWEEP_WORKLOAD_H_

#include <ATen/ATen.h>

#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

namespace brigade {

class SweepWorkload {
 public:
  virtual ~SweepWorkload() = default;

  // Those that are trained: what a reducer is made of.
  virtual const std::vector<at::Tensor>& parameters() const = 0;

  // Makes the parameters' gradients undefined, and does what a step needs but
  // must not be timed.
  virtual void set_up_step() = 0;

  // The loss, on which backward() can be called once per set_up_step().
  virtual at::Tensor forward() = 0;

  // Between these, gradients are such that one in the wrong place shows, and
  // what is needed to judge them is kept: slower, and not timed.
  virtual void begin_check() {}
  virtual void end_check() {}

  // Whether the parameters' gradients are the averages over all ranks, for this
  // rank. May be collective. REQUIRES: the last step began after begin_check().
  virtual bool gradients_are_averages() = 0;
};

// Whether `.grad` holds the average of what the ranks' backwards computed.
// Takes the gradients of one backward where autograd hands them out, before
// anything else sees them, so the loss need not be the same twice.
class GradientCheck {
 public:
  // Listens to the parameters until it is destroyed.
  GradientCheck(std::vector<at::Tensor> parameters,
                c10::intrusive_ptr<c10d::ProcessGroup> group);
  ~GradientCheck();
  GradientCheck(const GradientCheck&) = delete;
  GradientCheck& operator=(const GradientCheck&) = delete;

  // Collective; the answer is this rank's. REQUIRES: one backward since
  // construction.
  bool gradients_are_averages() const;

 private:
  bool is_average(size_t parameter) const;
  at::Tensor average(at::Tensor tensor) const;

  const std::vector<at::Tensor> parameters_;
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::vector<at::Tensor> local_;  // undefined: no gradient came
  std::vector<unsigned> hooks_;
};

// A module of the user's and a function of it that gives the loss. `Module`: a
// holder, a std::shared_ptr of a module, or a torch::jit::Module.
// `Loss`: takes it by reference, runs forward on this rank's data.
template <typename Module, typename Loss>
class ModuleWorkload : public SweepWorkload {
 public:
  ModuleWorkload(Module module, Loss loss,
                 c10::intrusive_ptr<c10d::ProcessGroup> group)
      : module_(std::move(module)),
        loss_(std::move(loss)),
        group_(std::move(group)) {
    const auto add = [this](const at::Tensor& parameter) {
      if (parameter.requires_grad()) parameters_.push_back(parameter);
    };
    if constexpr (requires { module_->parameters(); }) {
      for (const at::Tensor& parameter : module_->parameters()) add(parameter);
    } else {
      for (const at::Tensor& parameter : module_.parameters()) add(parameter);
    }
  }

  const std::vector<at::Tensor>& parameters() const override {
    return parameters_;
  }
  void set_up_step() override {
    for (const at::Tensor& parameter : parameters_) {
      parameter.mutable_grad().reset();
    }
  }
  at::Tensor forward() override { return loss_(module_); }
  void begin_check() override { check_.emplace(parameters_, group_); }
  void end_check() override { check_.reset(); }
  bool gradients_are_averages() override {
    return check_->gradients_are_averages();
  }

 private:
  Module module_;
  Loss loss_;
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::vector<at::Tensor> parameters_;
  std::optional<GradientCheck> check_;
};

}  // namespace brigade

#endif  // BRIGADE_BUCKET_SWEEP_WORKLOAD_H_
