#include "brigade/comm/group/launch_environment.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace brigade {
namespace {

constexpr int64_t kMaxRanks = int64_t{1} << 30;
constexpr int64_t kMaxPort = 65535;

// Below the ports that Linux gives to outgoing connections (32768 and up).
constexpr int64_t kFirstSlurmPort = 10000;
constexpr int64_t kNumSlurmPorts = 20000;

// How one launcher names the numbers of a rank.
struct Launcher {
  const char* name;
  const char* rank;
  const char* world_size;
  const char* local_rank;
};

constexpr Launcher kTorchrun = {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"};
constexpr Launcher kOpenMpi = {"Open MPI", "OMPI_COMM_WORLD_RANK",
                               "OMPI_COMM_WORLD_SIZE",
                               "OMPI_COMM_WORLD_LOCAL_RANK"};
constexpr Launcher kSlurm = {"Slurm", "SLURM_PROCID", "SLURM_NTASKS",
                             "SLURM_LOCALID"};

// An empty variable counts as one that is not set.
std::optional<std::string> non_empty(const EnvironmentLookup& lookup,
                                     const std::string& name) {
  std::optional<std::string> value = lookup(name);
  if (value && value->empty()) value.reset();
  return value;
}

class EnvironmentReader {
 public:
  EnvironmentReader(const EnvironmentLookup& lookup, const Launcher& launcher)
      : lookup_(lookup),
        launcher_(launcher),
        reason_(non_empty(lookup, launcher.rank) ? launcher.rank
                                                 : launcher.world_size) {}

  absl::StatusOr<LaunchEnvironment> read() const {
    LaunchEnvironment env;
    env.launcher = launcher_.name;

    absl::StatusOr<int64_t> world_size =
        number(launcher_.world_size, 1, kMaxRanks);
    if (!world_size.ok()) return world_size.status();
    absl::StatusOr<int64_t> rank = rank_below(*world_size, launcher_.rank);
    if (!rank.ok()) return rank.status();
    absl::StatusOr<int64_t> local_rank =
        rank_below(*world_size, launcher_.local_rank);
    if (!local_rank.ok()) return local_rank.status();
    env.world_size = static_cast<int>(*world_size);
    env.rank = static_cast<int>(*rank);
    env.local_rank = static_cast<int>(*local_rank);

    if (absl::Status s = read_rendezvous(env); !s.ok()) return s;

    if (launcher_.name == kTorchrun.name) {
      env.agent_hosts_store = lookup_("TORCHELASTIC_USE_AGENT_STORE") == "True";
      if (non_empty(lookup_, "TORCHELASTIC_RESTART_COUNT")) {
        absl::StatusOr<int64_t> restarts =
            number("TORCHELASTIC_RESTART_COUNT", 0, kMaxRanks);
        if (!restarts.ok()) return restarts.status();
        env.restart_count = static_cast<int>(*restarts);
      }
    }
    return env;
  }

 private:
  bool set(const std::string& name) const {
    return non_empty(lookup_, name).has_value();
  }

  std::string assumed() const {
    return absl::StrCat(launcher_.name, " was assumed to have started this ",
                        "process because ", reason_, " is set");
  }

  absl::Status missing(const std::string& name,
                       const std::string& advice) const {
    return absl::NotFoundError(absl::StrCat("environment variable ", name,
                                            " is missing; ", assumed(), ". ",
                                            advice));
  }

  absl::StatusOr<int64_t> number(const std::string& name, int64_t min,
                                 int64_t max) const {
    std::optional<std::string> text = non_empty(lookup_, name);
    if (!text) {
      return missing(
          name, absl::StrCat("Start every rank through ", launcher_.name,
                             ", or set ", name, " to a number >= ", min, "."));
    }
    int64_t value = 0;
    if (!absl::SimpleAtoi(*text, &value) || value < min || value > max) {
      return absl::InvalidArgumentError(absl::StrCat(
          "environment variable ", name, " must be a whole number from ", min,
          max == kMaxRanks ? " on" : absl::StrCat(" to ", max), ", got '",
          *text, "'; ", assumed(), "."));
    }
    return value;
  }

  absl::StatusOr<int64_t> rank_below(int64_t world_size,
                                     const std::string& name) const {
    absl::StatusOr<int64_t> rank = number(name, 0, kMaxRanks);
    if (rank.ok() && *rank >= world_size) {
      return absl::InvalidArgumentError(absl::StrCat(
          "environment variable ", name, " must be below ",
          launcher_.world_size, ", got ", name, "=", *rank, " and ",
          launcher_.world_size, "=", world_size, "; ", assumed(), "."));
    }
    return rank;
  }

  absl::Status read_rendezvous(LaunchEnvironment& env) const {
    const bool alone = env.world_size == 1;
    const bool slurm = launcher_.name == kSlurm.name;

    if (std::optional<std::string> addr = non_empty(lookup_, "MASTER_ADDR")) {
      env.master_addr = *addr;
    } else if (slurm && !alone) {
      absl::StatusOr<std::string> host = slurm_host();
      if (!host.ok()) return host.status();
      env.master_addr = *host;
    } else if (!alone) {
      return missing("MASTER_ADDR",
                     "Set it to the host name of rank 0 on every rank.");
    }

    if (set("MASTER_PORT")) {
      absl::StatusOr<int64_t> port = number("MASTER_PORT", 1, kMaxPort);
      if (!port.ok()) return port.status();
      env.master_port = static_cast<uint16_t>(*port);
    } else if (slurm && set("SLURM_JOB_ID")) {
      absl::StatusOr<int64_t> job = number("SLURM_JOB_ID", 0, INT64_MAX);
      if (!job.ok()) return job.status();
      env.master_port =
          static_cast<uint16_t>(kFirstSlurmPort + *job % kNumSlurmPorts);
    } else if (!alone) {
      return missing("MASTER_PORT",
                     "Set it to a free port of rank 0's host on every rank.");
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::string> slurm_host() const {
    for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"}) {
      std::optional<std::string> list = non_empty(lookup_, name);
      if (!list) continue;
      absl::StatusOr<std::string> host = first_slurm_host(*list);
      if (host.ok()) return host;
      return absl::InvalidArgumentError(absl::StrCat(
          "environment variable ", name, ": ",
          std::string(host.status().message()), "; ", assumed(), "."));
    }
    return missing("SLURM_JOB_NODELIST",
                   "Start every rank through srun, or set MASTER_ADDR.");
  }

  const EnvironmentLookup& lookup_;
  const Launcher& launcher_;
  std::string reason_;
};

}  // namespace

EnvironmentLookup process_environment() {
  return [](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    if (value == nullptr) return std::nullopt;
    return std::string(value);
  };
}

absl::StatusOr<LaunchEnvironment> read_launch_environment(
    const EnvironmentLookup& lookup) {
  for (const Launcher* launcher : {&kTorchrun, &kOpenMpi, &kSlurm}) {
    if (non_empty(lookup, launcher->rank) ||
        non_empty(lookup, launcher->world_size)) {
      return EnvironmentReader(lookup, *launcher).read();
    }
  }
  return absl::NotFoundError(
      "expected a launcher's environment variables, found none of RANK "
      "(torchrun), OMPI_COMM_WORLD_RANK (Open MPI), SLURM_PROCID (Slurm). "
      "Start with 'torchrun --nproc-per-node 2 --no-python ./program', or call "
      "single_process_group() to train in one process.");
}

absl::StatusOr<std::string> first_slurm_host(std::string_view node_list) {
  const auto malformed = [&](const char* why) {
    return absl::InvalidArgumentError(absl::StrCat(
        "expected a list of hosts such as 'node[003-010,12]', got '",
        std::string(node_list), "' (", why, ")"));
  };
  std::string host;
  size_t at = 0;
  while (at < node_list.size() && node_list[at] != ',') {
    if (node_list[at] == ']') return malformed("a ']' without '['");
    if (node_list[at] != '[') {
      host += node_list[at++];
      continue;
    }
    const size_t close = node_list.find(']', at);
    if (close == std::string_view::npos) return malformed("a '[' without ']'");
    const std::string_view range = node_list.substr(at + 1, close - at - 1);
    const std::string_view first = range.substr(0, range.find_first_of("-,"));
    const bool digits =
        std::all_of(first.begin(), first.end(),
                    [](unsigned char c) { return std::isdigit(c) != 0; });
    if (first.empty() || !digits) return malformed("no number after '['");
    host += first;
    at = close + 1;
  }
  if (host.empty()) return malformed("no host");
  return host;
}

}  // namespace brigade
