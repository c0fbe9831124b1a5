// A process group for tests: no network, one process, and control over when and
// how each collective ends.
//
// Answers for N identical ranks (comm/backends/identical_ranks_backend.h), logs
// every collective, and can hold completions until the test asks for them, or
// make the k-th collective fail.
//
//   RecordingGroup recording(/*world_size=*/4);
//   recording.hold();
//   ... code that launches collectives 0 and 1 on recording.group() ...
//   recording.complete(1);
//   recording.complete(0);
//   EXPECT_EQ(recording.log()[0].numel, 1024);
//
// Outputs are written when a collective completes, not before. On devices with
// streams it runs on a stream of the group's own, as NCCL's do, after the work
// that the launching stream had been given. make_subgroup() makes recording
// groups of it, with streams, and logs, of their own.
//
// Thread safety: any thread.

#ifndef BRIGADE_COMM_RECORDING_GROUP_H_
#define BRIGADE_COMM_RECORDING_GROUP_H_

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/comm/status/rank_status.h"

namespace brigade {

class RecordingBackend;

struct RecordedCollective {
  c10d::OpType type = c10d::OpType::UNKNOWN;
  int64_t numel = 0;  // contributed by this rank
  int64_t bytes = 0;
  at::ScalarType dtype = at::kByte;
};

// Returns the statuses of all ranks, by rank, for the one that this rank sent.
using StatusAnswers =
    std::function<std::vector<RankStatus>(const RankStatus& own)>;

class RecordingGroup {
 public:
  explicit RecordingGroup(int world_size, int rank = 0);

  // Collectives that are still open end with an error; later ones are answered
  // at once.
  ~RecordingGroup();
  RecordingGroup(const RecordingGroup&) = delete;
  RecordingGroup& operator=(const RecordingGroup&) = delete;

  // For tensors of any device (kDeviceTypes). Has no store: identical ranks
  // fail in the same place.
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }

  // In order of launch, failed launches too.
  std::vector<RecordedCollective> log() const;

  // Blocks until `count` collectives have been launched, or `patience` is over.
  // Returns whether they were.
  bool wait_for_launches(size_t count, std::chrono::milliseconds patience =
                                           std::chrono::seconds(10)) const;

  // Keeps later collectives open until complete() or release().
  void hold();

  // Completes all open collectives in order of launch, and stops holding.
  void release();

  // Completes one open collective; in any order, though a real backend
  // completes them in order of launch. Errors: c10::ValueError when collective
  // `sequence` is not held.
  void complete(size_t sequence);

  // Sequence numbers, from 0, of the collectives that are held.
  std::vector<size_t> held() const;

  // Makes the k-th collective of the group throw `error` when it is launched,
  // or end with it; once.
  void fail_at_launch(size_t sequence, std::exception_ptr error);
  void fail_at_completion(size_t sequence, std::exception_ptr error);

  // Completes later collectives on a thread of the group, in order of launch.
  void complete_on_own_thread();

  // All statuses that were sent, in order, as describe_status() has them.
  std::vector<std::string> statuses() const;

  // Answers later status exchanges so, on any thread, with one status per rank;
  // an empty function: all ranks send the same, the default.
  void answer_statuses_with(StatusAnswers answers);

  // Keeps later status exchanges open until release_statuses(), as if the
  // peers' hosts were late.
  void hold_statuses();
  void release_statuses();

 private:
  c10::intrusive_ptr<RecordingBackend> backend_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_RECORDING_GROUP_H_
