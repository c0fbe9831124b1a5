// Sharded tensors: ordinary tensors with the unsharded sizes, of which this
// rank holds one contiguous part, the local tensor.
//
// A sharded tensor has its own dispatch key, and a storage without data whose
// context is a Shard. So every operator on it, from LibTorch, scripts or
// Python, reaches the fallback of shard_operators.cc before autograd. Views and
// detached tensors share the storage and are sharded too. Direct access to the
// data throws.
//
// While a parameter is unsharded, its storage points into its unit's buffer.
//
//   at::Tensor state =
//       make_sharded({.local = zeros, .offset = 6, .group = group},
//                    parameter.sizes(), parameter.strides());
//   shard_of(state)->local;
//
// Thread safety: as that of at::Tensor.

#ifndef BRIGADE_FSDP_SHARDED_TENSOR_H_
#define BRIGADE_FSDP_SHARDED_TENSOR_H_

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace torch {
class Library;
}

namespace brigade {

// Torch uses this key only in its own tests. Its priority is above autograd,
// autocast and functorch.
inline constexpr c10::DispatchKey kShardedKey =
    c10::DispatchKey::TESTING_ONLY_GenericWrapper;

// Remedy of errors that need the unsharded tensor.
inline constexpr const char* kHowToUnshard =
    "Use `p.full_tensor()` or `with model.whole_parameters():` (C++: compute "
    "inside sharded->forward() or unsharded()).";

// Shard group: ranks that together hold each element of a tensor once.
class ShardGroup {
 public:
  // `is_everywhere`: false if other ranks of the model hold other parameters.
  explicit ShardGroup(bool is_everywhere = true)
      : is_everywhere_(is_everywhere) {}
  virtual ~ShardGroup() = default;

  // All-gathers `values` [n] of W ranks; returns [W, n].
  virtual at::Tensor all_gather(const at::Tensor& values) = 0;
  // Throws NotImplementedError unless `is_everywhere`: a reduction would differ
  // between shard groups.
  void require_all_ranks() const;

 private:
  const bool is_everywhere_;
};

// State of the parameters of one operator call.
enum class ParameterState {
  kSharded,    // outside of a forward and backward
  kUnsharded,  // bound and read-only, in a forward or backward
  kWritable,   // bound; writes reach the shards
};

struct Shard;

// The model of sharded parameters; the operator fallback calls it.
class ParameterOwner {
 public:
  virtual ~ParameterOwner() = default;
  // Prepares `parameters` of this owner for one operator. In a forward or
  // backward of this thread, unshards their units until the next call.
  virtual ParameterState use(std::span<const Shard* const> parameters) = 0;
  // As use(), for an operator that autograd records between a forward and its
  // backward, such as a scale of the loss. False: the unit is sharded then.
  virtual bool use_after_forward(std::span<const Shard* const> parameters) = 0;
  // The operator is over, or use_after_forward() of another owner was false.
  virtual void end_use_after_forward(size_t unit) = 0;
  // Reports that an operator has written to the shards of `unit`.
  virtual void written(size_t unit) = 0;
  // Awaits the outstanding statuses of all ranks. Throws PeerError if a rank
  // has failed, since the shards may come from a bad step.
  virtual void await_statuses() = 0;
};

// State of a sharded tensor, the context of its storage.
struct Shard {
  at::Tensor local = {};  // 1D, plain: this rank's elements, in memory order
  int64_t offset = 0;     // of local[0] in the unsharded tensor
  std::shared_ptr<ShardGroup> group = nullptr;

  // Position of the unsharded tensor in a flat tensor, of which each rank of
  // the group holds `flat_per_rank` elements.
  int64_t flat_offset = 0;
  int64_t flat_per_rank = 0;
  bool is_whole = false;  // the group has one rank

  // Parameters only.
  ParameterOwner* owner = nullptr;
  size_t unit = 0;
  size_t number = 0;  // among all parameters of the owner
  std::string name = {};
};

// Returns null if the tensor is not sharded.
Shard* shard_of(const at::Tensor& tensor);

// Makes a sharded tensor without gradient. REQUIRES: strides of a dense tensor.
at::Tensor make_sharded(Shard shard, at::IntArrayRef sizes,
                        at::IntArrayRef strides);
// Makes a tensor with other values, sharded as `sharded`; not a parameter.
at::Tensor make_sharded_like(const at::Tensor& sharded, at::Tensor local);

// Throws RuntimeError before the first forward has connected the ranks.
ShardGroup& group_of(const Shard& shard);

// Returns the unsharded tensor, plain, with the strides of `sharded`.
// Collective over the shard group. For a parameter, awaits its owner's statuses
// first.
at::Tensor gather_whole(const at::Tensor& sharded);

// Turns `parameter` itself into a sharded tensor and releases its data. Its
// handles, hooks and optimizers stay valid. REQUIRES: the local tensor has its
// dtype and device. Throws ValueError if it is sharded already or not dense.
void shard_in_place(const at::Tensor& parameter, Shard shard);

// Replaces the storage of `tensor` with a new one that holds `shard`.
void replace_shard(const at::Tensor& tensor, Shard shard);

// Points the storage of `sharded` to `memory`, until unbind_memory(). `memory`
// holds the unsharded elements in `dtype`, which becomes the tensor's dtype.
void bind_memory(const at::Tensor& sharded, void* memory,
                 caffe2::TypeMeta dtype);
// `dtype`: the tensor's new dtype.
void unbind_memory(const at::Tensor& sharded, caffe2::TypeMeta dtype);

// Registers the operators of shard_operators.cc at the first call, for the life
// of the process. Call it before any operator on a sharded tensor. Thread-safe.
const torch::Library& register_shard_operators();

// Returns the norm in float64, also of complex elements; 0 if there are none.
// REQUIRES: `order` > 0.
at::Tensor local_norm(const at::Tensor& local, double order);

}  // namespace brigade

#endif  // BRIGADE_FSDP_SHARDED_TENSOR_H_
