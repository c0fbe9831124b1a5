// Simulated process group of N identical ranks (identical_ranks_backend.h) in
// one process. Logs every collective; a test can hold completions, or make the
// k-th collective fail.
//
//   RecordingGroup recording(/*world_size=*/4);
//   recording.hold();
//   ... code that launches collectives 0 and 1 on recording.group() ...
//   recording.complete(1);
//   recording.complete(0);
//   EXPECT_EQ(recording.log()[0].numel, 1024);
//
// Outputs are written when a collective completes. On devices with streams it
// runs on the group's own stream, like NCCL's, after the work of the launching
// stream so far. Subgroups are simulated too, with their own streams and logs.
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

#include "brigade/comm/status/status_channel.h"

namespace brigade {

class RecordingBackend;

struct RecordedCollective {
  c10d::OpType type = c10d::OpType::UNKNOWN;
  int64_t numel = 0;  // contributed by this rank
  int64_t bytes = 0;
  at::ScalarType dtype = at::kByte;
};

// Returns the statuses of all ranks, by rank, for this rank's status.
using StatusAnswers =
    std::function<std::vector<RankStatus>(const RankStatus& own)>;

class RecordingGroup {
 public:
  explicit RecordingGroup(int world_size, int rank = 0);

  // Fails held collectives; later ones complete at once.
  ~RecordingGroup();
  RecordingGroup(const RecordingGroup&) = delete;
  RecordingGroup& operator=(const RecordingGroup&) = delete;

  // Supports tensors of any device. Has no store.
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }

  // In launch order, including failed launches.
  std::vector<RecordedCollective> log() const;

  // Holds later collectives until complete() or release().
  void hold();

  // Completes all held collectives in launch order, and stops holding.
  void release();

  // Completes a held collective. REQUIRES: one of held().
  void complete(size_t sequence);

  // Returns the sequence numbers, from 0, of the held collectives.
  std::vector<size_t> held() const;

  // Makes collective `sequence` throw `error` at its launch, or complete with
  // it.
  void fail_at_launch(size_t sequence, std::exception_ptr error);
  void fail_at_completion(size_t sequence, std::exception_ptr error);

  // Returns all sent statuses in order, as described by describe_status().
  std::vector<std::string> statuses() const;

  // Sets the statuses of later exchanges. Empty function (default): all ranks
  // send the same status.
  void answer_statuses_with(StatusAnswers answers);

  // Holds later status exchanges until release_statuses(), as if peers were
  // late.
  void hold_statuses();
  void release_statuses();

 private:
  c10::intrusive_ptr<RecordingBackend> backend_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

}  // namespace brigade

#endif  // BRIGADE_TESTS_SUPPORT_RECORDING_GROUP_H_
