#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include <atomic>
#include <cstdint>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "brigade/comm/backends/sigpipe_block.h"
#include "brigade/comm/group/group_collectives.h"
#include "brigade/comm/ordered/ordered_transport.h"

namespace brigade {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// The terms' all-to-all posts all receives before it sends: Gloo's own sends
// first, and a peer is told of a receive after the data on the same connection,
// so that one direction is idle at a time (1.6 of an all-reduce's time for two
// ranks at 1 Gbit/s).
//
// The backend's all-gathers have the same order on all ranks, whatever arrives
// when: that of the calls. So start() launches a call's first step unless an
// earlier call has one to launch; then finish() does.
//
// The all-reduce of two ranks is one exchange of the whole tensors.
class GroupTransport final : public OrderedTransport {
 public:
  GroupTransport(c10::intrusive_ptr<c10d::Backend> backend,
                 const OrderedRanks& ranks)
      : ranks_(ranks), backend_(std::move(backend)) {}

  int num_threads() const override { return 1; }

  std::unique_ptr<OrderedOperation> start(const OrderedCall& call) override;

  void abort(std::string_view /*reason*/) override {
    const SigpipeBlock writes_to_peers;
    backend_->abort();
  }

 private:
  class Operation;

  const OrderedRanks ranks_;
  const c10::intrusive_ptr<c10d::Backend> backend_;
  uint32_t num_calls_ = 0;
  std::atomic<int> num_to_launch_ = 0;  // calls that finish() has to launch for
};

class GroupTransport::Operation final : public OrderedOperation {
 public:
  // `number`: of the calls, equal on all ranks.
  Operation(GroupTransport& transport, const OrderedCall& call, int number)
      : transport_(transport),
        ranks_(transport.ranks_),
        call_(call),
        tag_(number) {
    const bool may_launch = !call.after && transport_.num_to_launch_ == 0;
    launches_later_ = !may_launch || has_two_collectives();
    if (may_launch) launch_first();
    if (launches_later_) ++transport_.num_to_launch_;
  }

  void finish() override {
    if (call_.after) call_.after->waitAndThrow();
    if (works_.empty()) launch_first();
    await();
    if (call_.kind != OrderedKind::kAllGather) add();
    if (has_two_collectives()) gather();
    if (launches_later_) --transport_.num_to_launch_;
    await();
    if (rows_.defined()) take_rows();
  }

 private:
  void launch_first() {
    if (call_.kind == OrderedKind::kAllGather) {
      gather();
    } else {
      exchange();
    }
  }

  void exchange() {
    terms_.resize(ranks_.size);
    std::vector<at::Tensor> sent(ranks_.size);
    const RankSlice own = slice(ranks_.rank);
    for (int rank = 0; rank < ranks_.size; ++rank) {
      const RankSlice of_rank = slice(rank);
      sent[rank] = call_.input.narrow(0, of_rank.offset, of_rank.numel);
      terms_[rank] = rank == ranks_.rank
                         ? call_.input.narrow(0, own.offset, own.numel)
                         : at::empty({own.numel}, call_.input.options());
    }
    exchange(terms_, sent);
  }

  // With each peer, by rank.
  void exchange(const std::vector<at::Tensor>& received,
                const std::vector<at::Tensor>& sent) {
    const at::DisableRecordFunctionGuard not_profiled;
    c10d::Backend& backend = *transport_.backend_;
    for_each_peer([&](int peer) {
      if (received[peer].numel() == 0) return;
      std::vector<at::Tensor> bytes = {received[peer].view(at::kByte)};
      works_.push_back(backend.recv(bytes, peer, tag_));
    });
    for_each_peer([&](int peer) {
      if (sent[peer].numel() == 0) return;
      std::vector<at::Tensor> bytes = {sent[peer].view(at::kByte)};
      works_.push_back(backend.send(bytes, peer, tag_));
    });
  }

  template <typename Function>
  void for_each_peer(const Function& function) const {
    for (int step = 1; step < ranks_.size; ++step) {
      function((ranks_.rank + step) % ranks_.size);
    }
  }

  void await() {
    for (const WorkPtr& work : works_) work->wait(ranks_.timeout);
    works_.clear();
  }

  void add() {
    const RankSlice own = slice(ranks_.rank);
    ordered_sum(terms_, ranks_.group_size, call_.scale,
                call_.kind == OrderedKind::kReduceScatter
                    ? call_.output
                    : call_.output.narrow(0, own.offset, own.numel));
  }

  // Slices of the output. Of unequal ones rows are gathered apart.
  void gather() {
    const RankSlice own = slice(ranks_.rank);
    at::Tensor all = call_.output;
    at::Tensor sent = all.narrow(0, own.offset, own.numel);
    if (ranks_.size == 2) {
      const RankSlice other = slice(1 - ranks_.rank);
      return exchange({2, all.narrow(0, other.offset, other.numel)}, {2, sent});
    }
    if (all.numel() % ranks_.size != 0) {
      rows_ = at::empty({ranks_.size, slice(0).numel}, all.options());
      rows_[ranks_.rank].narrow(0, 0, own.numel).copy_(sent);
      all = rows_.view(-1);
      sent = rows_[ranks_.rank];
    }
    const at::DisableRecordFunctionGuard not_profiled;
    works_ = {gather_into(*transport_.backend_, all.view(at::kByte),
                          sent.view(at::kByte))};
  }

  void take_rows() {
    for (int rank = 0; rank < ranks_.size; ++rank) {
      const RankSlice of_rank = slice(rank);
      call_.output.narrow(0, of_rank.offset, of_rank.numel)
          .copy_(rows_[rank].narrow(0, 0, of_rank.numel));
    }
  }

  bool is_of_two() const {
    return call_.kind == OrderedKind::kAllReduce && ranks_.size == 2;
  }
  bool has_two_collectives() const {
    return call_.kind == OrderedKind::kAllReduce && ranks_.size > 2;
  }
  RankSlice slice(int rank) const {
    const int64_t numel = call_.input.numel();
    if (is_of_two()) return {.offset = 0, .numel = numel};
    return slice_of_rank(numel, rank, ranks_.size);
  }

  GroupTransport& transport_;
  const OrderedRanks& ranks_;
  const OrderedCall call_;
  bool launches_later_;
  const int tag_;                  // of sends and receives
  std::vector<WorkPtr> works_;     // launched and not awaited
  std::vector<at::Tensor> terms_;  // by rank
  at::Tensor rows_;                // [W, longest]
};

std::unique_ptr<OrderedOperation> GroupTransport::start(
    const OrderedCall& call) {
  constexpr uint32_t kTags = uint32_t{1} << 30;
  return std::make_unique<Operation>(*this, call,
                                     static_cast<int>(num_calls_++ % kTags));
}

}  // namespace

std::unique_ptr<OrderedTransport> make_group_transport(
    c10::intrusive_ptr<c10d::Backend> backend, const OrderedRanks& ranks) {
  return std::make_unique<GroupTransport>(std::move(backend), ranks);
}

}  // namespace brigade
