#include "brigade/tests/support/process_ranks.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace brigade::testing {
namespace {

constexpr const char* kFunctionVariable = "BRIGADE_TEST_RANK_FUNCTION";
constexpr const char* kArgumentsVariable = "BRIGADE_TEST_RANK_ARGUMENTS";
// Descriptors of a rank's pipe ends.
constexpr int kToParent = 101;
constexpr int kFromParent = 102;

std::map<std::string, std::function<void(RankContext&)>>& functions() {
  static auto* all =
      new std::map<std::string, std::function<void(RankContext&)>>();
  return *all;
}

[[noreturn]] void throw_errno(const char* what) {
  throw std::runtime_error(std::string(what) + ": " + std::strerror(errno));
}

void write_line(int fd, std::string line) {
  line += '\n';
  for (size_t done = 0; done < line.size();) {
    const ssize_t n = write(fd, line.data() + done, line.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw_errno("write to a rank's pipe");
    done += n;
  }
}

std::string read_all(int fd) {
  std::string text;
  char buffer[4096];
  for (off_t at = 0;;) {
    const ssize_t n = pread(fd, buffer, sizeof(buffer), at);
    if (n <= 0) return text;
    text.append(buffer, n);
    at += n;
  }
}

// A file descriptor that closes itself.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {
    if (fd < 0) throw_errno("open a descriptor");
  }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() { reset(); }
  void reset() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }
  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

struct Pipe {
  Descriptor read_end;
  Descriptor write_end;
};

Pipe make_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw_errno("pipe2");
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

std::map<std::string, std::string> current_environment() {
  std::map<std::string, std::string> all;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::pair<std::string, std::string> variable =
        absl::StrSplit(*entry, absl::MaxSplits('=', 1));
    all.insert(variable);
  }
  return all;
}

}  // namespace

void RankContext::report(const std::string& message) {
  write_line(to_parent_, message);
}

std::string RankContext::await() {
  std::string line;
  char c = 0;
  while (true) {
    const ssize_t n = ::read(from_parent_, &c, 1);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) std::_Exit(3);
    if (c == '\n') return line;
    line += c;
  }
}

RankFunction::RankFunction(const std::string& name,
                           std::function<void(RankContext&)> fn) {
  functions()[name] = std::move(fn);
}

std::optional<int> run_as_rank() {
  const char* name = std::getenv(kFunctionVariable);
  if (name == nullptr) return std::nullopt;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  ::signal(SIGPIPE, SIG_IGN);
  RankContext context;
  context.rank_ = std::atoi(std::getenv("BRIGADE_TEST_RANK"));
  context.to_parent_ = kToParent;
  context.from_parent_ = kFromParent;
  context.arguments_ =
      absl::StrSplit(std::getenv(kArgumentsVariable), '\n', absl::SkipEmpty());
  try {
    auto it = functions().find(name);
    if (it == functions().end()) {
      throw std::runtime_error("no rank function '" + std::string(name) + "'");
    }
    it->second(context);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "rank " << context.rank_ << ": " << error.what() << std::endl;
    return 1;
  }
}

struct ProcessRanks::Process {
  pid_t pid = -1;
  Descriptor pidfd;
  Descriptor messages;
  Descriptor commands;
  Descriptor error_output;
  std::string partial_line;
  bool ended = false;
  RankResult result;

  void read_messages() {
    char buffer[4096];
    const ssize_t n = ::read(messages.get(), buffer, sizeof(buffer));
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) return;
    if (n <= 0) {
      messages.reset();
      return;
    }
    partial_line.append(buffer, n);
    size_t end;
    while ((end = partial_line.find('\n')) != std::string::npos) {
      result.messages.push_back(partial_line.substr(0, end));
      partial_line.erase(0, end + 1);
    }
  }

  void reap() {
    int status = 0;
    if (waitpid(pid, &status, WNOHANG) != pid) return;
    ended = true;
    if (WIFEXITED(status)) result.exit_code = WEXITSTATUS(status);
    if (WIFSIGNALED(status)) result.signal = WTERMSIG(status);
    while (messages.get() >= 0) read_messages();
    result.error_output = read_all(error_output.get());
  }
};

ProcessRanks::ProcessRanks(ProcessRanksOptions options)
    : options_(std::move(options)),
      deadline_(std::chrono::steady_clock::now() + options_.deadline) {
  ::signal(SIGPIPE, SIG_IGN);  // tell() may write to a dead rank
  c10d::TCPStoreOptions store_options;
  store_options.port = 0;
  store_options.isServer = true;
  store_options.waitWorkers = false;
  auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", store_options);
  store_ = store;
  processes_.resize(options_.world_size);
  for (int rank = 0; rank < options_.world_size; ++rank) {
    start(rank, store->getPort());
  }
}

