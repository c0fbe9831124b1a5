#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "brigade/comm/backends/gloo_backend.h"
#include "brigade/comm/ordered/ordered_collectives.h"

namespace brigade {
namespace {

using std::chrono::milliseconds;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr int kGoodbyeTag = 0;
constexpr milliseconds kGoodbyeTimeout = std::chrono::seconds(1);
constexpr milliseconds kForever = std::chrono::hours(24 * 365);

// All-to-alls and all-gathers by the backend's sends and receives, receives
// first. Gloo's all-to-all sends first, so that one direction of a connection
// is always idle.
//
// Gloo does not fail a partly sent message when the peer dies. Therefore each
// rank waits for a goodbye message from the next rank. After a death that wait
// fails, and the rank aborts its operations and closes its connections. The
// previous rank notices, and so on around the ring.
class GroupTransport final : public OrderedTransport {
 public:
  GroupTransport(c10::intrusive_ptr<c10d::Backend> backend,
                 const OrderedRanks& ranks)
      : ranks_(ranks), backend_(std::move(backend)) {
    std::vector<at::Tensor> byte = {at::empty({1}, at::kByte)};
    departure_ = backend_->recv(byte, next(), kGoodbyeTag);
    watch_ = std::thread([this] { watch(); });
  }

  ~GroupTransport() override {
    if (!is_aborted_) say_goodbye();
    is_aborted_ = true;
    departure_->abort();
    watch_.join();
  }

  std::unique_ptr<OrderedOperation> start(const OrderedCall& call) override;

  void abort(std::string_view reason) override;

 private:
  class Operation;
  struct Message {
    int peer;
    WorkPtr work;
  };

  int next() const { return (ranks_.rank + 1) % ranks_.size; }

  void watch() {
    try {
      departure_->wait(kForever);
    } catch (const std::exception&) {
      if (!is_aborted_) {
        abort(c10::str("the connection to rank ", ranks_.names[next()],
                       " is closed: that rank, or one after it, has died"));
      }
    }
  }

  // Makes the previous rank accept a closed connection from now on.
  void say_goodbye() {
    const SigpipeBlock writes_to_peer;
    std::vector<at::Tensor> byte = {at::zeros({1}, at::kByte)};
    const int watcher = (ranks_.rank + ranks_.size - 1) % ranks_.size;
    try {
      backend_->send(byte, watcher, kGoodbyeTag)->wait(kGoodbyeTimeout);
    } catch (const std::exception&) {
      // The previous rank has left already.
    }
  }

  const OrderedRanks ranks_;
  const c10::intrusive_ptr<c10d::Backend> backend_;
  WorkPtr departure_;  // of the next rank
  std::thread watch_;
  uint32_t num_calls_ = 0;

  std::atomic<bool> is_aborted_ = false;
  std::mutex mutex_;
  // Guarded by mutex_.
  std::string abort_reason_;
  std::map<const Operation*, std::vector<Message>> messages_;  // in flight
};

class GroupTransport::Operation final : public OrderedOperation {
 public:
  // `number`: of the call, equal on all ranks.
  Operation(GroupTransport& transport, const OrderedCall& call, uint32_t number)
      : transport_(transport),
        ranks_(transport.ranks_),
        call_(call),
        number_(number) {}

  ~Operation() override { forget(); }

  void launch() {
    if (call_.kind == OrderedKind::kAllGather) return gather();
    std::vector<at::Tensor> sent(ranks_.size);
    terms_.resize(ranks_.size);
    const int64_t own_numel = slice(ranks_.rank).numel;
    for (int rank = 0; rank < ranks_.size; ++rank) {
      sent[rank] = elements_of(call_.input, rank);
      terms_[rank] = rank == ranks_.rank
                         ? sent[rank]
                         : at::empty({own_numel}, call_.input.options());
    }
    exchange(0, terms_, sent);
  }

  void finish() override {
    if (call_.after) {
      call_.after->waitAndThrow();
      launch();
    }
    await();
    if (call_.kind != OrderedKind::kAllGather) {
      add();
      if (call_.kind == OrderedKind::kReduceScatter || is_of_two()) return;
      gather();
      await();
    }
    gather_on_host();
    await();
  }

 private:
  void add() {
    ordered_sum(terms_, call_.scale,
                call_.kind == OrderedKind::kReduceScatter
                    ? call_.output
                    : elements_of(call_.output, ranks_.rank));
  }

  // An all-gather of the output's slices, in place, in two phases, so that a
  // slice comes to each host once: from its rank to the rank with the same
  // place on every other host; then each rank sends all slices that it has to
  // the ranks of its own host.
  void gather() {
    std::vector<at::Tensor> received(ranks_.size), sent(ranks_.size);
    for (int peer = 0; peer < ranks_.size; ++peer) {
      if (place_of(peer) != place_of(ranks_.rank)) continue;
      received[peer] = elements_of(call_.output, peer);
      sent[peer] = elements_of(call_.output, ranks_.rank);
    }
    exchange(1, received, sent);
  }

