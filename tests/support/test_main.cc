// The main of every test binary: a rank that a test has started runs its
// function, everything else runs the tests.

#include "brigade/tests/support/process_ranks.h"
#include "gmock/gmock.h"

int main(int argc, char** argv) {
  if (const auto exit_code = brigade::testing::run_as_rank()) return *exit_code;
  ::testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
