#include "brigade/comm/errors/describe_tensor.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace brigade {

std::string describe_tensor(std::string_view name, const at::Tensor& tensor) {
  std::string text;
  if (!name.empty()) absl::StrAppend(&text, "'", std::string(name), "' ");
  absl::StrAppend(&text, c10::toString(tensor.scalar_type()), " [",
                  absl::StrJoin(tensor.sizes(), ", "), "] strides [",
                  absl::StrJoin(tensor.strides(), ", "), "] on ",
                  c10::DeviceTypeName(tensor.device().type(), true));
  return text;
}

}  // namespace brigade
