// One reduction of ordered_collectives.h in flight: its messages, its sum, its
// result.  Internal to comm/.
//
// What the ranks do with n elements, if each is to add up a slice:
//
//   launch()   send everyone its term; then post receives of all terms of the
//              own slice, into scratch, and of all sums of the others, into
//              their place.  A sum can't come before the term whose place it
//              takes has left, since its rank needs that term.
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
// Messages are told apart by tags made of the reduction's number and of all
// that ranks must agree about.  So those of two ranks that disagree never meet:
// they wait for their timeout, and no memory is written that should not be.

#ifndef BRIGADE_COMM_ORDERED_REDUCTION_H_
#define BRIGADE_COMM_ORDERED_REDUCTION_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "brigade/comm/ordered_collectives.h"
#include "brigade/comm/rank_slice.h"

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

  // `number`: > 0, equal on all ranks.
  OrderedReduction(c10::intrusive_ptr<c10d::Backend> backend, Call call,
                   int group_size, int64_t part_bytes, uint64_t number);

  int64_t scratch_bytes() const;

  // `scratch`: uint8, of scratch_bytes() at least.  Posts messages, and waits
  // for none.  Errors: the backend's.
  void launch(at::Tensor scratch);

  // To be called once after launch().  Errors: the backend's; RuntimeError
  // after abort().
  void finish(std::chrono::milliseconds timeout);

  // Ends a finish() that waits, or comes later.  Any thread.
  void abort();

  // Whether finish() has waited for as long as it may.  Any thread.
  bool is_overdue() const;

  // "all-reduce 3 of 1000 Float, waiting for rank 1".  Any thread.
  std::string describe() const;

  // The scratch, to be used again once finish() has returned.
  at::Tensor take_scratch() { return std::move(scratch_); }

  const Call& call() const { return call_; }

 private:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  enum class Phase { kTerms, kSums };
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
  bool has_terms() const { return call_.kind != Kind::kAllGather; }
  bool has_sums() const {
    return call_.kind != Kind::kReduceScatter && !in_one_phase_;
  }
  template <typename Function>
  void for_each_part_of_others(const Function& function) const;
  void send_terms();
  void send_own_slice();
  void receive_terms();
  void receive_sums();

  Message send(int peer, Phase phase, const at::Tensor& elements);
  Message receive(int peer, Phase phase, const at::Tensor& elements);
  WorkPtr keep(WorkPtr work);
  void await_sends_of_part(size_t index);
  void await(const Message& message);

  // Constant after construction.
  const c10::intrusive_ptr<c10d::Backend> backend_;
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
  at::Tensor terms_;                            // [size - 1, own slice]
  std::vector<std::vector<Message>> incoming_;  // by part, then by peer
  std::vector<Message> sums_;
  std::vector<Message> sends_;
  std::atomic<std::chrono::steady_clock::time_point> deadline_ =
      std::chrono::steady_clock::time_point::max();
  std::atomic<int> awaited_ = -1;

  std::mutex mutex_;
  // Guarded by mutex_.
  std::vector<WorkPtr> works_;
  bool is_aborted_ = false;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_ORDERED_REDUCTION_H_
