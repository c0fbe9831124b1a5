// A launcher's environment variables: rank, world size, address of the store.
//
//   torchrun   RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
//   Open MPI   OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK
//   Slurm      SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID
//
// Open MPI and Slurm need MASTER_ADDR and MASTER_PORT too. The first launcher
// in this list whose rank or world size is set wins: torchrun may run inside
// the others, and mpirun in a Slurm job. An empty variable counts as unset.

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
  int local_rank = 0;  // on this machine; index of the device

  // Address of the store. May be empty and 0 in a world of 1.
  std::string master_addr = {};
  uint16_t master_port = 0;

  // The launcher runs the store's server, so rank 0 must not
  // (torchrun's TORCHELASTIC_USE_AGENT_STORE).
  bool agent_hosts_store = false;

  // Number of restarts by the launcher (TORCHELASTIC_RESTART_COUNT). A store
  // that outlives the ranks still holds the keys of earlier attempts.
  int restart_count = 0;
};

// Errors: c10::ValueError if no launcher's variables are set, or if one is
// missing, not a number, out of range or contradicts another. A world of 1 is
// never assumed: a mistyped launch would train N separate models.
LaunchEnvironment read_launch_environment();

// init_process_group() with explicit values.
c10::intrusive_ptr<c10d::ProcessGroup> init_process_group(
    const LaunchEnvironment& environment, const ProcessGroupOptions& options);

}  // namespace brigade

#endif  // BRIGADE_COMM_GROUP_LAUNCH_ENVIRONMENT_H_
