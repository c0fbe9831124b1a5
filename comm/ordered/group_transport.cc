#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include <atomic>
#include <numeric>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "brigade/comm/backends/sigpipe_block.h"
#include "brigade/comm/group/group_collectives.h"
#include "brigade/comm/ordered/ordered_transport.h"

namespace brigade {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// The backend's collectives have the same order on all ranks, whatever arrives
// when: a call's all-gather comes before the next call's all-to-all. So start()
// launches a call's first collective unless an earlier call has one to launch;
// then finish() does.
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
  std::atomic<int> num_to_launch_ = 0;  // calls that finish() has to launch for
};

class GroupTransport::Operation final : public OrderedOperation {
 public:
  Operation(GroupTransport& transport, const OrderedCall& call)
      : transport_(transport), ranks_(transport.ranks_), call_(call) {
    const bool may_launch = !call.after && transport_.num_to_launch_ == 0;
    launches_later_ = !may_launch || has_two_collectives();
    if (may_launch) launch_first();
    if (launches_later_) ++transport_.num_to_launch_;
  }

  void finish() override {
    if (call_.after) call_.after->waitAndThrow();
    if (!work_) launch_first();
    work_->wait();
    if (call_.kind != OrderedKind::kAllGather) add();
    if (has_two_collectives()) gather();
    if (launches_later_) --transport_.num_to_launch_;
    if (has_two_collectives()) work_->wait();
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
    const int64_t element_size = call_.input.element_size();
    std::vector<int64_t> sent;
    for (int rank = 0; rank < ranks_.size; ++rank) {
      sent.push_back(element_size * slice(rank).numel);
    }
    std::vector<int64_t> received(ranks_.size, sent[ranks_.rank]);
    if (is_of_two()) {
      sent[ranks_.rank] = 0;
      received = sent;
    }
    terms_ = at::empty(
        {std::accumulate(received.begin(), received.end(), int64_t{0})},
        at::kByte);
    const at::DisableRecordFunctionGuard not_profiled;
    work_ = exchange_parts(*transport_.backend_, terms_,
                           call_.input.view(at::kByte), received, sent);
  }

  void add() {
    const RankSlice own = slice(ranks_.rank);
    const at::Tensor of_peers = terms_.view(call_.input.scalar_type());
    std::vector<at::Tensor> terms;
    for (int rank = 0; rank < ranks_.size; ++rank) {
      const int64_t begin = is_of_two() ? 0 : rank * own.numel;
      terms.push_back(rank == ranks_.rank
                          ? call_.input.narrow(0, own.offset, own.numel)
                          : of_peers.narrow(0, begin, own.numel));
    }
    ordered_sum(terms, ranks_.group_size, call_.scale,
                call_.kind == OrderedKind::kReduceScatter
                    ? call_.output
                    : call_.output.narrow(0, own.offset, own.numel));
  }

  // Slices of the output. Of unequal ones rows are gathered apart.
  void gather() {
    const RankSlice own = slice(ranks_.rank);
    at::Tensor all = call_.output;
    at::Tensor sent = all.narrow(0, own.offset, own.numel);
    if (all.numel() % ranks_.size != 0) {
      rows_ = at::empty({ranks_.size, slice(0).numel}, all.options());
      rows_[ranks_.rank].narrow(0, 0, own.numel).copy_(sent);
      all = rows_.view(-1);
      sent = rows_[ranks_.rank];
    }
    const at::DisableRecordFunctionGuard not_profiled;
    work_ = gather_into(*transport_.backend_, all.view(at::kByte),
                        sent.view(at::kByte));
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
  WorkPtr work_;      // the last that was launched
  at::Tensor terms_;  // bytes
  at::Tensor rows_;   // [W, longest]
};

std::unique_ptr<OrderedOperation> GroupTransport::start(
    const OrderedCall& call) {
  return std::make_unique<Operation>(*this, call);
}

}  // namespace

std::unique_ptr<OrderedTransport> make_group_transport(
    c10::intrusive_ptr<c10d::Backend> backend, const OrderedRanks& ranks) {
  return std::make_unique<GroupTransport>(std::move(backend), ranks);
}

}  // namespace brigade
