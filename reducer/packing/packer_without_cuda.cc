#include <c10/util/Exception.h>

#include "brigade/reducer/packing/packer.h"

namespace brigade::packing {

std::unique_ptr<Packer> make_cuda_packer(PackerArguments arguments,
                                         std::vector<SlotRange> /*slots*/) {
  TORCH_CHECK(false, "make_packer: parameters on ", arguments.device,
              " need a build of brigade with CUDA, this one has none.\n"
              "Build with BRIGADE_CUDA=ON, or move the parameters to the CPU.");
}

}  // namespace brigade::packing
