#include "brigade/comm/group/group_info.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/error_texts.h"

namespace brigade {
namespace {

struct SuggestedDevice {
  std::mutex mutex;
  std::optional<c10::Device> device;  // guarded by `mutex`
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> find_backend(c10d::ProcessGroup& group,
                                               c10::DeviceType device_type) {
  try {
    return group.getBackend(device_type);
  } catch (const std::exception&) {
    return nullptr;
  }
}

bool is_over_gloo(c10d::ProcessGroup& group, c10::DeviceType device_type) {
  const auto backend = find_backend(group, device_type);
  return backend && backend->getBackendName() == "gloo";
}

bool has_peers(c10d::ProcessGroup& group) {
  if (group.getSize() == 1 || !group.getStore()) return false;
  const auto backend = find_backend(group, at::kCPU);
  return !backend || backend->getBackendName() != "fake";
}

bool supports_device(const c10d::ProcessGroup& group, c10::DeviceType type) {
  const std::vector<c10::Device> devices = group.getDeviceTypes();
  return devices.empty() ||
         std::ranges::find(devices, type, &c10::Device::type) != devices.end();
}

c10::Device control_device(const c10d::ProcessGroup& group) {
  if (supports_device(group, c10::kCPU)) return c10::kCPU;
  if (group.getBoundDeviceId().has_value()) return *group.getBoundDeviceId();
  if (const auto suggested = find_per_group<SuggestedDevice>(group)) {
    const std::lock_guard<std::mutex> lock(suggested->mutex);
    if (suggested->device) return *suggested->device;
  }
  const c10::DeviceType type = group.getDeviceTypes().front().type();
  return c10::impl::VirtualGuardImpl(type).getDevice();
}

void suggest_control_device(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                            c10::Device device) {
  const std::vector<c10::Device> served = group->getDeviceTypes();
  if (served.empty() || served.front().type() != device.type() ||
      control_device(*group).is_cpu()) {
    return;
  }
  const auto suggested = per_group<SuggestedDevice>(group);
  const std::lock_guard<std::mutex> lock(suggested->mutex);
  if (!suggested->device) suggested->device = device;
}

c10::intrusive_ptr<c10d::Store> control_store(c10d::ProcessGroup& group) {
  const c10::intrusive_ptr<c10d::Store> store = group.getStore();
  auto* const prefix = dynamic_cast<c10d::PrefixStore*>(store.get());
  const auto innermost = prefix ? prefix->getUnderlyingNonPrefixStore() : store;
  const bool is_tcp = dynamic_cast<c10d::TCPStore*>(innermost.get()) != nullptr;
  return is_tcp ? store->clone() : store;
}

std::chrono::milliseconds group_timeout(c10d::ProcessGroup& group) {
  std::chrono::milliseconds shortest = kBackendDefaultTimeout;
  for (const c10::Device device : group.getDeviceTypes()) {
    try {
      const auto options = group.getBackend(device.type())->getBackendOptions();
      if (options) shortest = std::min(shortest, options->timeout);
    } catch (const std::exception&) {
      // This backend has no options.
    }
  }
  return shortest;
}

int ranks_per_host(const std::vector<int64_t>& host_by_rank) {
  const auto count = std::ranges::count(host_by_rank, host_by_rank.front());
  for (size_t rank = 0; rank < host_by_rank.size(); ++rank) {
    const int64_t host = host_by_rank[rank];
    if (host == 0 || host != host_by_rank[rank - rank % count] ||
        std::ranges::count(host_by_rank, host) != count) {
      return 0;
    }
  }
  return static_cast<int>(count);
}

RankNames RankNames::of(const c10d::ProcessGroup& group) {
  const auto known = find_per_group<RankNames>(group);
  return known ? *known : RankNames();
}

RankNames RankNames::of_some(const std::vector<int>& ranks) const {
  RankNames names;
  for (const int rank : ranks) names.numbers_.push_back((*this)[rank]);
  return names;
}

void RankNames::set_for(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) const {
  *per_group<RankNames>(group) = *this;
}

std::string RankNames::describe(int rank, int num_ranks) const {
  if (numbers_.empty()) return absl::StrCat("rank ", rank, " of ", num_ranks);
  return absl::StrCat("rank ", numbers_[rank], ", of ranks ",
                      shortened_list(numbers_.size(),
                                     [this](size_t i) { return numbers_[i]; }));
}

SimulatesPeers* find_simulated_peers(c10d::ProcessGroup& group,
                                     c10::DeviceType device_type) {
  return dynamic_cast<SimulatesPeers*>(find_backend(group, device_type).get());
}

}  // namespace brigade
