// As many parameters as wanted, of 4 elements each, and next to no computation:
// what is left of a step is what autograd and a reducer cost per parameter.
//
// Thread safety: none.

#ifndef BRIGADE_BENCHMARKS_REDUCER_COST_TINY_MODEL_H_
#define BRIGADE_BENCHMARKS_REDUCER_COST_TINY_MODEL_H_

#include <torch/torch.h>

#include <cstdint>
#include <vector>

namespace brigade::benchmarks {

class TinyModel {
 public:
  explicit TinyModel(int64_t num_parameters);

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  int64_t gradient_bytes() const;

  void clear_gradients();

  // A chain of one operation per parameter; its sum.
  at::Tensor forward() const;

 private:
  std::vector<at::Tensor> parameters_;
  at::Tensor input_;
};

}  // namespace brigade::benchmarks

#endif  // BRIGADE_BENCHMARKS_REDUCER_COST_TINY_MODEL_H_
