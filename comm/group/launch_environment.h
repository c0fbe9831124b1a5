// Reads from environment variables what a launcher says about this process: its
// rank, how many ranks there are, and where they meet.
//
// Decides which launcher is believed and what counts as a contradiction.  Opens
// no connection and needs no LibTorch; see comm/process_group.h for that.
//
//   torchrun   RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
//   Open MPI   OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK; MASTER_ADDR and
//              MASTER_PORT must be set by hand (mpirun -x MASTER_ADDR=...)
//   Slurm      SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID; the rendezvous is
//              the first host of the step's (or job's) node list and a port
//              made of SLURM_JOB_ID, unless MASTER_ADDR or MASTER_PORT is set
//
// The first of the three that has set its rank or its world size is believed:
// torchrun may run inside the others, and mpirun inside a Slurm job, where the
// variables of Slurm describe the script and not the ranks.

#ifndef BRIGADE_COMM_GROUP_LAUNCH_ENVIRONMENT_H_
#define BRIGADE_COMM_GROUP_LAUNCH_ENVIRONMENT_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace brigade {

struct LaunchEnvironment {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;  // among the ranks of this machine; chooses a CUDA device

  // Where the ranks meet.  Empty and 0 when a world of 1 names no place.
  std::string master_addr = {};
  uint16_t master_port = 0;

  // The launcher already serves the store at the rendezvous, so that rank 0
  // must not (torchrun's TORCHELASTIC_USE_AGENT_STORE).
  bool agent_hosts_store = false;

  // How often the launcher has restarted the ranks; a store that outlives them
  // still holds what earlier attempts wrote (TORCHELASTIC_RESTART_COUNT).
  int restart_count = 0;

  std::string launcher = {};  // "torchrun", "Slurm" or "Open MPI"
};

// The value of a variable, or nothing when it is not set.
using EnvironmentLookup =
    std::function<std::optional<std::string>(const std::string& name)>;

// Looks into the environment of this process.
EnvironmentLookup process_environment();

// Errors:
//   NotFound         no launcher has set anything, or one has left out a
//                    variable; the message names the variable, the launcher
//                    and why that launcher was believed.
//   InvalidArgument  a value is no number, out of range or contradicts another;
//                    the message names variable and value.
// A world of 1 is never assumed: a mistyped launch would train N models apart.
absl::StatusOr<LaunchEnvironment> read_launch_environment(
    const EnvironmentLookup& lookup = process_environment());

// The first host of a Slurm node list: "node003" for "node[003-010,12],gpu7".
//
// Errors: InvalidArgument when the list is empty or its brackets do not match.
absl::StatusOr<std::string> first_slurm_host(std::string_view node_list);

}  // namespace brigade

#endif  // BRIGADE_COMM_GROUP_LAUNCH_ENVIRONMENT_H_
