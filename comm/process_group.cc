#include "brigade/comm/process_group.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <future>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "brigade/comm/backends/device_backend.h"
#include "brigade/comm/backends/end_on_own_thread.h"
#include "brigade/comm/backends/gloo_backend.h"
#include "brigade/comm/close_group.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/group_info.h"
#include "brigade/comm/group/launch_environment.h"

namespace brigade {
namespace {

using c10d::ProcessGroup;

void validate(const ProcessGroupOptions& options) {
  const bool is_cpu = options.device_type == at::kCPU;
  TORCH_CHECK_VALUE(
      is_cpu || options.device_type == at::kCUDA || options.make_backend,
      "ProcessGroupOptions::device_type: expected kCPU or kCUDA, or a "
      "make_backend, found ",
      options.device_type,
      ".\nGive one that makes the vendor's backend for these tensors.");
  TORCH_CHECK_VALUE(!is_cpu || !options.make_backend,
                    "ProcessGroupOptions: expected the device_type whose "
                    "tensors make_backend "
                    "is for, found cpu, which has Gloo.\nSet device_type.");
  TORCH_CHECK_VALUE(options.timeout.count() > 0,
                    "ProcessGroupOptions::timeout must be > 0 ms, got ",
                    options.timeout.count(), " ms.");
}

void validate_place(int rank, int world_size) {
  TORCH_CHECK_VALUE(world_size >= 1 && rank >= 0 && rank < world_size,
                    "rank must be >= 0 and below the world size, got rank ",
                    rank, " and world size ", world_size, ".");
}

std::chrono::milliseconds rendezvous_timeout(
    const ProcessGroupOptions& options) {
  return std::min<std::chrono::milliseconds>(options.timeout,
                                             std::chrono::minutes(5));
}

// Waits until all ranks have come, or the store's timeout is over.
void meet(c10d::Store& store, int world_size) {
  if (store.add("ranks here", 1) == world_size) store.set("all here", "1");
  store.wait({"all here"});
}

void shut_down(ProcessGroup& group) {
  try {
    group.shutdown();
  } catch (const std::exception& error) {
    TORCH_WARN("process group '", group.getGroupName(),
               "' did not end cleanly: ", error.what());
  }
}

// Each group of a store gets a part of it. Every rank counts its own groups,
// since several ranks may live in one process.
c10::intrusive_ptr<c10d::Store> own_part(
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

// TCPStore waits without limit for the listener's first answer. If that is
// another program, the connecting thread stays behind.
c10::intrusive_ptr<c10d::Store> connect_store_in_time(
    const LaunchEnvironment& env, const ProcessGroupOptions& options) {
  std::packaged_task<c10::intrusive_ptr<c10d::Store>()> connecting(
      [env, options] { return connect_store(env, options); });
  auto store = connecting.get_future();
  std::thread(std::move(connecting)).detach();
  // Its own errors come first.
  const auto patience = rendezvous_timeout(options) + std::chrono::seconds(1);
  TORCH_CHECK(store.wait_for(patience) == std::future_status::ready,
              "whoever listens there does not answer as a store does.\nChoose "
              "a port that no other program uses (MASTER_PORT).");
  return store.get();
}

}  // namespace

c10::intrusive_ptr<ProcessGroup> init_process_group(
    const ProcessGroupOptions& options) {
  return init_process_group(read_launch_environment(), options);
}

c10::intrusive_ptr<ProcessGroup> init_process_group(
    const LaunchEnvironment& env, const ProcessGroupOptions& options) {
  validate(options);
  validate_place(env.rank, env.world_size);
  select_device(options.device_type, env.local_rank);
  if (env.world_size == 1) {
    std::vector<at::DeviceType> types(kDeviceTypes.begin(), kDeviceTypes.end());
    if (std::ranges::count(types, options.device_type) == 0) {
      types.push_back(options.device_type);
    }
    return single_process_group(std::move(types));
  }

  TORCH_CHECK_VALUE(!env.master_addr.empty() && env.master_port != 0,
                    "LaunchEnvironment must name where ", env.world_size,
                    " ranks meet, got master_addr '", env.master_addr,
                    "' and master_port ", env.master_port, ".");
  c10::intrusive_ptr<c10d::Store> store;
  try {
    store = connect_store_in_time(env, options);
  } catch (...) {
    throw_peer_error(c10::str("rank ", env.rank, " of ", env.world_size,
                              " did not meet the others at ", env.master_addr,
                              ":", env.master_port, " within ",
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

c10::intrusive_ptr<ProcessGroup> connect_process_group(
    c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
    const ProcessGroupOptions& options, bool serves_cpu) {
  validate(options);
  validate_place(rank, world_size);
  TORCH_CHECK_VALUE(store.defined(),
                    "make_process_group needs a store, got none. A world of 1 "
                    "needs none with single_process_group().");
  c10::intrusive_ptr<c10d::Store> part;
  c10::intrusive_ptr<c10d::Backend> gloo;
  const auto part_for = [&](const char* backend) {
    return c10::make_intrusive<c10d::PrefixStore>(backend, part);
  };
  const std::string context =
      c10::str("process group '", options.name, "': rank ", rank, " of ",
               world_size, " could not connect to the others");
  try {
    store->setTimeout(options.timeout);
    part = own_part(store, options.name, rank);
  } catch (...) {
    throw_peer_error(context, std::current_exception());
  }
  const bool is_nccl =
      options.device_type == at::kCUDA && !options.make_backend;
  const BackendPlace place = {.store = part_for(is_nccl ? "nccl" : "device"),
                              .rank = rank,
                              .world_size = world_size,
                              .timeout = options.timeout,
                              .group_name = options.name};
  c10::intrusive_ptr<c10d::Backend> on_device;
  if (is_nccl) on_device = make_nccl_backend(place);  // meets nobody
  try {
    if (serves_cpu) {
      gloo = make_gloo_backend(part_for("gloo"), rank, world_size,
                               options.timeout);
    } else {
      meet(*part, world_size);
    }
  } catch (...) {
    throw_peer_error(context, std::current_exception());
  }
  // May meet peers, which are known to be there now.
  if (options.make_backend) {
    on_device = make_device_backend(options.make_backend, place);
  }

  auto group = c10::make_intrusive<ProcessGroup>(part, rank, world_size);
  if (gloo) {
    group->setBackend(at::kCPU, ProcessGroup::BackendType::GLOO, gloo);
    group->setDefaultBackend(ProcessGroup::BackendType::GLOO);
  }
  if (on_device) {
    // The group hands its device to each backend that it is given.
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

c10::intrusive_ptr<ProcessGroup> single_process_group(
    std::vector<at::DeviceType> device_types) {
  TORCH_CHECK_VALUE(!device_types.empty(),
                    "single_process_group needs at least 1 device type.");
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

GroupScope::GroupScope(c10::intrusive_ptr<ProcessGroup> group, GroupEnd end)
    : exceptions_at_entry_(std::uncaught_exceptions()),
      end_(end),
      group_(std::move(group)) {
  TORCH_CHECK_VALUE(group_.defined(), "GroupScope needs a group, got none.");
  store_ = group_->getStore();
}

GroupScope::~GroupScope() {
  if (std::uncaught_exceptions() > exceptions_at_entry_) {
    close_group(*group_);
  } else if (end_ == GroupEnd::kApart) {
    end_on_own_thread(absl::Cleanup(
        [store = std::move(store_), group = std::move(group_)]() mutable {
          shut_down(*group);
          group.reset();  // before its store
        }));
  } else {
    shut_down(*group_);
  }
}

}  // namespace brigade
