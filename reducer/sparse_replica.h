// A bucket of one parameter whose gradient is a sparse COO tensor.
//
// There is nothing to pack: the gradient itself travels, scaled. Its number of
// entries differs from rank to rank, which sparse all-reduces allow for.

#ifndef BRIGADE_REDUCER_SPARSE_REPLICA_H_
#define BRIGADE_REDUCER_SPARSE_REPLICA_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "brigade/reducer/bucket_replica.h"
#include "brigade/reducer/parameter_table.h"

namespace brigade {

class SparseReplica final : public BucketReplica {
 public:
  // REQUIRES: `variable` is in `table`, which outlives this object.
  SparseReplica(const ParameterTable& table, VariableIndex variable);

  // Always copies: scaling makes a tensor of its own.
  int64_t pack(double scale, std::span<const size_t> unused_slots) override;

  // Sparse COO, parameter's sizes and dtype; undefined before the first pack.
  const at::Tensor& buffer() const override { return buffer_; }
  void record_stream(c10::Stream stream) const override;
  void add(const at::Tensor& buffer) override;

  void check_result(const at::Tensor& result) const override;
  int64_t deliver(const at::Tensor& result,
                  std::span<const size_t> globally_unused_slots) override;
  void deliver_nothing(std::span<const size_t>) override {}
  void adopt_gradients() override {}
  void release_memory() override { buffer_.reset(); }
  at::Tensor zeros() const override;
  const at::Tensor& views() const override { return no_views_; }
  bool is_view_in(size_t /*slot*/, const at::Tensor&) const override {
    return false;
  }

 private:
  const ParameterTable& table_;
  const VariableIndex variable_;
  const at::Tensor no_views_;
  at::Tensor buffer_;
  // Of the last gradient; until there is one, rows, as embeddings have. It must
  // be equal on all ranks, also on those that contribute nothing.
  int64_t sparse_dim_ = 1;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_SPARSE_REPLICA_H_