void ProcessRanks::start(int rank, uint16_t port) {
  std::map<std::string, std::string> variables = current_environment();
  variables["RANK"] = variables["LOCAL_RANK"] = std::to_string(rank);
  variables["WORLD_SIZE"] = variables["LOCAL_WORLD_SIZE"] =
      std::to_string(options_.world_size);
  variables["MASTER_ADDR"] = "127.0.0.1";
  variables["MASTER_PORT"] = std::to_string(port);
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  variables["TORCHELASTIC_RESTART_COUNT"] = "0";
  variables["OMP_NUM_THREADS"] = "1";
  for (const auto& [name, value] : options_.environment) {
    if (value) {
      variables[name] = *value;
    } else {
      variables.erase(name);
    }
  }
  variables["BRIGADE_TEST_RANK"] = std::to_string(rank);
  variables[kFunctionVariable] = options_.function;
  variables[kArgumentsVariable] = absl::StrJoin(options_.arguments, "\n");
  std::vector<std::string> entries;
  for (const auto& [name, value] : variables) {
    entries.push_back(name + '=' + value);
  }
  std::vector<char*> environment;
  for (std::string& entry : entries) environment.push_back(entry.data());
  environment.push_back(nullptr);

  Process& process = processes_[rank];
  Pipe messages = make_pipe();
  Pipe commands = make_pipe();
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, messages.write_end.get(),
                                   kToParent);
  posix_spawn_file_actions_adddup2(&actions, commands.read_end.get(),
                                   kFromParent);
  process.error_output = Descriptor(memfd_create("stderr", MFD_CLOEXEC));
  posix_spawn_file_actions_adddup2(&actions, process.error_output.get(),
                                   STDERR_FILENO);
  std::string program = "/proc/self/exe";
  char* const argv[] = {program.data(), nullptr};
  const int error = posix_spawn(&process.pid, program.c_str(), &actions,
                                nullptr, argv, environment.data());
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    errno = error;
    throw_errno("posix_spawn");
  }
  process.pidfd =
      Descriptor(static_cast<int>(syscall(SYS_pidfd_open, process.pid, 0)));
  process.messages = std::move(messages.read_end);
  process.commands = std::move(commands.write_end);
}

ProcessRanks::~ProcessRanks() {
  for (Process& process : processes_) {
    if (process.pid < 0 || process.ended) continue;
    kill(process.pid, SIGKILL);
    waitpid(process.pid, nullptr, 0);
  }
}

bool ProcessRanks::poll_once() {
  std::vector<pollfd> events;
  std::vector<Process*> owners;
  for (Process& process : processes_) {
    if (process.ended) continue;
    for (int fd : {process.pidfd.get(), process.messages.get()}) {
      if (fd < 0) continue;
      events.push_back({.fd = fd, .events = POLLIN, .revents = 0});
      owners.push_back(&process);
    }
  }
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
      deadline_ - std::chrono::steady_clock::now());
  if (left.count() <= 0) return false;
  const int ready =
      poll(events.data(), events.size(), static_cast<int>(left.count()));
  if (ready <= 0) return ready < 0 && errno == EINTR;
  for (size_t i = 0; i < events.size(); ++i) {
    if (events[i].revents == 0 || owners[i]->ended) continue;
    if (events[i].fd == owners[i]->pidfd.get()) {
      owners[i]->reap();
    } else if (events[i].fd == owners[i]->messages.get()) {
      owners[i]->read_messages();
    }
  }
  return true;
}

std::string ProcessRanks::describe(int rank) const {
  const Process& process = processes_[rank];
  const RankResult& result = process.result;
  return absl::StrCat(
      "rank ", rank,
      result.exit_code ? absl::StrCat(" ended with code ", *result.exit_code)
      : result.signal  ? absl::StrCat(" was killed by signal ", *result.signal)
                       : " is running",
      "; its messages: ", absl::StrJoin(result.messages, ", "),
      "; its stderr:\n", read_all(process.error_output.get()));
}

void ProcessRanks::wait_for(int rank, const std::string& message) {
  const Process& process = processes_.at(rank);
  const std::vector<std::string>& messages = process.result.messages;
  while (std::ranges::find(messages, message) == messages.end()) {
    if (process.ended || !poll_once()) {
      throw std::runtime_error(absl::StrCat(
          "rank ", rank, process.ended ? " ended" : " reached its deadline",
          " before it reported '", message, "': ", describe(rank)));
    }
  }
}

void ProcessRanks::wait_for_all(const std::string& message) {
  for (int rank = 0; rank < options_.world_size; ++rank) {
    wait_for(rank, message);
  }
}

void ProcessRanks::tell(int rank, const std::string& line) {
  write_line(processes_.at(rank).commands.get(), line);
}

void ProcessRanks::signal(int rank, int signal_number) {
  Process& process = processes_.at(rank);
  if (!process.ended) kill(process.pid, signal_number);
}

std::vector<RankResult> ProcessRanks::finish() {
  while (!std::ranges::all_of(processes_, &Process::ended) && poll_once()) {
  }
  std::vector<RankResult> results;
  for (Process& process : processes_) {
    if (!process.ended) {
      kill(process.pid, SIGKILL);
      siginfo_t info;
      waitid(P_PID, process.pid, &info, WEXITED | WNOWAIT);
      process.reap();
      process.result.timed_out = true;
    }
    results.push_back(process.result);
  }
  return results;
}

}  // namespace brigade::testing
