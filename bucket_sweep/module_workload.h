// A module of the user's and a function of it that gives the loss, as a
// workload.
//
// Thread safety: none.

#ifndef BRIGADE_BUCKET_SWEEP_MODULE_WORKLOAD_H_
#define BRIGADE_BUCKET_SWEEP_MODULE_WORKLOAD_H_

#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "brigade/bucket_sweep/gradient_check.h"
#include "brigade/bucket_sweep/workload.h"

namespace brigade {

// `Module`: a holder, a std::shared_ptr of a module, or a torch::jit::Module.
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

#endif  // BRIGADE_BUCKET_SWEEP_MODULE_WORKLOAD_H_
