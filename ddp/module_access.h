// What data parallelism asks of a module, whatever kind of module it is.
//
// A module is a holder (torch::nn::Linear, or yours by TORCH_MODULE), a
// std::shared_ptr of a module, or a torch::jit::Module.
//
// Thread safety: as the module.

#ifndef BRIGADE_DDP_MODULE_ACCESS_H_
#define BRIGADE_DDP_MODULE_ACCESS_H_

#include <torch/script.h>

#include <type_traits>
#include <utility>
#include <vector>

#include "brigade/ddp/module_tensors.h"
#include "brigade/ddp/replicated_module.h"

namespace brigade {

template <typename Module>
inline constexpr bool kIsScriptModule =
    std::is_base_of_v<torch::jit::Module, Module>;

// Its tensors, and how to find them later: an nn::Module changes its buffers in
// place and may be given parameters, a script module may replace its buffers.
template <typename Module>
ModuleReplica replica_of(const Module& module) {
  if constexpr (kIsScriptModule<Module>) {
    return {.tensors = tensors_of_module(module),
            .buffers = [module] { return tensors_of_module(module).buffers; },
            .view = {}};
  } else {
    ModuleTensors tensors =
        tensors_of_module(static_cast<const torch::nn::Module&>(*module));
    return {.tensors = tensors,
            .buffers = [buffers = tensors.buffers] { return buffers; },
            .view = {
                .registrations =
                    [module](Registrations& found) {
                      append_registrations(*module, found);
                    },
                .parameters =
                    [module] {
                      return tensors_of_module(
                                 static_cast<const torch::nn::Module&>(*module))
                          .parameters;
                    }}};
  }
}

// Its forward, with any arguments and result. A script module takes its
// arguments one by one, or as one vector of IValues.
template <typename Module, typename... Args>
auto call_module(Module& module, Args&&... args) {
  if constexpr (!kIsScriptModule<Module>) {
    return module->forward(std::forward<Args>(args)...);
  } else if constexpr (sizeof...(Args) == 1 &&
                       (std::is_same_v<std::remove_cvref_t<Args>,
                                       std::vector<c10::IValue>> &&
                        ...)) {
    return module.forward(std::forward<Args>(args)...);
  } else {
    return module.forward(
        std::vector<c10::IValue>{c10::IValue(std::forward<Args>(args))...});
  }
}

}  // namespace brigade

#endif  // BRIGADE_DDP_MODULE_ACCESS_H_
