// What a forward gets and returns in another dtype than its caller's.
//
// Thread safety: values and pure functions.

#ifndef BRIGADE_FSDP_FORWARD_DTYPES_H_
#define BRIGADE_FSDP_FORWARD_DTYPES_H_

#include <c10/core/ScalarType.h>

#include <optional>
#include <utility>

#include "brigade/hooks/nested_tensors.h"

namespace brigade {

// What floating tensors are cast to; unset: they stay as they are.
struct ForwardDtypes {
  std::optional<at::ScalarType> inputs = std::nullopt;
  std::optional<at::ScalarType> outputs = std::nullopt;
};

// What `forward` returns for these inputs, both cast: inputs in the nests of
// hooks/nested_tensors.h, outputs in those of hooks/nested_tensors.h.
//
// Errors: those of `forward`; cast_tensors()'.
template <typename Forward, typename... Inputs>
auto forward_in(const ForwardDtypes& dtypes, const Forward& forward,
                Inputs&&... inputs) {
  auto outputs = forward(
      ForwardArgument<Inputs>(std::forward<Inputs>(inputs), dtypes.inputs)
          .get()...);
  if (dtypes.outputs) cast_tensors(outputs, *dtypes.outputs);
  return outputs;
}

}  // namespace brigade

#endif  // BRIGADE_FSDP_FORWARD_DTYPES_H_
