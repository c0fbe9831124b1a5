// Reads a launcher's environment variables: this process's rank, the number of
// ranks, and where they meet.
//
//   torchrun   RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
//   Open MPI   OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK
//   Slurm      SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID
//
// For the last two, export the host name of rank 0 as MASTER_ADDR and a free
// port of it as MASTER_PORT. The first of the three whose rank or world size is
// set is believed: torchrun may run inside the others, and mpirun in a Slurm
// job. An empty variable counts as one that is not set.

#ifndef BRIGADE_COMM_GROUP_LAUNCH_ENVIRONMENT_H_
#define BRIGADE_COMM_GROUP_LAUNCH_ENVIRONMENT_H_

#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace brigade {

struct ProcessGroupOptions;

struct LaunchEnvironment {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;  // among the ranks of this machine; chooses a CUDA device

  // Where the ranks meet. Empty and 0 when a world of 1 names no place.
  std::string master_addr = {};
  uint16_t master_port = 0;

  // The launcher already serves the store at the rendezvous, so that rank 0
  // must not (torchrun's TORCHELASTIC_USE_AGENT_STORE).
  bool agent_hosts_store = false;

  // How often the launcher has restarted the ranks; a store that outlives them
  // still holds the keys of earlier attempts (TORCHELASTIC_RESTART_COUNT).
  int restart_count = 0;
};

// Errors: c10::ValueError when no launcher has set anything, and when a
// variable is missing, no number, out of range or contradicts another. A world
// of 1 is never assumed: a mistyped launch would train N separate models.
LaunchEnvironment read_launch_environment();

// init_process_group() with these in place of the environment's.
c10::intrusive_ptr<c10d::ProcessGroup> init_process_group(
    const LaunchEnvironment& environment, const ProcessGroupOptions& options);

}  // namespace brigade

#endif  // BRIGADE_COMM_GROUP_LAUNCH_ENVIRONMENT_H_
