#include "brigade/benchmarks/support/local_launch.h"

#include <fmt/format.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <string>
#include <system_error>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

namespace brigade::benchmarks {
namespace {

pid_t start_rank(int rank, int num_ranks, uint16_t port, char** argv) {
  std::vector<std::string> variables = {
      fmt::format("RANK={}", rank),
      fmt::format("LOCAL_RANK={}", rank),
      fmt::format("WORLD_SIZE={}", num_ranks),
      "MASTER_ADDR=127.0.0.1",
      fmt::format("MASTER_PORT={}", port),
      "TORCHELASTIC_USE_AGENT_STORE=True",
  };
  std::vector<char*> environment;
  for (std::string& variable : variables) {
    environment.push_back(variable.data());
  }
  for (char** variable = environ; *variable != nullptr; ++variable) {
    environment.push_back(*variable);
  }
  environment.push_back(nullptr);
  pid_t pid = 0;
  const int error = posix_spawn(&pid, "/proc/self/exe", nullptr, nullptr, argv,
                                environment.data());
  if (error != 0) {
    throw std::system_error(error, std::generic_category(),
                            fmt::format("cannot start rank {}", rank));
  }
  return pid;
}

int exit_code_of(int wait_status) {
  return WIFEXITED(wait_status) ? WEXITSTATUS(wait_status)
                                : 128 + WTERMSIG(wait_status);
}

void end_all(const std::vector<pid_t>& ranks) {
  for (const pid_t rank : ranks) kill(rank, SIGTERM);
}

}  // namespace

bool is_rank() {
  return std::getenv("RANK") != nullptr ||
         std::getenv("OMPI_COMM_WORLD_RANK") != nullptr ||
         std::getenv("SLURM_PROCID") != nullptr;
}

void end_with_launcher() { prctl(PR_SET_PDEATHSIG, SIGTERM); }

int launch_local_ranks(int num_ranks, char** argv) {
  c10d::TCPStoreOptions options;
  options.port = 0;  // the system chooses
  options.isServer = true;
  options.waitWorkers = false;
  const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);

  std::vector<pid_t> running;
  try {
    for (int rank = 0; rank < num_ranks; ++rank) {
      running.push_back(start_rank(rank, num_ranks, store->getPort(), argv));
    }
  } catch (...) {
    end_all(running);
    throw;
  }

  int exit_code = 0;
  while (!running.empty()) {
    int status = 0;
    const pid_t ended = waitpid(-1, &status, 0);
    if (ended < 0 && errno == EINTR) continue;
    std::erase(running, ended);
    if (exit_code == 0 && exit_code_of(status) != 0) {
      exit_code = exit_code_of(status);
      end_all(running);
    }
  }
  return exit_code;
}

}  // namespace brigade::benchmarks
