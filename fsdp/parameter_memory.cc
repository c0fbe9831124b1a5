#include "brigade/fsdp/parameter_memory.h"

#include <iterator>
#include <optional>
#include <utility>

namespace brigade {
namespace {

struct Interval {
  const void* storage = nullptr;
  int64_t begin = 0;
  int64_t end = 0;
};

// None of what has no memory of its own.
std::optional<Interval> interval_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided ||
      tensor.is_meta() || tensor.numel() == 0 || !tensor.has_storage()) {
    return std::nullopt;
  }
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  const int64_t begin = tensor.storage_offset();
  return Interval{.storage = tensor.storage().unsafeGetStorageImpl(),
                  .begin = begin * tensor.element_size(),
                  .end = (begin + last + 1) * tensor.element_size()};
}

}  // namespace

const std::string* ParameterMemory::take(const at::Tensor& tensor,
                                         std::string words) {
  if (const std::string* const owner = owner_of(tensor)) return owner;
  if (const auto interval = interval_of(tensor)) {
    by_storage_[interval->storage].emplace(
        interval->begin,
        Owner{.end = interval->end, .words = std::move(words)});
  }
  return nullptr;
}

const std::string* ParameterMemory::owner_of(const at::Tensor& tensor) const {
  const auto interval = interval_of(tensor);
  if (!interval) return nullptr;
  const auto found = by_storage_.find(interval->storage);
  if (found == by_storage_.end()) return nullptr;
  const Owners& owners = found->second;
  const auto behind = owners.lower_bound(interval->begin);
  if (behind != owners.end() && behind->first < interval->end) {
    return &behind->second.words;
  }
  if (behind != owners.begin() &&
      std::prev(behind)->second.end > interval->begin) {
    return &std::prev(behind)->second.words;
  }
  return nullptr;
}

}  // namespace brigade
