#include "brigade/ddp/module_tensors.h"

#include <unordered_set>

namespace brigade {
namespace {

// Works for nn's dictionaries and jit's lists of named tensors alike: `name_of`
// and `tensor_of` read one entry.
template <typename Entries, typename NameOf, typename TensorOf>
std::vector<NamedTensor> list_once(const Entries& entries, NameOf name_of,
                                   TensorOf tensor_of) {
  std::vector<NamedTensor> tensors;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& entry : entries) {
    const at::Tensor tensor = tensor_of(entry);
    if (!tensor.defined()) continue;
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    tensors.push_back({name_of(entry), tensor});
  }
  return tensors;
}

}  // namespace

ModuleTensors tensors_of_module(const torch::nn::Module& module) {
  const auto name_of = [](const auto& item) { return item.key(); };
  const auto tensor_of = [](const auto& item) { return item.value(); };
  return {
      .module_name = module.name(),
      .parameters = list_once(module.named_parameters(), name_of, tensor_of),
      .buffers = list_once(module.named_buffers(), name_of, tensor_of)};
}

ModuleTensors tensors_of_module(const torch::jit::Module& module) {
  const auto name_of = [](const auto& item) { return item.name; };
  const auto tensor_of = [](const auto& item) { return item.value; };
  return {
      .module_name = module.type()->repr_str(),
      .parameters = list_once(module.named_parameters(), name_of, tensor_of),
      .buffers = list_once(module.named_buffers(), name_of, tensor_of)};
}

}  // namespace brigade
