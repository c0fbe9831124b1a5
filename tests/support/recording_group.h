// A process group for tests: no network, one process, and control over when and
// how each collective ends.
//
// Answers for N identical ranks (identical_ranks_backend.h), logs every
// collective, and can hold completions until the test asks for them, or make
// the k-th collective fail.
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
// that the launching stream had been given. Subgroups are recording groups with
// streams, and logs, of their own.
//
// Thread safety: any thread.

#ifndef BRIGADE_TESTS_SUPPORT_RECORDING_GROUP_H_
#define BRIGADE_TESTS_SUPPORT_RECORDING_GROUP_H_

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

  // Collectives that are still held end with an error; later ones are answered
  // at once.
  ~RecordingGroup();
  RecordingGroup(const RecordingGroup&) = delete;
  RecordingGroup& operator=(const RecordingGroup&) = delete;

  // For tensors of any device. Has no store: identical ranks fail in the same
  // place.
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }

  // In order of launch, failed launches too.
  std::vector<RecordedCollective> log() const;

  // Keeps later collectives open until complete() or release().
  void hold();

  // Completes all open collectives in order of launch, and stops holding.
  void release();

  // Completes a held collective. REQUIRES: one of held().
  void complete(size_t sequence);

  // Sequence numbers, from 0, of the collectives that are held.
  std::vector<size_t> held() const;

  // Makes the k-th collective of the group throw `error` when it is launched,
  // or end with it; once.
  void fail_at_launch(size_t sequence, std::exception_ptr error);
  void fail_at_completion(size_t sequence, std::exception_ptr error);

  // All statuses that were sent, in order, as describe_status() has them.
  std::vector<std::string> statuses() const;

  // Answers later status exchanges so, with one status per rank; an empty
  // function: all ranks send the same, the default.
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

#endif  // BRIGADE_TESTS_SUPPORT_RECORDING_GROUP_H_
