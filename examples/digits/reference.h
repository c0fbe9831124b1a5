// What data-parallel training must compute, said without any communication: one
// process does the work of all ranks, one after another, and averages their
// gradients.  One big batch would not do: its sums are rounded in another
// order.

#ifndef BRIGADE_EXAMPLES_DIGITS_REFERENCE_H_
#define BRIGADE_EXAMPLES_DIGITS_REFERENCE_H_

#include <functional>
#include <vector>

#include "brigade/examples/digits/batches.h"
#include "brigade/examples/digits/network.h"
#include "brigade/examples/digits/training.h"

namespace brigade::digits {

struct Reference {
  DigitsNet net;                            // trained
  std::vector<at::Tensor> first_gradients;  // of the first step, averaged
};

// Per step: for each rank in order the gradients of its images, times 1 /
// ranks, added up in this order.  `after_step` is told how many steps are done.
Reference train_reference(const Batches& batches,
                          const TrainingOptions& options,
                          const std::function<void(int64_t)>& after_step);

std::vector<at::Tensor> gradients_of(const DigitsNet& net);  // copies

// Whether all tensors have the same bits.
bool equal_bits(const std::vector<at::Tensor>& a,
                const std::vector<at::Tensor>& b);

// How far `actual` is from `expected` at most, both float32, in units in the
// last place of the largest element of the same tensor in `expected`.  Infinite
// if there are NaNs.
double distance_in_ulp(const std::vector<at::Tensor>& actual,
                       const std::vector<at::Tensor>& expected);

}  // namespace brigade::digits

#endif  // BRIGADE_EXAMPLES_DIGITS_REFERENCE_H_
