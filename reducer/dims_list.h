// Shapes or strides of many tensors, without an allocation or an inline buffer
// for each: most have one dimension or two.
//
// Thread safety: as std::vector.

#ifndef BRIGADE_REDUCER_DIMS_LIST_H_
#define BRIGADE_REDUCER_DIMS_LIST_H_

#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace brigade {

class DimsList {
 public:
  void reserve(size_t num_tensors) {
    ends_.reserve(num_tensors);
    dims_.reserve(2 * num_tensors);
  }

  void add(c10::IntArrayRef dims) {
    // One by one: dimensions are few, and a call for each tensor costs more.
    for (const int64_t dim : dims) dims_.push_back(dim);
    ends_.push_back(dims_.size());
  }

  // Valid until the next add().
  c10::IntArrayRef operator[](size_t i) const {
    const size_t begin = i == 0 ? 0 : ends_[i - 1];
    return {dims_.data() + begin, ends_[i] - begin};
  }

 private:
  std::vector<int64_t> dims_;
  std::vector<size_t> ends_;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_DIMS_LIST_H_
