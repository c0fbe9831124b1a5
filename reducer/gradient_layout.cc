#include "brigade/reducer/gradient_layout.h"

#include <c10/util/Exception.h>

namespace brigade {

void check_gradient(const ParameterTable& table, size_t parameter,
                    const at::Tensor& gradient) {
  const at::Tensor& expected = table[parameter];
  TORCH_CHECK(gradient.layout() == at::kStrided, "the gradient of ",
              table.name_of(parameter),
              " must be dense, it is sparse.\n"
              "Set its flag in ReducerOptions::expect_sparse_gradients.");
  // The parameter itself may be in another dtype for the time of a backward.
  const bool fits_dtype = gradient.scalar_type() == table.dtype(parameter) ||
                          gradient.scalar_type() == expected.scalar_type();
  TORCH_CHECK(fits_dtype && gradient.device() == expected.device() &&
                  gradient.sizes() == expected.sizes(),
              "the gradient of ", table.name_of(parameter), " must be ",
              table.dtype(parameter), " ", expected.sizes(), " on ",
              expected.device(), ", it is ", gradient.scalar_type(), " ",
              gradient.sizes(), " on ", gradient.device(),
              ".\nSet it to None before the next backward.");
}

}  // namespace brigade
