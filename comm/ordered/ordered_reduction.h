// One reduction of ordered_collectives.h in flight: its messages, its sum, its
// result.  Internal to comm/.
//
// What the ranks do with n elements, if each is to add up a slice:
//
//   launch()   post receives of all terms of the own slice, into scratch, and
//              of all sums of the others, into their place; then send everyone
//              its term.  A sum can't come before the term whose place it takes
//              has left, since its rank needs that term.
//   finish()   as terms come: add them in order, send the sum to everyone; then
//              wait for the others' sums.
//
// A slice travels in parts, so that one is added while the next one comes, and
// is still in the cache.  An all-reduce that is small, or of two ranks, is done
// in one phase: every rank adds up all of it, each part when its own has left.
// Neither changes the order in which an element is summed.
//
// An all-gather is the second phase alone, from slices that are there.
//
// Ranks of one host post a slice, or all that others need of a rank, in memory
// that they share (comm/ordered/host_messages.h): launch() copies it there, and
// terms are added where they are. What has no room travels as to other hosts.
//
// Sums, which are for all ranks, come to another host once: one rank there gets
// them, and passes them on to those beside it (comm/ordered/host_relays.h) when
// it has them all.
//
// Messages are told apart by tags made of the reduction's number and of all
// that ranks must agree about.  So those of two ranks that disagree never meet:
// no memory is written that should not be. On one host that is an error at
// once; between hosts they wait for their timeout.

#ifndef BRIGADE_COMM_ORDERED_ORDERED_REDUCTION_H_
#define BRIGADE_COMM_ORDERED_ORDERED_REDUCTION_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "brigade/comm/ordered/host_messages.h"
#include "brigade/comm/ordered/ordered_kind.h"
#include "brigade/comm/ordered/rank_slice.h"

namespace brigade {

class OrderedReduction {
 public:
  using Kind = OrderedKind;
  struct Call {
    Kind kind;
    at::Tensor input;   // [n]
    at::Tensor output;  // [n], the input itself; or the rank's slice of a
                        // reduce-scatter
    std::optional<double> scale;
    at::Tensor result;  // of the future
  };
  using Tag = int;

  // No message of a reduction has these.
  static constexpr Tag kGoodbyeTag = 0;
  static constexpr Tag kSilentTag = 3;

  // `number`: > 0, equal on all ranks.  REQUIRES: `host`, of the same ranks,
  // outlives this object.
  OrderedReduction(c10::intrusive_ptr<c10d::Backend> backend,
                   HostMessages& host, Call call, int group_size,
                   int64_t part_bytes, uint64_t number);

  int64_t scratch_bytes() const;

  // `scratch`: uint8, of scratch_bytes() at least.  Posts messages, and waits
  // for none, but no longer than the timeout for peers of this host that are
  // 1,000 calls behind.  Errors: the backend's; RuntimeError.
  void launch(at::Tensor scratch, std::chrono::milliseconds timeout);

  // To be called once after launch().  Errors: the backend's; RuntimeError
  // after abort().
  void finish(std::chrono::milliseconds timeout);

  // Ends a finish() that waits for the backend, or comes later.  Any thread.
  void abort();

  // Whether finish() has waited for as long as it may.  Any thread.
  bool is_overdue() const;

  // "all-reduce 3 of 1000 Float, waiting for rank 1".  Any thread.
  std::string describe() const;

  // The scratch, to be used again once finish() has returned.
  at::Tensor take_scratch() { return std::move(scratch_); }

  const Call& call() const { return call_; }

  // To peers, over connections and in memory. Once finish() has returned.
  int64_t sent_bytes() const { return sent_bytes_; }

 private:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  enum class Phase { kTerms, kSums, kPassedOn };
  struct Message {
    int peer;
    WorkPtr work;
  };

  Tag tag_of(Phase phase) const;
  RankSlice slice_of(int rank) const;
  // Parts of a slice: their number, and the i-th, relative to the slice.
  int64_t num_parts(const RankSlice& slice) const;
  RankSlice part(const RankSlice& slice, int64_t index) const;
  at::Tensor term_of(int rank, const RankSlice& own_part) const;
  int64_t offset_in_post_of(int peer) const;
  bool has_terms() const { return call_.kind != Kind::kAllGather; }
  bool has_sums() const {
    return call_.kind != Kind::kReduceScatter && !in_one_phase_;
  }
  template <typename Function>
  void for_each_part_of_others(const Function& function) const;
  template <typename Function>
  void for_each_peer_here(const Function& function) const;
  void send_terms();
  void send_sum(int peer, const RankSlice& own_part);
  void send_own_slice();
  void receive_terms();
  void receive_terms_of(int peer, const at::Tensor& memory);
  void receive_sums();
  void receive_sums_of(int peer);
  void find_terms();
  void add_terms();
  void release_terms();
  void post_sums();
  void read_sums();
  at::Tensor sums_of(int rank) const;
  void pass_on_sums();
  void read_passed_on(int peer);

  HostOutbox::Key key_of(Phase phase) const;
  bool post(Phase phase, std::span<const at::Tensor> pieces);
  void count_read(const RankSlice& slice);
  const std::byte* await(int peer, Phase phase);
  Message send(int peer, Phase phase, const at::Tensor& elements);
  Message receive(int peer, Phase phase, const at::Tensor& elements);
  WorkPtr keep(WorkPtr work);
  void await(const Message& message);

  // Constant after construction.
  const c10::intrusive_ptr<c10d::Backend> backend_;
  HostMessages& host_;
  const Call call_;
  const int rank_;
  const int size_;
  const int group_size_;
  const int64_t part_numel_;
  const uint64_t number_;
  const bool in_one_phase_;
  const RankSlice own_;

  // Of launch() and finish().
  at::Tensor scratch_;
  std::vector<at::Tensor> terms_;  // by rank, of the own slice
  // By part, those that are not of this host.
  std::vector<std::vector<Message>> outgoing_;
  std::vector<std::vector<Message>> incoming_;
  std::vector<Message> sums_;
  std::vector<Message> passed_on_;
  std::vector<Message> sent_sums_;
  int64_t sent_bytes_ = 0;
  std::atomic<std::chrono::steady_clock::time_point> deadline_ =
      std::chrono::steady_clock::time_point::max();
  std::atomic<int> awaited_ = -1;

  std::mutex mutex_;
  // Guarded by mutex_.
  std::vector<WorkPtr> works_;
  bool is_aborted_ = false;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_ORDERED_ORDERED_REDUCTION_H_
