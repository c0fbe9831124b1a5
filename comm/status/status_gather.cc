#include "brigade/comm/status/status_gather.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <cstring>
#include <map>
#include <numeric>
#include <thread>
#include <utility>

#include "brigade/comm/close_group.h"
#include "brigade/comm/group/control_device.h"
#include "brigade/comm/streams/side_stream.h"
#include "brigade/comm/streams/timed_wait.h"
#include "brigade/comm/subgroup.h"

namespace brigade {
namespace {

using std::chrono::milliseconds;

constexpr auto kStatusBytes = static_cast<int64_t>(sizeof(RankStatus));
constexpr milliseconds kEventInterval{1};

class StatusGather final : public StatusTransport {
 public:
  // `subgroup` is null where `group` itself is used.
  StatusGather(c10::intrusive_ptr<c10d::ProcessGroup> group,
               std::unique_ptr<GroupScope> subgroup)
      : subgroup_(std::move(subgroup)),
        group_(subgroup_ ? subgroup_->group() : std::move(group)),
        device_(control_device(*group_)) {}

  // An exchange that nobody has received may never end.
  ~StatusGather() override {
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

  // The end of the subgroup's connections tells the peers.
  void leave(const RankStatus& last) override {}
  void give_up(const RankStatus& last) override { close_group(*group_); }

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

std::unique_ptr<StatusTransport> gather_statuses_over(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  std::unique_ptr<GroupScope> subgroup;
  if (!group->getDeviceTypes().empty()) {
    std::vector<int> ranks(static_cast<size_t>(group->getSize()));
    std::iota(ranks.begin(), ranks.end(), 0);
    subgroup.reset(new GroupScope(  // which can't be moved
        make_subgroup(group, ranks, control_device(*group))));
  }
  return std::make_unique<StatusGather>(group, std::move(subgroup));
}

}  // namespace brigade