  void gather_on_host() {
    const int per_host = ranks_.ranks_per_host;
    const int begin = ranks_.rank - place_of(ranks_.rank);
    for (int host = 0; host < ranks_.size / per_host; ++host) {
      std::vector<at::Tensor> received(ranks_.size), sent(ranks_.size);
      for (int peer = begin; peer < begin + per_host; ++peer) {
        received[peer] =
            elements_of(call_.output, host * per_host + place_of(peer));
        sent[peer] =
            elements_of(call_.output, host * per_host + place_of(ranks_.rank));
      }
      exchange(2 + host, received, sent);
    }
  }

  // Number of a rank on its host.
  int place_of(int rank) const { return rank % ranks_.ranks_per_host; }

  // Receives from and sends to each peer. The arguments are by rank; undefined:
  // no message.
  void exchange(uint32_t phase, const std::vector<at::Tensor>& received,
                const std::vector<at::Tensor>& sent) {
    const SigpipeBlock writes_to_peers;
    // A profiler that sees a message begin here may be gone when it ends.
    const at::DisableRecordFunctionGuard not_profiled;
    const uint32_t num_phases = 2 + ranks_.size / ranks_.ranks_per_host;
    const int tag =
        static_cast<int>((num_phases * number_ + phase) % kTags) + 1;
    c10d::Backend& backend = *transport_.backend_;
    const auto with_each_peer = [&](const std::vector<at::Tensor>& elements,
                                    const auto& launch) {
      for (int step = 1; step < ranks_.size; ++step) {
        const int peer = (ranks_.rank + step) % ranks_.size;
        if (!elements[peer].defined() || elements[peer].numel() == 0) continue;
        std::vector<at::Tensor> bytes = {elements[peer].view(at::kByte)};
        WorkPtr work = launch(bytes, peer);
        const std::lock_guard<std::mutex> lock(transport_.mutex_);
        transport_.messages_[this].push_back({peer, std::move(work)});
      }
    };
    with_each_peer(received, [&](auto& bytes, int peer) {
      return backend.recv(bytes, peer, tag);
    });
    with_each_peer(sent, [&](auto& bytes, int peer) {
      return backend.send(bytes, peer, tag);
    });
  }

  void await() {
    std::vector<Message> messages;
    {
      const std::lock_guard<std::mutex> lock(transport_.mutex_);
      messages = transport_.messages_[this];
    }
    for (const Message& message : messages) {
      awaited_ = message.peer;
      try {
        throw_if_aborted();
        TORCH_CHECK(message.work->wait(ranks_.timeout), "it was aborted");
      } catch (...) {
        throw_if_aborted();
        throw;
      }
    }
    forget();
  }

  void throw_if_aborted() {
    const std::lock_guard<std::mutex> lock(transport_.mutex_);
    TORCH_CHECK(!transport_.is_aborted_, transport_.abort_reason_);
  }

  void forget() {
    const std::lock_guard<std::mutex> lock(transport_.mutex_);
    transport_.messages_.erase(this);
  }

  // Two ranks send each other all elements and need no all-gather.
  bool is_of_two() const {
    return call_.kind == OrderedKind::kAllReduce && ranks_.size == 2;
  }
  RankSlice slice(int rank) const {
    const int64_t numel = call_.input.numel();
    if (is_of_two()) return {.offset = 0, .numel = numel};
    return slice_of_rank(numel, rank, ranks_.size);
  }
  at::Tensor elements_of(const at::Tensor& whole, int rank) const {
    const RankSlice of_rank = slice(rank);
    return whole.narrow(0, of_rank.offset, of_rank.numel);
  }

  static constexpr uint32_t kTags = uint32_t{1} << 30;

  GroupTransport& transport_;
  const OrderedRanks& ranks_;
  const OrderedCall call_;
  const uint32_t number_;
  std::vector<at::Tensor> terms_;  // by rank
};

std::unique_ptr<OrderedOperation> GroupTransport::start(
    const OrderedCall& call) {
  auto operation = std::make_unique<Operation>(*this, call, num_calls_++);
  if (!call.after) operation->launch();
  return operation;
}

void GroupTransport::abort(std::string_view reason) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_aborted_) return;
    abort_reason_ = reason;
    is_aborted_ = true;
  }
  const SigpipeBlock writes_to_peers;
  end_gloo_operations_of(*backend_);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [operation, messages] : messages_) {
    for (const Message& message : messages) message.work->abort();
  }
}

}  // namespace

std::unique_ptr<OrderedTransport> make_group_transport(
    c10::intrusive_ptr<c10d::Backend> backend, const OrderedRanks& ranks) {
  return std::make_unique<GroupTransport>(std::move(backend), ranks);
}

}  // namespace brigade
