// The tensors of a module, with their names: what data parallelism needs to
// know of it.
//
// Thread safety: reads the module; nothing may change it meanwhile.

#ifndef BRIGADE_DDP_MODULE_TENSORS_H_
#define BRIGADE_DDP_MODULE_TENSORS_H_

#include <torch/nn/module.h>
#include <torch/script.h>

#include <string>
#include <vector>

namespace brigade {

struct NamedTensor {
  std::string name;  // "features.0.weight"
  at::Tensor tensor;
};

// In registration order. A tensor that is registered under several names is
// listed once, under the first.
struct ModuleTensors {
  std::string module_name;
  std::vector<NamedTensor> parameters;
  std::vector<NamedTensor> buffers;
};

ModuleTensors tensors_of_module(const torch::nn::Module& module);
ModuleTensors tensors_of_module(const torch::jit::Module& module);

}  // namespace brigade

#endif  // BRIGADE_DDP_MODULE_TENSORS_H_
