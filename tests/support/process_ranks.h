// Ranks as processes, for tests of death, signals, environment variables and
// exit codes.
//
// A rank is this program, started again with torchrun's variables. The parent
// runs the store, like torchrun's agent, on a port that the system chooses.
//
//   const RankFunction kTrain("train", [](RankContext& rank) {
//     auto group = init_process_group();
//     rank.report("connected");
//     ...
//   });
//
//   TEST(...) {
//     ProcessRanks ranks({.world_size = 2, .function = "train"});
//     ranks.wait_for(1, "connected");
//     ranks.signal(1, SIGKILL);
//     std::vector<RankResult> results = ranks.finish();
//     EXPECT_EQ(results[0].exit_code, 0) << results[0].error_output;
//   }
//
// Rank and test exchange messages instead of sleeping. One deadline bounds all
// waits.
//
// The program's main must return run_as_rank()'s code, if any
// (tests/support/test_main.cc does).
//
// Thread safety: none.

#ifndef BRIGADE_TESTS_SUPPORT_PROCESS_RANKS_H_
#define BRIGADE_TESTS_SUPPORT_PROCESS_RANKS_H_

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

namespace brigade::testing {

// Argument of a rank's function.
class RankContext {
 public:
  int rank() const { return rank_; }
  const std::vector<std::string>& arguments() const { return arguments_; }

  // Sends one line to the parent.
  void report(const std::string& message);

  // Blocks until the parent sends a line by tell(). Ends the process if the
  // parent has ended.
  std::string await();

 private:
  friend std::optional<int> run_as_rank();
  int rank_ = 0;
  std::vector<std::string> arguments_;
  int to_parent_ = -1;
  int from_parent_ = -1;
};

// Registers a function by name; define it at namespace scope.
class RankFunction {
 public:
  RankFunction(const std::string& name, std::function<void(RankContext&)> fn);
};

// In a process of ProcessRanks: runs its function and returns the exit code, 0,
// or 1 with the exception's text on stderr. Otherwise returns nullopt.
std::optional<int> run_as_rank();

struct RankResult {
  std::optional<int> exit_code = {};  // nullopt if a signal ended it
  std::optional<int> signal = {};
  bool timed_out = false;         // killed at the deadline
  std::string error_output = {};  // stderr
  std::vector<std::string> messages = {};
};

struct ProcessRanksOptions {
  int world_size = 2;
  std::string function = {};
  std::vector<std::string> arguments = {};
  std::chrono::milliseconds deadline = std::chrono::seconds(90);

  // Variables to set in every rank's environment; nullopt: to remove.
  std::vector<std::pair<std::string, std::optional<std::string>>> environment =
      {};
};

class ProcessRanks {
 public:
  explicit ProcessRanks(ProcessRanksOptions options);
  ~ProcessRanks();  // kills running ranks
  ProcessRanks(const ProcessRanks&) = delete;
  ProcessRanks& operator=(const ProcessRanks&) = delete;

  // Blocks until the rank has reported `message`. Errors: std::runtime_error
  // with the rank's output if it ends before that, or at the deadline.
  void wait_for(int rank, const std::string& message);
  void wait_for_all(const std::string& message);

  void tell(int rank, const std::string& line);
  void signal(int rank, int signal_number);  // SIGKILL, SIGSTOP, SIGCONT, ...

  // Blocks until all ranks have ended; kills them at the deadline.
  std::vector<RankResult> finish();

 private:
  struct Process;

  void start(int rank, uint16_t port);
  bool poll_once();  // false: the deadline has passed
  std::string describe(int rank) const;

  const ProcessRanksOptions options_;
  const std::chrono::steady_clock::time_point deadline_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::vector<Process> processes_;
};

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_SUPPORT_PROCESS_RANKS_H_
