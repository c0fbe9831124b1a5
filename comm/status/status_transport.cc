#include "brigade/comm/status/status_transport.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/group/group_info.h"
#include "brigade/comm/group/shared_segment.h"
#include "brigade/comm/process_group.h"
#include "brigade/comm/streams/streams.h"

namespace brigade {
namespace {

// A rank has sent at most kMaxStatusesInFlight more exchanges than it has
// received, so it is at most twice that many ahead of a reader.
constexpr int64_t kDepth = 2 * kMaxStatusesInFlight + 1;

// One rank's region of the segment; initially all zeros.
struct Region {
  std::atomic<int64_t> num_sent;
  std::array<RankStatus, kDepth> ring;  // by sequence modulo kDepth
};

class SharedStatusTransport final : public StatusTransport {
 public:
  explicit SharedStatusTransport(std::shared_ptr<SharedSegment> segment)
      : segment_(std::move(segment)) {}

  void send(const RankStatus& own) override {
    Region& region = of(segment_->rank());
    region.ring[own.sequence % kDepth] = own;
    region.num_sent.store(own.sequence);
    segment_->notify();
  }

  bool is_complete(int64_t sequence) override {
    for (int rank = 0; rank < segment_->size(); ++rank) {
      if (!has_sent(rank, sequence)) {
        return segment_->is_closed() || !segment_->is_alive(rank);
      }
    }
    return true;
  }

  std::optional<std::vector<RankStatus>> receive(int64_t sequence,
                                                 Deadline deadline) override {
    std::vector<RankStatus> by_rank;
    by_rank.reserve(static_cast<size_t>(segment_->size()));
    for (int rank = 0; rank < segment_->size(); ++rank) {
      if (!await(rank, sequence, deadline)) return std::nullopt;
      by_rank.push_back(of(rank).ring[sequence % kDepth]);
    }
    return by_rank;
  }

  void abort(const RankStatus& last) override {
    segment_->close(absl::StrCat("rank ", segment_->name_of(segment_->rank()),
                                 " has stopped waiting: it ",
                                 describe_status(last)));
  }

  std::vector<int> dead_ranks() override { return segment_->dead_ranks(); }

 private:
  Region& of(int rank) const {
    return *reinterpret_cast<Region*>(segment_->region(rank));
  }

  const RankStatus& last_of(int rank) const {
    return of(rank).ring[of(rank).num_sent.load() % kDepth];
  }

  bool has_sent(int rank, int64_t sequence) const {
    return of(rank).num_sent.load() >= sequence;
  }

  bool await(int rank, int64_t sequence, Deadline deadline) {
    try {
      return segment_->wait_for(rank, deadline,
                                [&] { return has_sent(rank, sequence); });
    } catch (const c10::Error& error) {
      const std::string reason = error.what_without_backtrace();
      if (segment_->has_left(rank) && segment_->lost_rank() < 0) {
        throw RankLost(
            describe_leaver(segment_->name_of(rank), last_of(rank).iteration));
      }
      // A rank that gave up does not know whether others are lost.
      if (segment_->is_closed() && segment_->lost_rank() < 0) {
        throw std::runtime_error(reason);
      }
      throw RankLost(reason + "; see its log");
    }
  }

  const std::shared_ptr<SharedSegment> segment_;
};

using std::chrono::milliseconds;

constexpr auto kStatusBytes = static_cast<int64_t>(sizeof(RankStatus));
constexpr milliseconds kEventInterval{1};

class GatheringStatusTransport final : public StatusTransport {
 public:
  // `subgroup`: null to use `group` itself.
  GatheringStatusTransport(c10::intrusive_ptr<c10d::ProcessGroup> group,
                           std::unique_ptr<GroupScope> subgroup)
      : subgroup_(std::move(subgroup)),
        group_(subgroup_ ? subgroup_->group() : std::move(group)),
        device_(control_device(*group_)) {}

  // An exchange that was not received may never end.
  ~GatheringStatusTransport() override {
    if (subgroup_ && !exchanges_.empty()) close_group(*group_);
  }

