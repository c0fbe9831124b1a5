// The main of every test binary: a rank that a test has started runs its
// function, everything else runs the tests.

#include <cstdlib>

#include "brigade/tests/support/process_ranks.h"
#include "gmock/gmock.h"

int main(int argc, char** argv) {
  // LibTorch's flight recorder belongs to the process and is not made for ranks
  // as threads: it crashes when several groups record at once.
  setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/1);
  // Else the bits of MKL's products depend on where their operands lie.
  setenv("MKL_CBWR", "COMPATIBLE", /*overwrite=*/1);
  // Gloo needs no other interface, and the host name may resolve to nothing.
  setenv("GLOO_SOCKET_IFNAME", "lo", /*overwrite=*/1);
  if (const auto exit_code = brigade::testing::run_as_rank()) return *exit_code;
  ::testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
