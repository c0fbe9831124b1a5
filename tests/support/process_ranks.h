// Runs one function on N ranks, each a process of its own, for what threads
// can't show: death, signals, start from the environment, exit codes.
//
// A rank is this very program, started again with torchrun's variables set. The
// parent serves the store, on a port that the system chooses, as torchrun's
// agent does.
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
// Rank and test speak by messages, so nobody sleeps.  All of it is bounded by
// one deadline.
//
// The program's main must return run_as_rank()'s code if it gives one
// (tests/support/test_main.cc does).
//
// Thread safety: none; one thread of the parent.

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

// What a rank's function is given.
class RankContext {
 public:
  int rank() const { return rank_; }
  const std::vector<std::string>& arguments() const { return arguments_; }

  // Sends one line to the parent.
  void report(const std::string& message);

  // Blocks until the parent sends a line by tell().  Ends the process when the
  // parent is gone.
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

// In a process that ProcessRanks started: runs its function and returns the
// exit code, 0, or 1 with the exception's text on stderr.  Elsewhere: nothing.
std::optional<int> run_as_rank();

struct RankResult {
  std::optional<int> exit_code = {};  // unless a signal ended it
  std::optional<int> signal = {};
  bool timed_out = false;         // the deadline came, and SIGKILL with it
  std::string error_output = {};  // stderr
  std::vector<std::string> messages = {};
};

struct ProcessRanksOptions {
  int world_size = 2;
  std::string function = {};
  std::vector<std::string> arguments = {};
  std::chrono::milliseconds deadline = std::chrono::seconds(90);

  // Set in, or with nullopt removed from, every rank's environment.
  std::vector<std::pair<std::string, std::optional<std::string>>> environment =
      {};
};

class ProcessRanks {
 public:
  explicit ProcessRanks(ProcessRanksOptions options);
  ~ProcessRanks();  // kills what still runs
  ProcessRanks(const ProcessRanks&) = delete;
  ProcessRanks& operator=(const ProcessRanks&) = delete;

  // Blocks until the rank has reported `message`.
  // Errors: std::runtime_error with the rank's output when it ends before, or
  // the deadline comes.
  void wait_for(int rank, const std::string& message);
  void wait_for_all(const std::string& message);

  void tell(int rank, const std::string& line);
  void signal(int rank, int signal_number);  // SIGKILL, SIGSTOP, SIGCONT, ...

  // Blocks until all have ended; kills them at the deadline.
  std::vector<RankResult> finish();

 private:
  struct Process;

  void start(int rank, uint16_t port);
  bool poll_once();  // false: the deadline has come
  std::string describe(int rank) const;

  const ProcessRanksOptions options_;
  const std::chrono::steady_clock::time_point deadline_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::vector<Process> processes_;
};

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_SUPPORT_PROCESS_RANKS_H_
