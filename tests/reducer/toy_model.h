// Model with known integer gradients that become ready in a given order.
//
// A gradient's elements depend on rank, parameter, element and step, so swapped
// ranks or slots give other values. All are multiples of 12, so averages over 1
// to 4 ranks are exact in float32.

#ifndef BRIGADE_TESTS_REDUCER_TOY_MODEL_H_
#define BRIGADE_TESTS_REDUCER_TOY_MODEL_H_

#include <torch/torch.h>

#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/reducer/reducer.h"
#include "gtest/gtest.h"

namespace brigade::testing {

class ToyModel {
 public:
  using Sizes = std::vector<std::vector<int64_t>>;

  explicit ToyModel(const Sizes& sizes,
                    at::TensorOptions options = at::TensorOptions()) {
    for (const std::vector<int64_t>& size : sizes) {
      names.push_back(absl::StrCat("p", parameters.size()));
      parameters.push_back(at::ones(size, options).requires_grad_());
    }
  }

  // The gradient of parameter i in a backward through loss(rank, step).
  at::Tensor gradient(size_t i, int rank, int step = 0) const {
    const at::Tensor& p = parameters[i];
    return (12 * ((at::arange(p.numel(), at::kLong) + 7 * i + 3 * step + 1) %
                  9 * (rank + 1)))
        .reshape(p.sizes())
        .to(p.options());
  }

  // The average over ranks.
  at::Tensor average(size_t i, int world_size, int step = 0) const {
    at::Tensor sum = at::zeros_like(parameters[i]);
    for (int rank = 0; rank < world_size; ++rank) {
      sum = sum + gradient(i, rank, step);
    }
    return (sum / world_size).detach();
  }

  // Returns a loss whose gradients become ready in `ready_order`.
  at::Tensor loss_in_order(const std::vector<size_t>& ready_order, int rank,
                           int step = 0) const {
    at::Tensor loss = at::zeros(
        {}, parameters[0].options().dtype(at::kDouble).requires_grad(false));
    for (auto i = ready_order.rbegin(); i != ready_order.rend(); ++i) {
      at::Tensor term = (parameters[*i] * gradient(*i, rank, step)).sum();
      if (term.is_complex()) term = at::real(term);
      loss = loss + term.to(at::kDouble);
    }
    return loss;
  }

  at::Tensor loss(int rank, int step = 0) const {
    std::vector<size_t> order(parameters.size());
    std::iota(order.rbegin(), order.rend(), size_t{0});
    return loss_in_order(order, rank, step);
  }

  void zero_grad(bool set_to_none = true) const {
    for (const at::Tensor& p : parameters) {
      if (set_to_none) {
        p.mutable_grad().reset();
      } else if (p.grad().defined()) {
        p.mutable_grad().detach_().zero_();
      }
    }
  }

  std::vector<at::Tensor> parameters;
  std::vector<std::string> names;
};

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

// Results of comm hooks: a complete future, and the sum of a bucket over ranks.
inline FuturePtr completed(c10::IValue value) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(value.type());
  future->markCompleted(std::move(value));
  return future;
}
inline FuturePtr all_reduced(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    c10d::GradBucket& bucket) {
  std::vector<at::Tensor> tensors = {bucket.getBuffer()};
  return group->allreduce(tensors)->getFuture();
}

// Runs one iteration with a backward through `loss`.
inline void step(Reducer& reducer, const at::Tensor& loss) {
  reducer.prepare_for_backward(loss);
  loss.backward();
}

// Expects every gradient to be the average over all ranks.
inline void expect_averaged(const ToyModel& model, int world_size,
                            int step = 0) {
  for (size_t i = 0; i < model.parameters.size(); ++i) {
    ASSERT_TRUE(model.parameters[i].grad().defined()) << "parameter " << i;
    EXPECT_TRUE(at::equal(model.parameters[i].grad(),
                          model.average(i, world_size, step)))
        << "parameter " << i << ", step " << step;
  }
}

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_REDUCER_TOY_MODEL_H_
