#include "brigade/hooks/tensor_casts.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <c10/util/Exception.h>

#include <vector>

namespace brigade {

at::Tensor in_precision(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() && tensor.is_floating_point() ? tensor.to(dtype)
                                                        : tensor;
}

c10::IValue in_precision(const c10::IValue& value, at::ScalarType dtype) {
  if (value.isTensor()) return in_precision(value.toTensor(), dtype);
  if (value.isTuple()) {
    const auto& tuple = value.toTupleRef();
    std::vector<c10::IValue> parts;
    for (const c10::IValue& part : tuple.elements()) {
      parts.push_back(in_precision(part, dtype));
    }
    // The type of a tuple without a name says what dtypes its tensors had.
    const c10::TupleTypePtr type = tuple.type();
    return type->name()
               ? c10::ivalue::Tuple::createNamed(std::move(parts), type)
               : c10::ivalue::Tuple::create(std::move(parts));
  }
  if (value.isList()) {
    const c10::impl::GenericList list = value.toList();
    c10::impl::GenericList cast(list.elementType());
    for (const c10::IValue& part : list)
      cast.push_back(in_precision(part, dtype));
    return cast;
  }
  if (value.isGenericDict()) {
    const c10::impl::GenericDict dict = value.toGenericDict();
    c10::impl::GenericDict cast(dict.keyType(), dict.valueType());
    for (const auto& entry : dict) {
      cast.insert(entry.key(), in_precision(entry.value(), dtype));
    }
    return cast;
  }
  return value;
}

namespace tensor_casts_detail {

void require_cast(std::span<const at::Tensor> tensors, at::ScalarType dtype) {
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(
        !tensor.is_floating_point() || tensor.scalar_type() == dtype,
        "output_dtype: expected outputs whose tensors can be replaced by ones "
        "in ",
        dtype, ", found one in ", tensor.scalar_type(),
        " in a type of which brigade can only read them.\nOverload "
        "visit_tensors() for it (brigade/hooks/tensor_casts.h), or cast in "
        "forward.");
  }
}

}  // namespace tensor_casts_detail

}  // namespace brigade
