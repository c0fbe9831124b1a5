// One value for each process group that this process has, for as long as the
// group lives.
//
// Thread safety: any thread; the value's own is its business.

#ifndef BRIGADE_COMM_PER_GROUP_H_
#define BRIGADE_COMM_PER_GROUP_H_

#include <map>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace brigade {

// That of type T, made at the first call.
template <typename T>
std::shared_ptr<T> per_group(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  struct Kept {
    explicit Kept(const c10::intrusive_ptr<c10d::ProcessGroup>& group)
        : group(group) {}

    const c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
    const std::shared_ptr<T> value = std::make_shared<T>();
  };
  static std::mutex mutex;
  static auto& all =
      *new std::map<const c10d::ProcessGroup*, std::unique_ptr<Kept>>();
  const std::lock_guard<std::mutex> lock(mutex);
  std::erase_if(all,
                [](const auto& kept) { return kept.second->group.expired(); });
  std::unique_ptr<Kept>& kept = all[group.get()];
  if (!kept) kept = std::make_unique<Kept>(group);
  return kept->value;
}

}  // namespace brigade

#endif  // BRIGADE_COMM_PER_GROUP_H_
