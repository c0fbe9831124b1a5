// The memory of some tensors, to be asked whether another one lies in it.
//
// Addresses are compared, so that it does not matter how a tensor came by its
// memory.
//
// Thread safety: none; const methods may be called from any thread.

#ifndef BRIGADE_REDUCER_MEMORY_RANGES_H_
#define BRIGADE_REDUCER_MEMORY_RANGES_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <iterator>
#include <map>

namespace brigade {

class MemoryRanges {
 public:
  // REQUIRES: `tensor` has a storage, which overlaps none of those before.
  void add(const at::Tensor& tensor) {
    const auto [begin, end] = range_of(tensor);
    if (begin < end) end_by_begin_[begin] = end;
  }

  // True if the memory of `tensor` begins inside of one of those added. False
  // for a tensor without any.
  bool contains(const at::Tensor& tensor) const {
    if (!tensor.has_storage()) return false;
    const auto [begin, end] = range_of(tensor);
    if (begin == end) return false;
    const auto after = end_by_begin_.upper_bound(begin);
    return after != end_by_begin_.begin() && begin < std::prev(after)->second;
  }

 private:
  struct Range {
    uintptr_t begin;
    uintptr_t end;
  };

  // Nothing, on a device without memory.
  static Range range_of(const at::Tensor& tensor) {
    const auto begin = reinterpret_cast<uintptr_t>(tensor.storage().data());
    if (begin == 0) return {0, 0};
    return {begin, begin + tensor.storage().nbytes()};
  }

  std::map<uintptr_t, uintptr_t> end_by_begin_;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_MEMORY_RANGES_H_
