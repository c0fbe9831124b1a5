#include <c10/util/Exception.h>

#include "brigade/reducer/packing/packer_devices.h"

namespace brigade {

std::unique_ptr<Packer> make_cuda_packer(PackerArguments arguments,
                                         std::vector<SlotRange> /*slots*/) {
  TORCH_CHECK(false, "make_packer: gradients on ", arguments.device,
              " need a brigade that was built with CUDA, found one without.\n"
              "Build with BRIGADE_CUDA=ON, or move the parameters to the CPU.");
}

}  // namespace brigade
