// Installs simulated devices before the first backward of the process.

#include <cstdlib>

#include "brigade/tests/support/simulated_device/device.h"
#include "gmock/gmock.h"

int main(int argc, char** argv) {
  // See tests/support/test_main.cc.
  setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/1);
  ::testing::InitGoogleMock(&argc, argv);
  brigade::simulated::install(/*num_devices=*/4);
  return RUN_ALL_TESTS();
}
