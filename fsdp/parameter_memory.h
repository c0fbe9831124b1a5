// Which parameter has which bytes. Those of one storage may lie side by side,
// as an LSTM's do that cuDNN has flattened.
//
// Thread safety: none.

#ifndef BRIGADE_FSDP_PARAMETER_MEMORY_H_
#define BRIGADE_FSDP_PARAMETER_MEMORY_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>

namespace brigade {

class ParameterMemory {
 public:
  // Null if nobody has any of the tensor's memory, which is `words`' then.
  const std::string* take(const at::Tensor& tensor, std::string words);

  // Who has some of it, or null.
  const std::string* owner_of(const at::Tensor& tensor) const;

 private:
  struct Owner {
    int64_t end = 0;
    std::string words;
  };
  using Owners = std::map<int64_t, Owner>;  // by the bytes where they begin

  std::unordered_map<const void*, Owners> by_storage_;
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_PARAMETER_MEMORY_H_
