// Ordinary tensors of a whole shape of which this rank holds one piece.
//
// A sharded tensor has a dispatch key of its own, and a storage without data
// whose context is a Shard. So every operator that touches it reaches the
// fallback of shard_operators.cc before autograd, whatever holds the tensor: a
// LibTorch module, a script, an optimizer or Python. Views and detached tensors
// share the storage, so they are sharded tensors too. Access to the data
// without an operator throws.
//
// While the unit of a parameter is unsharded, the storage has the unit's
// memory: bind_memory().
//
//   at::Tensor state = make_sharded({.local = zeros, .offset = 6, .group =
//   group},
//                                   parameter.sizes(), parameter.strides());
//   shard_of(state)->local;
//
// Thread safety: as that of tensors.

#ifndef BRIGADE_FSDP_SHARDED_TENSOR_H_
#define BRIGADE_FSDP_SHARDED_TENSOR_H_

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace brigade {

// A key that torch itself uses in its own tests only. Higher than those of
// autograd, autocast and functorch.
inline constexpr c10::DispatchKey kShardedKey =
    c10::DispatchKey::TESTING_ONLY_GenericWrapper;

// The ranks that together hold all elements of a tensor, once each.
class ShardGroup {
 public:
  // `is_everywhere`: no other ranks of the model hold other parameters.
  explicit ShardGroup(bool is_everywhere = true)
      : is_everywhere_(is_everywhere) {}
  virtual ~ShardGroup() = default;

  // Returns [W, n] from `values` [n] of each of the W ranks. Collective.
  virtual at::Tensor all_gather(const at::Tensor& values) = 0;
  // Throws NotImplementedError if other ranks hold other parameters, so that a
  // reduction would differ.
  void require_all_ranks() const;

 private:
  const bool is_everywhere_;
};

// State of the parameters that an operator is about to use.
enum class ParameterState {
  kSharded,    // outside of a forward and backward
  kUnsharded,  // in one: bound, to be read only
  kWritable,   // bound; what is written counts
};

struct Shard;

// Model of sharded parameters, called by operators that use them.
class ParameterOwner {
 public:
  virtual ~ParameterOwner() = default;
  // One operator is about to use `parameters`, of this owner. In a forward or
  // backward of this thread, unshards their units first; they stay so until the
  // next call.
  virtual ParameterState use(std::span<const Shard* const> parameters) = 0;
  // An operator has written to the shards of `unit`.
  virtual void written(size_t unit) = 0;
  // Awaits the outstanding statuses of all ranks. Throws PeerError if one has
  // failed: the shards may be of a bad step.
  virtual void await_statuses() = 0;
};

struct Shard {
  at::Tensor local = {};  // 1D, plain: this rank's elements, in memory order
  int64_t offset = 0;     // of local[0] in the whole
  std::shared_ptr<ShardGroup> group = nullptr;

  // The whole lies at `flat_offset` of a flat tensor, of which each rank of the
  // group holds `flat_per_rank` elements.
  int64_t flat_offset = 0;
  int64_t flat_per_rank = 0;
  bool is_whole = false;  // the group is this rank alone

  // Parameters only.
  ParameterOwner* owner = nullptr;
  size_t unit = 0;
  size_t number = 0;  // among all parameters of the owner
  std::string name = {};
};

// Null if the tensor is not sharded.
Shard* shard_of(const at::Tensor& tensor);

// A tensor of these sizes and strides, without gradient. REQUIRES: the strides
// are those of a dense tensor.
at::Tensor make_sharded(Shard shard, at::IntArrayRef sizes,
                        at::IntArrayRef strides);
// With another local piece of the same elements as `sharded`; no parameter.
at::Tensor make_sharded_like(const at::Tensor& sharded, at::Tensor local);

// Throws if the ranks are not connected yet.
ShardGroup& group_of(const Shard& shard);

// The whole, plain and contiguous as the strides say. Collective over the
// group. Of a parameter: awaits its owner's statuses before.
at::Tensor gather_whole(const at::Tensor& sharded);

// Makes `parameter` itself a sharded tensor: all its handles, hooks and
// optimizers stay. Its data is dropped. REQUIRES: dense; the local piece has
// its dtype and device. Throws ValueError if it is sharded already.
void shard_in_place(const at::Tensor& parameter, Shard shard);

// Gives `tensor` this shard, and a storage of its own.
void replace_shard(const at::Tensor& tensor, Shard shard);

// The storage of a sharded tensor reads `memory` from here on, which has the
// whole's elements in `dtype` and outlives unbind_memory(); or nothing. Until
// then the tensor has that dtype.
void bind_memory(const at::Tensor& sharded, void* memory,
                 caffe2::TypeMeta dtype);
// `dtype`: that it has from here on.
void unbind_memory(const at::Tensor& sharded, caffe2::TypeMeta dtype);

}  // namespace brigade

#endif  // BRIGADE_FSDP_SHARDED_TENSOR_H_
