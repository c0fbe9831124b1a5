// Properties of a process group (backends, peers, timeout, store, device, rank
// numbers in errors), and values that brigade stores per group.
//
// Thread safety: any thread.

#ifndef BRIGADE_COMM_GROUP_GROUP_INFO_H_
#define BRIGADE_COMM_GROUP_GROUP_INFO_H_

#include <c10/core/Device.h>

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace brigade {

// Returns null if the group does not support the device type or, because it is
// written in Python, has no backends.
c10::intrusive_ptr<c10d::Backend> find_backend(c10d::ProcessGroup& group,
                                               c10::DeviceType device_type);

// Returns true if Gloo carries tensors of the device, through the host. Ranks
// that share a GPU need this: NCCL refuses them.
bool is_over_gloo(c10d::ProcessGroup& group, c10::DeviceType device_type);

// Returns false for a world of 1, a group without a store, and torch's `fake`
// backend, whose ranks are assumed to be identical.
bool has_peers(c10d::ProcessGroup& group);

// Returns true if the group supports the device type or does not tell.
bool supports_device(const c10d::ProcessGroup& group, c10::DeviceType type);

// Returns the device of small tensors that ranks exchange about their state. It
// is the CPU if the group supports it (or registers no backends). Otherwise it
// is the bound device, the suggested one, or the current one. The type depends
// on the group alone and is equal on all ranks.
c10::Device control_device(const c10d::ProcessGroup& group);

// Suggests the model's device as the control device of a group without a bound
// device. Call it before the first collective: two ranks that pass NCCL tensors
// of one device fail. The first suggestion of a supported type wins.
void suggest_control_device(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                            c10::Device device);

// Returns the group's store, or null. A TCPStore's client is cloned, because it
// holds a lock while a thread waits for a key.
c10::intrusive_ptr<c10d::Store> control_store(c10d::ProcessGroup& group);

// Returns the shortest timeout of the group's backends; c10d's default, 30
// minutes, if none reports one.
std::chrono::milliseconds group_timeout(c10d::ProcessGroup& group);

// Returns 0 unless every host is known (not 0) and has the same number of
// consecutive ranks. REQUIRES: `host_by_rank` is not empty.
int ranks_per_host(const std::vector<int64_t>& host_by_rank);

// One value of type T for each living process group of this process.
template <typename T>
struct ValuesByGroup {
  struct Kept {
    explicit Kept(const c10::intrusive_ptr<c10d::ProcessGroup>& of)
        : group(of) {}

    c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
    std::shared_ptr<T> value = std::make_shared<T>();
  };

  static ValuesByGroup& of_process() {
    static auto& all = *new ValuesByGroup();
    return all;
  }

  std::mutex mutex;
  std::map<const c10d::ProcessGroup*, Kept> kept;  // guarded by mutex
};

// Returns the group's value of type T; the first call makes it.
template <typename T>
std::shared_ptr<T> per_group(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  auto& all = ValuesByGroup<T>::of_process();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::erase_if(all.kept,
                [](const auto& kept) { return kept.second.group.expired(); });
  return all.kept.try_emplace(group.get(), group).first->second.value;
}

// Returns null before the first per_group().
template <typename T>
std::shared_ptr<T> find_per_group(const c10d::ProcessGroup& group) {
  auto& all = ValuesByGroup<T>::of_process();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.kept.find(&group);
  // An earlier group may have had this address.
  if (found == all.kept.end() || found->second.group.expired()) return nullptr;
  return found->second.value;
}

// Rank numbers for error texts. A subgroup's ranks are named by their numbers
// in the whole group, which users know.
class RankNames {
 public:
  RankNames() = default;  // a rank's name is its number

  static RankNames of(const c10d::ProcessGroup& group);

  // Returns the names of a subgroup of `ranks`, which are in rising order.
  RankNames of_some(const std::vector<int>& ranks) const;

  // Gives `group` these names.
  void set_for(const c10::intrusive_ptr<c10d::ProcessGroup>& group) const;

  int operator[](int rank) const {
    return numbers_.empty() ? rank : numbers_[rank];
  }

  // "rank 1 of 4"; of a subgroup "rank 6, of ranks 2, 6".
  std::string describe(int rank, int num_ranks) const;

 private:
  std::vector<int> numbers_;  // by rank; empty: the rank itself
};

class StatusTransport;

// Interface of a backend that simulates all peers
// (tests/support/recording_group.h).
class SimulatesPeers {
 public:
  virtual c10::intrusive_ptr<c10d::ProcessGroup> make_subgroup(
      int rank, int world_size) = 0;

  virtual std::unique_ptr<StatusTransport> make_status_transport() = 0;

 protected:
  ~SimulatesPeers() = default;
};

// Returns null if the group's backend for this device is another one.
SimulatesPeers* find_simulated_peers(c10d::ProcessGroup& group,
                                     c10::DeviceType device_type);

}  // namespace brigade

#endif  // BRIGADE_COMM_GROUP_GROUP_INFO_H_
