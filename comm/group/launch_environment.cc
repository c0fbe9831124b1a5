#include "brigade/comm/group/launch_environment.h"

#include <c10/util/Exception.h>

#include <array>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "absl/strings/numbers.h"

namespace brigade {
namespace {

constexpr int kMaxRanks = 1 << 30;
constexpr int kMaxPort = 65535;

struct Launcher {
  std::string_view name;
  const char* rank;
  const char* world_size;
  const char* local_rank;
};

constexpr std::array kLaunchers = {
    Launcher{"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"},
    Launcher{"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
             "OMPI_COMM_WORLD_LOCAL_RANK"},
    Launcher{"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"}};

std::optional<std::string> variable(const char* name) {
  const char* const value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

class EnvironmentReader {
 public:
  explicit EnvironmentReader(const Launcher& launcher)
      : launcher_(launcher),
        assumed_(c10::str(
            "; ", launcher.name, " is the assumed launcher because ",
            variable(launcher.rank) ? launcher.rank : launcher.world_size,
            " is set.")) {}

  LaunchEnvironment read() const {
    LaunchEnvironment env;
    env.world_size = number(launcher_.world_size, 1, kMaxRanks);
    env.rank = rank_below(env.world_size, launcher_.rank);
    env.local_rank = rank_below(env.world_size, launcher_.local_rank);
    if (env.world_size > 1 || variable("MASTER_ADDR")) {
      env.master_addr =
          required("MASTER_ADDR", "the host name of rank 0 on every rank");
    }
    if (env.world_size > 1 || variable("MASTER_PORT")) {
      required("MASTER_PORT", "a free port of rank 0's host on every rank");
      env.master_port =
          static_cast<uint16_t>(number("MASTER_PORT", 1, kMaxPort));
    }
    if (launcher_.name == "torchrun") {
      env.agent_hosts_store =
          variable("TORCHELASTIC_USE_AGENT_STORE") == "True";
      if (variable("TORCHELASTIC_RESTART_COUNT")) {
        env.restart_count = number("TORCHELASTIC_RESTART_COUNT", 0, kMaxRanks);
      }
    }
    return env;
  }

 private:
  std::string required(const char* name, const std::string& value) const {
    const auto text = variable(name);
    TORCH_CHECK_VALUE(text, "environment variable ", name, " is missing",
                      assumed_, "\nStart every rank through ", launcher_.name,
                      ", or set ", name, " to ", value, ".");
    return *text;
  }

  int number(const char* name, int min, int max) const {
    const std::string text = required(name, c10::str("an integer >= ", min));
    int value = 0;
    TORCH_CHECK_VALUE(
        absl::SimpleAtoi(text, &value) && value >= min && value <= max,
        "environment variable ", name, ": expected an integer ",
        max == kMaxRanks ? c10::str(">= ", min)
                         : c10::str("from ", min, " to ", max),
        ", found '", text, "'", assumed_);
    return value;
  }

  int rank_below(int world_size, const char* name) const {
    const int rank = number(name, 0, kMaxRanks);
    TORCH_CHECK_VALUE(rank < world_size, "environment variable ", name,
                      ": expected a rank below ", launcher_.world_size,
                      ", found ", name, "=", rank, " and ",
                      launcher_.world_size, "=", world_size, assumed_,
                      ".\nExport ", name, " from 0 to ", launcher_.world_size,
                      " - 1, or start with torchrun.");
    return rank;
  }

  const Launcher& launcher_;
  const std::string assumed_;
};

}  // namespace

LaunchEnvironment read_launch_environment() {
  for (const Launcher& launcher : kLaunchers) {
    if (variable(launcher.rank) || variable(launcher.world_size)) {
      return EnvironmentReader(launcher).read();
    }
  }
  TORCH_CHECK_VALUE(
      false,
      "expected a launcher's environment variables, found none of RANK "
      "(torchrun), OMPI_COMM_WORLD_RANK (Open MPI), SLURM_PROCID "
      "(Slurm).\nStart with 'torchrun --nproc-per-node 2 --no-python "
      "./program', or call "
      "single_process_group() to train in one process.");
}

}  // namespace brigade