  void send(const RankStatus& own) override {
    const at::NoGradGuard no_grad;
    at::Tensor input = at::empty({kStatusBytes}, at::kByte);
    std::memcpy(input.mutable_data_ptr(), &own, sizeof(own));
    std::optional<c10::StreamGuard> on_side_stream;
    if (!device_.is_cpu()) {
      on_side_stream.emplace(side_stream(device_));
      input = input.to(device_);
    }
    Exchange exchange = {
        .input = input,
        .gathered =
            at::empty({group_->getSize(), kStatusBytes}, input.options())};
    std::vector<std::vector<at::Tensor>> outputs = {exchange.gathered.unbind()};
    std::vector<at::Tensor> inputs = {input};
    exchange.work = group_->allgather(outputs, inputs);
    exchange.future = exchange.work->getFuture();
    if (on_side_stream) {
      exchange.future->wait();  // orders the stream only
      exchange.gathered =
          exchange.gathered.to(at::TensorOptions(at::kCPU).pinned_memory(true),
                               /*non_blocking=*/true);
      exchange.copied.emplace(device_.type());
      exchange.copied->record(on_side_stream->current_stream());
    }
    exchanges_.emplace(own.sequence, std::move(exchange));
  }

  bool is_complete(int64_t sequence) override {
    const Exchange& exchange = exchanges_.at(sequence);
    return exchange.future->completed() &&
           (!exchange.copied || exchange.copied->query());
  }

  std::optional<std::vector<RankStatus>> receive(int64_t sequence,
                                                 Deadline deadline) override {
    const auto left = std::chrono::ceil<milliseconds>(
        deadline - std::chrono::steady_clock::now());
    Exchange& exchange = exchanges_.at(sequence);
    if (!wait_for(*exchange.future, std::max(left, milliseconds(0)))) {
      return std::nullopt;
    }
    if (exchange.future->hasError()) {
      std::rethrow_exception(exchange.future->exception_ptr());
    }
    while (exchange.copied && !exchange.copied->query()) {
      if (std::chrono::steady_clock::now() >= deadline) return std::nullopt;
      std::this_thread::sleep_for(kEventInterval);
    }
    const at::Tensor gathered = exchange.gathered;
    std::vector<RankStatus> by_rank(static_cast<size_t>(group_->getSize()));
    std::memcpy(by_rank.data(), gathered.const_data_ptr(),
                by_rank.size() * sizeof(RankStatus));
    exchanges_.erase(sequence);
    return by_rank;
  }

  void abort(const RankStatus& last) override { close_group(*group_); }

 private:
  struct Exchange {
    at::Tensor input;     // uint8 [bytes of a status]
    at::Tensor gathered;  // uint8 [world size, bytes of a status]
    c10::intrusive_ptr<c10d::Work> work = {};
    c10::intrusive_ptr<c10::ivalue::Future> future = {};
    std::optional<c10::Event> copied = {};  // devices: gathered is on the host
  };

  const std::unique_ptr<GroupScope> subgroup_;
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const c10::Device device_;
  std::map<int64_t, Exchange> exchanges_;  // by sequence
};

}  // namespace

std::unique_ptr<StatusTransport> make_shared_status_transport(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  auto segment = SharedSegment::make(group, sizeof(Region));
  if (!segment) return nullptr;
  return std::make_unique<SharedStatusTransport>(std::move(segment));
}

std::unique_ptr<StatusTransport> make_gathering_status_transport(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  std::unique_ptr<GroupScope> subgroup;
  if (!group->getDeviceTypes().empty()) {
    std::vector<int> ranks(static_cast<size_t>(group->getSize()));
    std::iota(ranks.begin(), ranks.end(), 0);
    subgroup.reset(new GroupScope(  // not movable
        make_subgroup(group, ranks, control_device(*group))));
  }
  return std::make_unique<GatheringStatusTransport>(group, std::move(subgroup));
}

}  // namespace brigade
