#include "brigade/comm/ordered/host_sums.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <set>
#include <stdexcept>
#include <vector>

#include "brigade/comm/backends/gloo_backend.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/group/group_collectives.h"

namespace brigade {

namespace {

// Opens a profiler range with the name of Gloo's. Returns the function that
// closes it, on any thread; empty if no profiler is active.
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
  std::weak_ptr<HostSums> living;  // guarded by mutex
  std::atomic<int64_t> num_launches = 0;
};

HostSums::HostSums(const c10::intrusive_ptr<c10d::ProcessGroup>& group)
    : of_group_(per_group<OfGroup>(group)),
      number_(channel_number(group)),
      collectives_(group) {}

std::shared_ptr<HostSums> HostSums::get_or_make(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, bool wants) {
  if (group->getSize() == 1 || !has_gloo_backend(*group)) return nullptr;
  const std::shared_ptr<OfGroup> of_group = per_group<OfGroup>(group);
  std::shared_ptr<HostSums> sums;
  {
    const std::lock_guard<std::mutex> lock(of_group->mutex);
    sums = of_group->living.lock();
  }
  if (sums && sums->collectives_.has_failed()) sums = nullptr;
  const int64_t host = wants && group->getStore() ? SharedSegment::host() : 0;
  const std::vector<int64_t> offers = all_gather_ints(
      group, {host, sums ? sums->number_ : 0}, "could not exchange host ids");
  bool all_have_one = offers[1] != 0;
  for (size_t i = 0; i < offers.size(); i += 2) {
    if (offers[i] == 0 || offers[i] != offers[0]) return nullptr;
    // A peer may have destroyed the previous instance.
    all_have_one = all_have_one && offers[i + 1] == offers[1];
  }
  if (all_have_one) return sums;
  sums.reset(new HostSums(group));
  if (!sums->collectives_.is_on_one_host()) return nullptr;
  const std::lock_guard<std::mutex> lock(of_group->mutex);
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

std::optional<int64_t> count_collectives(c10d::ProcessGroup& group) {
  int64_t count = 0;
  std::set<const c10d::Backend*> counted;
  try {
    for (const c10::Device& device : group.getDeviceTypes()) {
      const auto backend = group.getBackend(device.type());
      if (!counted.insert(backend.get()).second) continue;
      count += static_cast<int64_t>(backend->getSequenceNumberForGroup());
    }
  } catch (const std::exception&) {
    return std::nullopt;
  }
  if (counted.empty()) return std::nullopt;
  return count + HostSums::num_launches(group);
}

}  // namespace brigade
