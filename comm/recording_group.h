// A process group for tests and simulation: no network, one process, and
// control over when and how each collective ends.
//
// Answers for N identical ranks (comm/backends/identical_ranks_backend.h), logs
// every collective, and can hold completions until the test asks for them,
// delay them as a network would, or make the k-th collective fail.
//
//   RecordingGroup recording(/*world_size=*/4);
//   recording.hold();
//   ... code that launches collectives 0 and 1 on recording.group() ...
//   recording.complete(1);
//   recording.complete(0);
//   EXPECT_EQ(recording.log()[0].numel, 1024);
//
// Outputs are written when a collective completes, not before. On devices with
// streams it runs on a stream of the group's own, as NCCL's do, and is behind
// what the launching stream had been given. make_subgroup() makes recording
// groups of it, with streams, and logs, of their own.
//
// Thread safety: all methods may be called from any thread.

#ifndef BRIGADE_COMM_RECORDING_GROUP_H_
#define BRIGADE_COMM_RECORDING_GROUP_H_

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/comm/status/rank_status.h"

namespace brigade {

class RecordingBackend;

struct RecordedCollective {
  size_t sequence = 0;  // 0 for the first one of the group
  c10d::OpType type = c10d::OpType::UNKNOWN;
  int64_t numel = 0;  // contributed by this rank
  int64_t bytes = 0;
  at::ScalarType dtype = at::kByte;
  at::Device device = at::kCPU;
  int root = -1;  // -1 when the operation has none

  // What this rank told the others last, between the collective before and this
  // one (describe_status()); nothing when no status travelled.
  std::optional<std::string> rank_status = {};
};

// Given the status that a rank has sent, those of all ranks, by rank.
using StatusAnswers =
    std::function<std::vector<RankStatus>(const RankStatus& own)>;

// How long a collective takes, from what is known at its launch.
using CollectiveCost =
    std::function<std::chrono::nanoseconds(const RecordedCollective&)>;

class RecordingGroup {
 public:
  explicit RecordingGroup(int world_size, int rank = 0);

  // Collectives that are still open end with an error; later ones are answered
  // at once.
  ~RecordingGroup();
  RecordingGroup(const RecordingGroup&) = delete;
  RecordingGroup& operator=(const RecordingGroup&) = delete;

  // For tensors of any device (comm/streams/device_types.h).  Has no store:
  // identical ranks fail alike.
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }

  // In order of launch.  A launch that failed is logged too.
  std::vector<RecordedCollective> log() const;

  // Blocks until `count` collectives have been launched, at most `patience`.
  // Returns whether they were.
  bool wait_for_launches(size_t count, std::chrono::milliseconds patience =
                                           std::chrono::seconds(10)) const;

  // From here on, collectives stay open until complete() or release().
  void hold();

  // Completes all open collectives in order of launch, and stops holding.
  void release();

  // Completes one open collective; in any order, though a real backend would
  // complete them in order of launch.
  // Errors: c10::ValueError when collective `sequence` is not held.
  void complete(size_t sequence);

  // Sequence numbers of the collectives that are held.
  std::vector<size_t> held() const;

  // The k-th collective of the group throws `error` when it is launched, or
  // ends with it.  Each serves once.
  void fail_at_launch(size_t sequence, std::exception_ptr error);
  void fail_at_completion(size_t sequence, std::exception_ptr error);

  // From here on, collectives travel over one emulated link: each starts when
  // it is launched or the one before it is through, and ends `cost` later, on a
  // thread of the group.  An empty function turns this off for later ones.
  void delay_by(CollectiveCost cost);

  // All statuses that were sent, in order, as describe_status() has them.
  std::vector<std::string> statuses() const;

  // From here on, status exchanges are answered so; before, and with an
  // empty function, all ranks send what this one sends.  `answers` gives as
  // many as there are ranks, and may be called from any thread.
  void answer_statuses_with(StatusAnswers answers);

  // From here on, status exchanges stay open until release_statuses(): peers'
  // hosts are late.
  void hold_statuses();
  void release_statuses();

 private:
  c10::intrusive_ptr<RecordingBackend> backend_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_RECORDING_GROUP_H_
