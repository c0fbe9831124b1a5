// The main of every test binary: runs the tests, or a rank's function in a
// process of ProcessRanks.

#include <cstdlib>

#include "brigade/tests/support/process_ranks.h"
#include "gmock/gmock.h"

int main(int argc, char** argv) {
  // LibTorch's flight recorder crashes if ranks that are threads record at
  // once.
  setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/1);
  // Makes the bits of MKL's products independent of the operands' alignment.
  setenv("MKL_CBWR", "COMPATIBLE", /*overwrite=*/1);
  // The host name may not resolve.
  setenv("GLOO_SOCKET_IFNAME", "lo", /*overwrite=*/1);
  if (const auto exit_code = brigade::testing::run_as_rank()) return *exit_code;
  ::testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
