// Facts about a process group: its backends, peers, timeout, store, the device
// and the rank numbers to use; and values that brigade keeps for each group.
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

// Returns null where the group serves no tensors of this device type, and where
// it is written in Python and so has no backends.
c10::intrusive_ptr<c10d::Backend> find_backend(c10d::ProcessGroup& group,
                                               c10::DeviceType device_type);

// Returns true if tensors of the device travel over Gloo, through the host: for
// instance where ranks share a device, which NCCL refuses.
bool is_over_gloo(c10d::ProcessGroup& group, c10::DeviceType device_type);

// Returns false for a group of one, one without a store, and torch's `fake`
// one, whose ranks are taken to be identical.
bool has_peers(c10d::ProcessGroup& group);

// Returns true if the group can move tensors of this type, as far as it tells.
bool supports_device(const c10d::ProcessGroup& group, c10::DeviceType type);

// The device of small tensors that ranks exchange about their work: the CPU if
// the group has a backend for it (or registers no backends at all), else the
// group's own device, with the index that the group is bound to, that was
// suggested, or the current one. Its kind depends on the group alone, so that
// it is the same on all ranks.
c10::Device control_device(const c10d::ProcessGroup& group);

// Suggests the model's device for a group that is bound to no device, before
// the first collective: two ranks that give NCCL tensors of one device fail.
// The first suggestion of a type that the group serves stands.
void suggest_control_device(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                            c10::Device device);

// The group's store, over a connection of its own if it is a TCPStore's client,
// which holds a lock while a thread waits for a key. Null if the group has
// none.
c10::intrusive_ptr<c10d::Store> control_store(c10d::ProcessGroup& group);

// The shortest timeout among the group's backends; c10d's default, 30 minutes,
// if none tells its own.
std::chrono::milliseconds group_timeout(c10d::ProcessGroup& group);

// Values of type T of this process's groups, for as long as a group lives.
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

// The group's value of type T, made at the first call.
template <typename T>
std::shared_ptr<T> per_group(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  auto& all = ValuesByGroup<T>::of_process();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::erase_if(all.kept,
                [](const auto& kept) { return kept.second.group.expired(); });
  return all.kept.try_emplace(group.get(), group).first->second.value;
}

// Null if there was no such call.
template <typename T>
std::shared_ptr<T> find_per_group(const c10d::ProcessGroup& group) {
  auto& all = ValuesByGroup<T>::of_process();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.kept.find(&group);
  // An earlier group may have had this address.
  if (found == all.kept.end() || found->second.group.expired()) return nullptr;
  return found->second.value;
}

// Numbers of a group's ranks in errors: a subgroup's ranks have the numbers of
// the whole group, which are those that users know.
class RankNames {
 public:
  RankNames() = default;  // a rank's own number

  static RankNames of(const c10d::ProcessGroup& group);

  // Names of some of the ranks, in rising order.
  RankNames of_some(const std::vector<int>& ranks) const;

  // Gives `group` these names.
  void set_for(const c10::intrusive_ptr<c10d::ProcessGroup>& group) const;

  int operator[](int rank) const {
    return numbers_.empty() ? rank : numbers_[rank];
  }

  // "rank 1 of 4"; of a subgroup "rank 6, of ranks 2, 6".
  std::string describe(int rank, int num_ranks) const;

 private:
  std::vector<int> numbers_;  // by rank; empty: their own
};

class StatusTransport;

// A backend that answers for all ranks by itself, because its peers do not
// exist: that of tests/support/recording_group.h.
class AnswersForAllRanks {
 public:
  // A group of `world_size` of the ranks, in which this one has number `rank`.
  virtual c10::intrusive_ptr<c10d::ProcessGroup> make_subgroup(
      int rank, int world_size) = 0;

  virtual std::unique_ptr<StatusTransport> make_status_transport() = 0;

 protected:
  ~AnswersForAllRanks() = default;
};

// Null if the group's backend for this device is not of that kind.
AnswersForAllRanks* find_answers(c10d::ProcessGroup& group,
                                 c10::DeviceType device_type);

}  // namespace brigade

#endif  // BRIGADE_COMM_GROUP_GROUP_INFO_H_
