#include "brigade/hooks/nested_tensors.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <c10/util/Exception.h>

namespace brigade {
namespace nested_tensors_detail {
namespace {

at::Tensor cast_to_dtype(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() && tensor.is_floating_point() ? tensor.to(dtype)
                                                        : tensor;
}

c10::IValue cast_to_dtype(const c10::IValue& value, at::ScalarType dtype) {
  if (value.isTensor()) return cast_to_dtype(value.toTensor(), dtype);
  if (value.isTuple()) {
    const auto& tuple = value.toTupleRef();
    std::vector<c10::IValue> parts;
    for (const c10::IValue& part : tuple.elements()) {
      parts.push_back(cast_to_dtype(part, dtype));
    }
    // An unnamed tuple's type contains the old dtypes: create a new type.
    const c10::TupleTypePtr type = tuple.type();
    return type->name()
               ? c10::ivalue::Tuple::createNamed(std::move(parts), type)
               : c10::ivalue::Tuple::create(std::move(parts));
  }
  if (value.isList()) {
    const c10::impl::GenericList list = value.toList();
    c10::impl::GenericList cast(list.elementType());
    for (const c10::IValue& part : list) {
      cast.push_back(cast_to_dtype(part, dtype));
    }
    return cast;
  }
  if (value.isGenericDict()) {
    const c10::impl::GenericDict dict = value.toGenericDict();
    c10::impl::GenericDict cast(dict.keyType(), dict.valueType());
    for (const auto& entry : dict) {
      cast.insert(entry.key(), cast_to_dtype(entry.value(), dtype));
    }
    return cast;
  }
  return value;
}

}  // namespace

void Collect::operator()(const at::Tensor& tensor) const {
  if (tensor.defined()) found.push_back(tensor);
}

void Collect::operator()(const c10::IValue& value) const {
  value.visit([this](const c10::IValue& part) {
    if (!part.isTensor()) return false;  // visit its elements
    (*this)(part.toTensor());
    return true;
  });
}

void Cast::operator()(at::Tensor& tensor) const {
  tensor = cast_to_dtype(tensor, dtype);
}

void Cast::operator()(c10::IValue& value) const {
  value = cast_to_dtype(value, dtype);
}

void Cast::operator()(const at::Tensor& tensor) const {
  TORCH_CHECK_VALUE(
      !tensor.defined() || !tensor.is_floating_point() ||
          tensor.scalar_type() == dtype,
      "output_dtype: can't cast a const tensor in the outputs from ",
      tensor.scalar_type(), " to ", dtype,
      ".\nReturn a non-const tensor, or cast it in forward.");
}

void Cast::operator()(const c10::IValue& value) const {
  for (const at::Tensor& tensor : tensors_of(value)) {
    (*this)(std::as_const(tensor));
  }
}

}  // namespace nested_tensors_detail
}  // namespace brigade
