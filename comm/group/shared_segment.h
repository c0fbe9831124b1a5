// Memory shared by all ranks of a process group on one host, with waits that
// detect a dead rank within a second.
//
//   const auto segment = SharedSegment::make(group, sizeof(Record));
//   if (!segment) ...                          // null on all ranks
//   record_of(segment->rank()).sequence.store(7, std::memory_order_release);
//   segment->notify();
//   ...
//   const bool in_time = segment->wait_for(2, deadline, [&] {
//     return record_of(2).sequence.load(std::memory_order_acquire) >= 7;
//   });
//
// A wait polls the pidfds of all peers ten times per second. The first rank
// that finds a dead peer closes the segment, which ends all waits on all ranks.
// The memory is a memfd: it is freed when the last rank unmaps it or ends.
//
// Thread safety: any thread of any rank.

#ifndef BRIGADE_COMM_GROUP_SHARED_SEGMENT_H_
#define BRIGADE_COMM_GROUP_SHARED_SEGMENT_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/comm/group/group_info.h"

namespace brigade {

class SharedSegment {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  // Returns a hash of the host and its network and PID namespaces. Equal for
  // processes that can share memory; 0: unknown.
  static int64_t host();

  // Collective. Maps one region of `bytes_per_rank` zero bytes per rank; only
  // written pages occupy memory. Returns null on all ranks unless every rank
  // passes the same nonzero `host` and can map the memory. A rank passes 0 to
  // decline.
  //
  // Costs an all-gather of 40 bytes on the group's control device, and one of 8
  // bytes if all hosts are equal. A world of 1 gets null without communication.
  // Errors: PeerError.
  static std::shared_ptr<SharedSegment> make(
      const c10::intrusive_ptr<c10d::ProcessGroup>& group,
      size_t bytes_per_rank, int64_t host = SharedSegment::host());

  // Marks this rank as left: a peer's wait for it ends with an error unless its
  // condition holds. In a forked child, does nothing.
  ~SharedSegment();

  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  int name_of(int rank) const { return names_[rank]; }  // in errors

  // Aligned to 64 bytes.
  std::byte* region(int rank) const;

  // Wakes the threads that wait for `rank`. Call it for this rank after a write
  // to its region, for another one after reading that rank's region.
  void notify() { notify(rank_); }
  void notify(int rank);

  // Blocks until condition() is true, or until the deadline; returns its value.
  // Evaluates it first, and after each notify(rank). If it is false, throws
  // RuntimeError for a closed segment, a dead rank, or if `rank` has left; a
  // wait for this rank fails if any other rank has left.
  template <typename Condition>
  bool wait_for(int rank, Deadline deadline, const Condition& condition) {
    while (true) {
      const Seen seen = look(rank);
      if (condition()) return true;
      if (!sleep(rank, seen, deadline)) return condition();
    }
  }

  // Returns true if `rank` has destroyed its segment.
  bool has_left(int rank) const;

  // Returns true if the process of `rank` exists and holds its segment.
  bool is_alive(int rank) const;

  // Returns the ranks whose processes ended without destroying the segment.
  std::vector<int> dead_ranks() const;

  // Ends all present and future waits whose condition is false, on all ranks.
  // All ranks report the first reason, cut to 500 bytes. `lost`: the dead rank,
  // -1: none.
  void close(std::string_view reason, int lost = -1);
  bool is_closed() const;
  // "rank 2 (process 4711) has ended"; empty while open.
  std::string close_reason() const;
  // Returns the dead rank; -1: none.
  int lost_rank() const;

 private:
  struct Layout;
  struct Mapping;
  struct Seen {
    uint32_t count;  // of notify() calls
    int left;        // a rank that has left; -1: none
    bool is_closed;
  };

  SharedSegment(const c10d::ProcessGroup& group, std::unique_ptr<Mapping> map,
                size_t bytes_per_rank);

  Layout& layout() const;
  Seen look(int rank) const;
  // Returns false after the deadline. Throws if `seen` says that the wait can't
  // succeed.
  bool sleep(int rank, const Seen& seen, Deadline deadline);
  void close_if_a_rank_is_dead();

  const int rank_;
  const int size_;
  const RankNames names_;
  const size_t bytes_per_rank_;
  const std::unique_ptr<Mapping> map_;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_GROUP_SHARED_SEGMENT_H_
