#include "brigade/hooks/compiled_autograd.h"

#include <c10/util/Exception.h>

namespace brigade {

void refuse_compiled_autograd() {
  TORCH_CHECK(
      false,
      "brigade: compiled autograd can't trace a backward whose gradients a "
      "reducer reduces.\nSet torch._dynamo.config.optimize_ddp = "
      "\"python_reducer\" before wrapping the model, or leave compiled "
      "autograd "
      "off.");
}

}  // namespace brigade
