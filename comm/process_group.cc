#include "brigade/comm/process_group.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <future>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/backends/end_on_own_thread.h"
#include "brigade/comm/backends/gloo_backend.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/group_collectives.h"
#include "brigade/comm/group/group_info.h"
#include "brigade/comm/group/launch_environment.h"
#include "brigade/comm/group/shared_segment.h"
#include "brigade/comm/ordered/ordered_collectives.h"

namespace brigade {
namespace {

using c10d::ProcessGroup;

void validate(const ProcessGroupOptions& options) {
  const bool is_cpu = options.device_type == at::kCPU;
  TORCH_CHECK_VALUE(
      is_cpu || options.device_type == at::kCUDA || options.make_backend,
      "ProcessGroupOptions::device_type: expected kCPU, kCUDA, or a type with "
      "a make_backend, found ",
      options.device_type,
      ".\nSet make_backend to a function that makes the vendor's backend.");
  TORCH_CHECK_VALUE(!is_cpu || !options.make_backend,
                    "ProcessGroupOptions::device_type: expected the device "
                    "type of make_backend's backend, found cpu, which uses "
                    "Gloo.\nSet device_type.");
  TORCH_CHECK_VALUE(options.timeout.count() > 0,
                    "ProcessGroupOptions::timeout: expected > 0 ms, found ",
                    options.timeout.count(), " ms.");
}

void validate_rank(int rank, int world_size) {
  TORCH_CHECK_VALUE(world_size >= 1 && rank >= 0 && rank < world_size,
                    "process group: expected a rank from 0 to world size - 1, "
                    "found rank ",
                    rank, " and world size ", world_size, ".");
}

std::chrono::milliseconds rendezvous_timeout(
    const ProcessGroupOptions& options) {
  return std::min<std::chrono::milliseconds>(options.timeout,
                                             std::chrono::minutes(5));
}

// Blocks until all ranks have called it. Throws at the store's timeout.
void store_barrier(c10d::Store& store, int world_size) {
  if (store.add("ranks here", 1) == world_size) store.set("all here", "1");
  store.wait({"all here"});
}

void shut_down(ProcessGroup& group) {
  try {
    group.shutdown();
  } catch (const std::exception& error) {
    TORCH_WARN("process group '", group.getGroupName(),
               "': shutdown failed: ", error.what());
  }
}

// Returns a view of `store` with a key prefix for one group. The number of
// groups is counted per rank, since one process may hold several ranks.
c10::intrusive_ptr<c10d::Store> store_of_group(
    const c10::intrusive_ptr<c10d::Store>& store, const std::string& name,
    int rank) {
  const int64_t nth = store->add(c10::str(name, "/groups/", rank), 1);
  return c10::make_intrusive<c10d::PrefixStore>(c10::str(name, "/", nth),
                                                store);
}

c10::intrusive_ptr<c10d::Store> connect_store(
    const LaunchEnvironment& env, const ProcessGroupOptions& options) {
  c10d::TCPStoreOptions store_options;
  store_options.port = env.master_port;
  store_options.isServer = env.rank == 0 && !env.agent_hosts_store;
  store_options.numWorkers = env.world_size;
  store_options.timeout = rendezvous_timeout(options);
  store_options.multiTenant = !env.agent_hosts_store;
  return c10::make_intrusive<c10d::TCPStore>(env.master_addr, store_options);
}

// TCPStore waits without limit for the listener's first reply. If the listener
// is another program, the connecting thread is leaked.
c10::intrusive_ptr<c10d::Store> connect_store_in_time(
    const LaunchEnvironment& env, const ProcessGroupOptions& options) {
  std::packaged_task<c10::intrusive_ptr<c10d::Store>()> connecting(
      [env, options] { return connect_store(env, options); });
  auto store = connecting.get_future();
  std::thread(std::move(connecting)).detach();
  // The extra second lets TCPStore report its own timeout.
  const auto limit = rendezvous_timeout(options) + std::chrono::seconds(1);
  TORCH_CHECK(store.wait_for(limit) == std::future_status::ready,
              "the program that listens there is not a TCPStore.\nSet "
              "MASTER_PORT to a port that no other program uses.");
  return store.get();
}

// make_process_group(), but without Gloo for CPU tensors unless `serves_cpu`.
// REQUIRES: `serves_cpu` for the CPU.
c10::intrusive_ptr<ProcessGroup> connect_process_group(
    c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
    const ProcessGroupOptions& options, bool serves_cpu) {
  validate(options);
  validate_rank(rank, world_size);
  TORCH_CHECK_VALUE(store.defined(),
                    "make_process_group: expected a store, found null.\nFor a "
                    "world of 1 without a store call single_process_group().");
  c10::intrusive_ptr<c10d::Store> group_store;
  c10::intrusive_ptr<c10d::Backend> gloo;
  const auto store_for = [&](const char* backend) {
    return c10::make_intrusive<c10d::PrefixStore>(backend, group_store);
  };
  const std::string context =
      c10::str("process group '", options.name, "': rank ", rank, " of ",
               world_size, " could not connect to the other ranks");
  try {
    store->setTimeout(options.timeout);
    group_store = store_of_group(store, options.name, rank);
  } catch (...) {
    throw_peer_error(context, std::current_exception());
  }
  const bool is_nccl =
      options.device_type == at::kCUDA && !options.make_backend;
  const BackendPlace place = {.store = store_for(is_nccl ? "nccl" : "device"),
                              .rank = rank,
                              .world_size = world_size,
                              .timeout = options.timeout,
                              .group_name = options.name};
  c10::intrusive_ptr<c10d::Backend> on_device;
  if (is_nccl) on_device = make_nccl_backend(place);  // does not connect yet
  try {
    if (serves_cpu) {
      gloo = make_gloo_backend(store_for("gloo"), rank, world_size,
                               options.timeout);
    } else {
      store_barrier(*group_store, world_size);
    }
  } catch (...) {
    throw_peer_error(context, std::current_exception());
  }
  // Its constructor may wait for peers, all of which are running now.
  if (options.make_backend) {
    on_device = options.make_backend(place);
    TORCH_CHECK_VALUE(
        on_device && on_device->getRank() == rank &&
            on_device->getSize() == world_size,
        "ProcessGroupOptions::make_backend: expected a backend for rank ", rank,
        " of ", world_size, ", found ",
        on_device ? c10::str("one for rank ", on_device->getRank(), " of ",
                             on_device->getSize())
                  : std::string("none"),
        ".\nConstruct it from the BackendPlace argument.");
  }

  auto group = c10::make_intrusive<ProcessGroup>(group_store, rank, world_size);
  if (gloo) {
    group->setBackend(at::kCPU, ProcessGroup::BackendType::GLOO, gloo);
    group->setDefaultBackend(ProcessGroup::BackendType::GLOO);
  }
  if (on_device) {
    // setBackend() passes the group's device on to the backend.
    group->setBoundDeviceId(on_device->getBoundDeviceId());
    const auto type = is_nccl ? ProcessGroup::BackendType::NCCL
                              : ProcessGroup::BackendType::CUSTOM;
    group->setBackend(options.device_type, type, on_device);
    group->setDefaultBackend(type);
    remember_make_backend(group, options.device_type, options.make_backend);
  }
  group->setGroupName(options.name);
  return group;
}

struct SubgroupCounts {
  std::mutex mutex;
  std::map<std::vector<int>, int> made;  // by ranks; guarded by mutex
};

// Returns a new name at each call, equal on all of its ranks.
std::string subgroup_name(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                          const std::vector<int>& ranks) {
  const auto counts = per_group<SubgroupCounts>(group);
  const std::lock_guard<std::mutex> lock(counts->mutex);
  return absl::StrCat("brigade/subgroup/", absl::StrJoin(ranks, "_"), "/",
                      ++counts->made[ranks]);
}

c10::intrusive_ptr<c10d::ProcessGroup> connect_subgroup(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const std::vector<int>& ranks, c10::Device device) {
  const int own = static_cast<int>(std::ranges::find(ranks, group->getRank()) -
                                   ranks.begin());
  const int size = static_cast<int>(ranks.size());
  if (auto* answers = find_simulated_peers(*group, device.type())) {
    return answers->make_subgroup(own, size);
  }
  const auto store = control_store(*group);
  TORCH_CHECK_VALUE(store, "make_subgroup: the group of ", group->getSize(),
                    " ranks has no store.\nUse a group of "
                    "init_process_group().");
  const std::string name = subgroup_name(group, ranks);
  if (!has_peers(*group)) {
    auto made = c10::make_intrusive<c10d::ProcessGroup>(store, own, size);
    made->setBackend(device.type(), c10d::ProcessGroup::BackendType::CUSTOM,
                     find_backend(*group, device.type()));
    made->setGroupName(name);
    return made;
  }
  const bool over_gloo =
      !device.is_cpu() && is_over_gloo(*group, device.type());
  const c10::DeviceGuard on_device(device);  // NCCL binds to it
  auto made = connect_process_group(
      c10::make_intrusive<c10d::PrefixStore>(name, store), own, size,
      {.device_type = over_gloo ? at::kCPU : device.type(),
       .make_backend =
           over_gloo ? nullptr : find_make_backend(*group, device.type()),
       .timeout = group_timeout(*group),
       .name = name},
      /*serves_cpu=*/over_gloo || device.is_cpu());
  if (over_gloo) {
    made->setBackend(device.type(), c10d::ProcessGroup::BackendType::GLOO,
                     made->getBackend(at::kCPU));
  }
  return made;
}

void close_backend(c10d::Backend& backend) {
  try {
    if (!end_gloo_operations_of(backend)) backend.abort();
  } catch (const std::exception&) {
    // The backend has no abort(): peers wait for their timeout.
  }
}

}  // namespace

c10::intrusive_ptr<ProcessGroup> init_process_group(
    const ProcessGroupOptions& options) {
  return init_process_group(read_launch_environment(), options);
}

c10::intrusive_ptr<ProcessGroup> init_process_group(
    const LaunchEnvironment& env, const ProcessGroupOptions& options) {
  validate(options);
  validate_rank(env.rank, env.world_size);
  select_device(options.device_type, env.local_rank);
  if (env.world_size == 1) {
    std::vector<at::DeviceType> types(kDeviceTypes.begin(), kDeviceTypes.end());
    if (std::ranges::count(types, options.device_type) == 0) {
      types.push_back(options.device_type);
    }
    return single_process_group(std::move(types));
  }

  TORCH_CHECK_VALUE(!env.master_addr.empty() && env.master_port != 0,
                    "LaunchEnvironment: expected the address of rank 0 for ",
                    env.world_size, " ranks, found master_addr '",
                    env.master_addr, "' and master_port ", env.master_port,
                    ".");
  c10::intrusive_ptr<c10d::Store> store;
  try {
    store = connect_store_in_time(env, options);
  } catch (...) {
    throw_peer_error(c10::str("rank ", env.rank, " of ", env.world_size,
                              " could not connect to the other ranks at ",
                              env.master_addr, ":", env.master_port, " within ",
                              rendezvous_timeout(options).count(), " ms"),
                     std::current_exception());
  }
  return make_process_group(c10::make_intrusive<c10d::PrefixStore>(
                                c10::str("attempt_", env.restart_count), store),
                            env.rank, env.world_size, options);
}

c10::intrusive_ptr<ProcessGroup> make_process_group(
    c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
    const ProcessGroupOptions& options) {
  return connect_process_group(std::move(store), rank, world_size, options,
                               /*serves_cpu=*/true);
}

c10::intrusive_ptr<ProcessGroup> single_process_group(
    std::vector<at::DeviceType> device_types) {
  TORCH_CHECK_VALUE(!device_types.empty(),
                    "single_process_group: expected at least 1 device type, "
                    "found none.");
  auto store = c10::make_intrusive<c10d::HashStore>();
  auto group = c10::make_intrusive<ProcessGroup>(store, 0, 1);
  auto backend = make_single_process_backend();
  for (at::DeviceType type : device_types) {
    group->setBackend(type, ProcessGroup::BackendType::CUSTOM, backend);
  }
  group->setDefaultBackend(ProcessGroup::BackendType::CUSTOM);
  group->setGroupName("single process");
  return group;
}

void close_group(c10d::ProcessGroup& group) noexcept {
  try {
    OrderedCollectives::abort_all_of(
        group,
        std::make_exception_ptr(std::runtime_error("the group was closed")));
    for (const c10::Device& device : group.getDeviceTypes()) {
      close_backend(*group.getBackend(device.type()));
    }
  } catch (const std::exception&) {
    // A group written in Python has no backends.
  }
}

GroupScope::GroupScope(c10::intrusive_ptr<ProcessGroup> group, GroupEnd end)
    : exceptions_at_entry_(std::uncaught_exceptions()),
      end_(end),
      group_(std::move(group)) {
  TORCH_CHECK_VALUE(group_.defined(), "GroupScope: the process group is null.");
  store_ = group_->getStore();
}

GroupScope::~GroupScope() {
  if (std::uncaught_exceptions() > exceptions_at_entry_) {
    close_group(*group_);
  } else if (end_ == GroupEnd::kOnOwnThread) {
    end_on_own_thread(absl::Cleanup(
        [store = std::move(store_), group = std::move(group_)]() mutable {
          shut_down(*group);
          group.reset();  // before its store
        }));
  } else {
    shut_down(*group_);
  }
}

GroupScope make_subgroup(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                         const std::vector<int>& ranks, c10::Device device) {
  TORCH_CHECK_VALUE(group,
                    "make_subgroup: the process group is null.\nPass the group "
                    "of init_process_group().");
  std::vector<int> sorted = ranks;
  std::ranges::sort(sorted);
  const bool are_distinct = std::ranges::adjacent_find(sorted) == sorted.end();
  TORCH_CHECK_VALUE(
      are_distinct && std::ranges::binary_search(sorted, group->getRank()) &&
          sorted.front() >= 0 && sorted.back() < group->getSize(),
      "make_subgroup: expected distinct ranks below ", group->getSize(),
      " that include this rank, ", group->getRank(), ", found ",
      absl::StrJoin(ranks, ", "),
      ".\nPass every rank of the subgroup once, this rank included.");
  if (ranks.size() == 1) return GroupScope(single_process_group());
  auto made = connect_subgroup(group, ranks, device);
  if (std::ranges::is_sorted(ranks)) {  // otherwise numbered anew
    RankNames::of(*group).of_some(ranks).set_for(made);
  }
  return GroupScope(std::move(made),
                    device.is_cpu() ? GroupEnd::kHere : GroupEnd::kOnOwnThread);
}

int ranks_of_a_host(const std::vector<int64_t>& host_by_rank) {
  const int found = ranks_per_host(host_by_rank);
  const auto unknown = std::ranges::find(host_by_rank, 0);
  const std::vector<RanksOfValue<int64_t>> hosts = ranks_by_value(host_by_rank);
  const auto describe = [&](size_t host) {
    return absl::StrCat(describe_ranks(hosts[host].ranks), " on ",
                        host == 0 ? "one host" : "another");
  };
  TORCH_CHECK_VALUE(
      found > 0,
      "ranks_of_a_host: expected the same number of consecutive ranks on each "
      "host, found ",
      unknown == host_by_rank.end()
          ? shortened_list(hosts.size(), describe)
          : absl::StrCat("no host identity on rank ",
                         unknown - host_by_rank.begin()),
      ".\nStart n ranks on each host, numbered host by host, or set the number "
      "of shards.");
  return found;
}

int ranks_of_a_host(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  if (group->getSize() == 1) return 1;
  return ranks_of_a_host(
      all_gather_ints(group, {SharedSegment::host()},
                      "could not exchange host ids for ranks_of_a_host()"));
}

}  // namespace brigade
