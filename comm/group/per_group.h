// One value for each process group that this process has, for as long as the
// group lives.
//
// Thread safety: any thread; the value's own is its business.

#ifndef BRIGADE_COMM_GROUP_PER_GROUP_H_
#define BRIGADE_COMM_GROUP_PER_GROUP_H_

#include <map>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace brigade {

template <typename T>
class ValuesByGroup {
 public:
  static ValuesByGroup& of_process() {
    static auto& all = *new ValuesByGroup();
    return all;
  }

  std::shared_ptr<T> get(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(
        kept_, [](const auto& kept) { return kept.second->group.expired(); });
    std::unique_ptr<Kept>& kept = kept_[group.get()];
    if (!kept) kept = std::make_unique<Kept>(group);
    return kept->value;
  }

  std::shared_ptr<T> find(const c10d::ProcessGroup& group) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = kept_.find(&group);
    // Another group may have lain there.
    if (found == kept_.end() || found->second->group.expired()) return nullptr;
    return found->second->value;
  }

 private:
  struct Kept {
    explicit Kept(const c10::intrusive_ptr<c10d::ProcessGroup>& group)
        : group(group) {}

    const c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
    const std::shared_ptr<T> value = std::make_shared<T>();
  };

  std::mutex mutex_;
  std::map<const c10d::ProcessGroup*, std::unique_ptr<Kept>> kept_;
};

// That of type T, made at the first call.
template <typename T>
std::shared_ptr<T> per_group(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return ValuesByGroup<T>::of_process().get(group);
}

// Null if there was no such call.
template <typename T>
std::shared_ptr<T> find_per_group(const c10d::ProcessGroup& group) {
  return ValuesByGroup<T>::of_process().find(group);
}

}  // namespace brigade

#endif  // BRIGADE_COMM_GROUP_PER_GROUP_H_
