// How a tensor is described to other ranks, which hold one that must fit it.

#ifndef BRIGADE_COMM_ERRORS_DESCRIBE_TENSOR_H_
#define BRIGADE_COMM_ERRORS_DESCRIBE_TENSOR_H_

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>

namespace brigade {

// "'head.bias' Float [10] strides [1] on cpu"; without the name if it is empty.
// Device indices are left out, since ranks use devices of their own. Thread
// safety: pure.
std::string describe_tensor(std::string_view name, const at::Tensor& tensor);

}  // namespace brigade

#endif  // BRIGADE_COMM_ERRORS_DESCRIBE_TENSOR_H_
