// Under what conditions a function ran, to run it again in the same way:
// autocast, random numbers, parameters in low precision. Grad mode is on in all
// runs that are recorded.
//
// Other thread-local state is that of the thread which runs it again.
//
// Thread safety: immutable; any thread may run under it.

#ifndef BRIGADE_HOOKS_RUN_CONDITIONS_H_
#define BRIGADE_HOOKS_RUN_CONDITIONS_H_

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "brigade/hooks/parameter_casts.h"

namespace brigade {

// The states of generators at one moment.
class RandomState {
 public:
  // The CPU's generator and those of the accelerators that `inputs` are on.
  static RandomState of(std::span<const at::Tensor> inputs);

  // The present states of the same generators.
  RandomState now() const;
  void restore() const;

 private:
  void add(at::Generator generator);

  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

// This thread's autocast, for CPUs and the accelerator LibTorch was built for.
class CastState {
 public:
  static CastState now();
  void restore() const;

 private:
  struct OfDevice {
    at::DeviceType type;
    bool is_enabled;
    at::ScalarType dtype;
  };
  std::vector<OfDevice> devices_;
  bool has_cache_ = false;
};

class RunConditions {
 public:
  // Those of this moment on this thread. Random numbers only if asked for.
  // Errors: those of ParameterCasts::current().
  RunConditions(std::span<const at::Tensor> inputs, bool with_random_state);

  // While it lives, its thread runs under `conditions`, with grad mode on.
  // Random numbers that are drawn meanwhile are not missed afterwards.
  //
  // Errors: those of ParameterCasts::Scope.
  class Guard {
   public:
    explicit Guard(const RunConditions& conditions);
    ~Guard();

    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    const at::AutoGradMode grad_mode_;
    const CastState cast_before_;
    const RandomState random_before_;
    const ParameterCasts::Scope parameter_casts_;
  };

 private:
  const CastState cast_state_;
  const RandomState random_state_;  // of no generator if not asked for
  const std::shared_ptr<const ParameterCasts> parameter_casts_;  // or null
};

}  // namespace brigade

#endif  // BRIGADE_HOOKS_RUN_CONDITIONS_H_
