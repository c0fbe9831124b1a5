#include "brigade/comm/group/launch_environment.h"

#include <c10/util/Exception.h>

#include <array>
#include <cstdlib>
#include <optional>
#include <regex>
#include <string_view>

#include "absl/strings/numbers.h"

namespace brigade {
namespace {

constexpr int64_t kMaxRanks = int64_t{1} << 30;
constexpr int64_t kMaxPort = 65535;

// Below the ports that Linux gives to outgoing connections (32768 and up).
constexpr int64_t kFirstSlurmPort = 10000;
constexpr int64_t kNumSlurmPorts = 20000;

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
            "; ", launcher.name,
            " was assumed to have started this process because ",
            variable(launcher.rank) ? launcher.rank : launcher.world_size,
            " is set.")) {}

  LaunchEnvironment read() const {
    LaunchEnvironment env;
    env.world_size =
        static_cast<int>(number(launcher_.world_size, 1, kMaxRanks));
    env.rank = rank_below(env.world_size, launcher_.rank);
    env.local_rank = rank_below(env.world_size, launcher_.local_rank);

    const bool is_slurm = launcher_.name == "Slurm";
    const bool is_alone = env.world_size == 1;
    if (const auto address = variable("MASTER_ADDR")) {
      env.master_addr = *address;
    } else if (!is_alone) {
      env.master_addr =
          is_slurm
              ? slurm_host()
              : missing("MASTER_ADDR",
                        "Set it to the host name of rank 0 on every rank.");
    }
    if (variable("MASTER_PORT")) {
      env.master_port =
          static_cast<uint16_t>(number("MASTER_PORT", 1, kMaxPort));
    } else if (is_slurm && variable("SLURM_JOB_ID")) {
      const int64_t job = number("SLURM_JOB_ID", 0, INT64_MAX);
      env.master_port =
          static_cast<uint16_t>(kFirstSlurmPort + job % kNumSlurmPorts);
    } else if (!is_alone) {
      missing("MASTER_PORT",
              "Set it to a free port of rank 0's host on every rank.");
    }
    if (launcher_.name == "torchrun") {
      env.agent_hosts_store =
          variable("TORCHELASTIC_USE_AGENT_STORE") == "True";
      if (variable("TORCHELASTIC_RESTART_COUNT")) {
        env.restart_count = static_cast<int>(
            number("TORCHELASTIC_RESTART_COUNT", 0, kMaxRanks));
      }
    }
    return env;
  }

 private:
  [[noreturn]] std::string missing(const char* name,
                                   const std::string& advice) const {
    TORCH_CHECK_VALUE(false, "environment variable ", name, " is missing",
                      assumed_, " ", advice);
  }

  int64_t number(const char* name, int64_t min, int64_t max) const {
    const auto text = variable(name);
    if (!text) {
      missing(name, c10::str("Start every rank through ", launcher_.name,
                             ", or set ", name, " to a number >= ", min, "."));
    }
    int64_t value = 0;
    TORCH_CHECK_VALUE(
        absl::SimpleAtoi(*text, &value) && value >= min && value <= max,
        "environment variable ", name, " must be a whole number from ", min,
        max == kMaxRanks ? " on" : c10::str(" to ", max), ", got '", *text, "'",
        assumed_);
    return value;
  }

  int rank_below(int world_size, const char* name) const {
    const int64_t rank = number(name, 0, kMaxRanks);
    TORCH_CHECK_VALUE(rank < world_size, "environment variable ", name,
                      " must be below ", launcher_.world_size, ", got ", name,
                      "=", rank, " and ", launcher_.world_size, "=", world_size,
                      assumed_);
    return static_cast<int>(rank);
  }

  // "node003" of "node[003-010,12],gpu7".
  std::string slurm_host() const {
    static const std::regex first_host(
        R"(^(?:[^\[\],]|\[\d[\d,-]*\])+(?=,|$))");
    static const std::regex range(R"(\[(\d+)[\d,-]*\])");
    for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"}) {
      const auto list = variable(name);
      if (!list) continue;
      std::smatch host;
      TORCH_CHECK_VALUE(std::regex_search(*list, host, first_host),
                        "environment variable ", name,
                        ": expected a list of hosts such as "
                        "'node[003-010,12]', got '",
                        *list, "'", assumed_);
      return std::regex_replace(host.str(), range, "$1");
    }
    missing("SLURM_JOB_NODELIST",
            "Start every rank through srun, or set MASTER_ADDR.");
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
      "(torchrun), OMPI_COMM_WORLD_RANK (Open MPI), SLURM_PROCID (Slurm). "
      "Start with 'torchrun --nproc-per-node 2 --no-python ./program', or call "
      "single_process_group() to train in one process.");
}

}  // namespace brigade
