// Helpers of the example programs: process group and error exit.

#ifndef BRIGADE_EXAMPLES_SUPPORT_PROGRAM_H_
#define BRIGADE_EXAMPLES_SUPPORT_PROGRAM_H_

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "brigade/comm/process_group.h"

namespace brigade {

// Returns the group of the ranks started by torchrun, srun or mpirun, or of
// this process alone.
inline c10::intrusive_ptr<c10d::ProcessGroup> group_of_launcher() {
  for (const char* name : {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"}) {
    if (std::getenv(name) != nullptr) return init_process_group();
  }
  return single_process_group();
}

// Returns the exit code of `run`, or 1 after one line on stderr if it throws.
template <typename Run>
int run_program(const char* name, const Run& run) {
  std::string error;
  try {
    return run();
  } catch (const c10::Error& e) {
    error = e.what_without_backtrace();
  } catch (const std::exception& e) {
    error = e.what();
  }
  std::ranges::replace(error, '\n', ' ');
  std::fprintf(stderr, "%s: %s\n", name, error.c_str());
  return 1;
}

}  // namespace brigade

#endif  // BRIGADE_EXAMPLES_SUPPORT_PROGRAM_H_
