#include "brigade/comm/ordered/host_sums.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "brigade/comm/backends/gloo_connections.h"
#include "brigade/comm/errors/message_of.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/per_group.h"
#include "brigade/comm/ordered/ordered_sum.h"
#include "brigade/comm/ordered/shared_memory.h"

namespace brigade {
namespace {

// What a rank says of itself.
struct Offer {
  int64_t host;    // 0: it can't meet others, or does not want to
  int64_t number;  // of the sums that the group has here; 0: none

  friend bool operator==(const Offer&, const Offer&) = default;
};

std::vector<Offer> exchange(c10d::ProcessGroup& group, const Offer& own) {
  std::vector<at::Tensor> inputs = {at::tensor({own.host, own.number})};
  std::vector<std::vector<at::Tensor>> outputs(1);  // by rank, [2]
  for (int rank = 0; rank < group.getSize(); ++rank) {
    outputs.front().push_back(at::empty({2}, at::kLong));
  }
  try {
    group.allgather(outputs, inputs)->wait();
  } catch (...) {
    throw_peer_error(c10::str("rank ", group.getRank(), " of ", group.getSize(),
                              " could not tell the others its host"),
                     std::current_exception());
  }
  std::vector<Offer> offers;
  for (const at::Tensor& output : outputs.front()) {
    const auto* const words = output.const_data_ptr<int64_t>();
    offers.push_back({.host = words[0], .number = words[1]});
  }
  return offers;
}

// While a profiler is active it sees a sum under the name of Gloo's, from its
// launch until it is there.  Returns what ends the range, on any thread; empty:
// there is none.
std::function<void()> begin_range(const at::Tensor& tensor) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks) return nullptr;
  const auto range =
      std::make_shared<at::RecordFunction>(*std::move(callbacks));
  range->_setAsync();
  const c10::IValue input = tensor;
  range->before("gloo:all_reduce", c10::ArrayRef<const c10::IValue>(&input, 1));
  return at::wrapPropagateTLSState([range] { range->end(); });
}

}  // namespace

struct HostSums::OfGroup {
  std::mutex mutex;
  // Guarded by mutex.
  std::weak_ptr<HostSums> living;
  bool is_refused = false;  // the system shares no memory

  std::atomic<int64_t> num_launches = 0;

  std::shared_ptr<HostSums> get() {
    const std::lock_guard<std::mutex> lock(mutex);
    return living.lock();
  }

  bool may_be_made() {
    const std::lock_guard<std::mutex> lock(mutex);
    return !is_refused;
  }
};

HostSums::HostSums(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                   std::shared_ptr<OfGroup> of_group)
    : of_group_(std::move(of_group)),
      identity_(ChannelIdentity::made_together(group)),
      collectives_(group, {}, identity_) {}

// What a rank still has of an earlier meeting another may have let go of: it is
// taken where all have it.
std::shared_ptr<HostSums> HostSums::meet(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, bool wants) {
  if (group->getSize() == 1 || gloo_devices_of(*group).empty()) return nullptr;
  const std::shared_ptr<OfGroup> of_group = per_group<OfGroup>(group);
  std::shared_ptr<HostSums> sums = of_group->get();
  if (sums && sums->collectives_.has_failed()) sums = nullptr;
  const bool can_meet = wants && of_group->may_be_made() && group->getStore();
  const std::vector<Offer> offers = exchange(
      *group,
      {.host = can_meet ? static_cast<int64_t>(SharedMemory::host()) : 0,
       .number = sums ? static_cast<int64_t>(sums->identity_.number()) : 0});
  const Offer& first = offers.front();
  if (std::ranges::any_of(offers, [&](const Offer& offer) {
        return offer.host == 0 || offer.host != first.host;
      })) {
    return nullptr;
  }
  const bool all_have_it =
      first.number != 0 && std::ranges::all_of(offers, [&](const Offer& offer) {
        return offer == first;
      });
  if (all_have_it) return sums;
  sums = std::shared_ptr<HostSums>(new HostSums(group, of_group));
  const std::lock_guard<std::mutex> lock(of_group->mutex);
  of_group->is_refused = !sums->collectives_.is_on_one_host();
  if (of_group->is_refused) return nullptr;
  of_group->living = sums;
  return sums;
}

bool HostSums::can_reduce(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.is_cpu() &&
         tensor.is_contiguous() && can_add(tensor.scalar_type());
}

OrderedCollectives::FuturePtr HostSums::all_reduce(const at::Tensor& tensor) {
  const std::function<void()> end_range = begin_range(tensor);
  const auto reduced = collectives_.all_reduce(tensor);
  ++of_group_->num_launches;
  return reduced->then(
      [end_range](c10::ivalue::Future& done) {
        if (end_range) end_range();
        if (done.hasError()) {
          throw std::runtime_error(message_of(done.exception_ptr()));
        }
        return done.value();
      },
      reduced->elementType());
}

int64_t HostSums::num_launches(const c10d::ProcessGroup& group) {
  const std::shared_ptr<OfGroup> found = find_per_group<OfGroup>(group);
  return found ? found->num_launches.load() : 0;
}

void HostSums::close(const c10d::ProcessGroup& group,
                     const std::exception_ptr& cause) {
  const std::shared_ptr<OfGroup> found = find_per_group<OfGroup>(group);
  if (!found) return;
  if (const auto sums = found->get()) sums->collectives_.abort(cause);
}

}  // namespace brigade
