// Flat parameter of a unit: parameters of one dtype that are gathered and
// reduced together, this rank's shard of them, and their gradients.
//
// Issues no collective. The caller owns the unsharded buffers. Sizes: W ranks
// in the shard group, S elements in a shard, W * S in an unsharded buffer.

#ifndef BRIGADE_FSDP_FLAT_SHARD_H_
#define BRIGADE_FSDP_FLAT_SHARD_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "brigade/comm/streams/streams.h"
#include "brigade/fsdp/sharded_tensor.h"

namespace brigade {

struct UnitParameter {
  std::string name;  // "blocks.2.weight"
  at::Tensor tensor;
  int64_t block_numel = 1;  // ShardSpec::block_numel
  // Dtype in forward and backward. Unset: FullyShardOptions::param_dtype.
  std::optional<at::ScalarType> compute_dtype = std::nullopt;
};

struct ShardSpec {
  int64_t numel = 0;        // may be 0
  int64_t block_numel = 1;  // length of the blocks that are never cut; the last
                            // block may be shorter
};

// Elements of one parameter on one rank; all 0 if there are none.
struct ShardRange {
  int64_t in_parameter = 0;  // offset of the first element
  int64_t in_shard = 0;
  int64_t numel = 0;

  friend bool operator==(const ShardRange&, const ShardRange&) = default;
};

// Layout of a flat parameter: the elements of each parameter on each rank.
//
// The parameters, one after the other, are cut into W equal shards. Each
// parameter is contiguous in the unsharded buffer (all shards in rank order),
// so it is a view into it. A rank holds the intersection of a parameter with
// its shard, which may be empty.
//
// To keep blocks together, padding may precede a parameter. The block length of
// a parameter with two or more cuts divides the shard length. Padding is less
// than W elements with blocks of 1; otherwise less than W * (G + L). G is the
// largest block. L is the least common multiple of the blocks of parameters
// longer than N/W, for N elements in total.
//
//   const ShardLayout layout({{.numel = 12}, {.numel = 3}}, 16);
//   layout.range(1, 12);  // {.in_parameter = 0, .in_shard = 0, .numel = 1}
//
// Thread safety: immutable.
class ShardLayout {
 public:
  // REQUIRES: at least one parameter, at most 2^48 elements in total, blocks
  // and ranks >= 1.
  ShardLayout(std::vector<ShardSpec> parameters, int64_t num_ranks);

  const std::vector<ShardSpec>& parameters() const { return parameters_; }
  int64_t num_ranks() const { return num_ranks_; }
  int64_t shard_numel() const { return shard_numel_; }  // on every rank
  // Length of the unsharded buffer.
  int64_t whole_numel() const { return num_ranks_ * shard_numel_; }
  int64_t padding_numel() const;

  // Offset of the parameter in the unsharded buffer.
  int64_t offset(size_t parameter) const { return offsets_[parameter]; }
  ShardRange range(size_t parameter, int64_t rank) const;

 private:
  const std::vector<ShardSpec> parameters_;
  const int64_t num_ranks_;
  const int64_t shard_numel_;
  const std::vector<int64_t> offsets_;  // by parameter
};

// Thread safety: none; the owner serializes calls.
class FlatShard {
 public:
  struct Context {
    int num_ranks = 1;  // of the shard group
    int rank = 0;
    at::ScalarType compute_dtype = at::kFloat;  // in forward and backward
    at::ScalarType reduce_dtype = at::kFloat;   // of summed gradients
    std::shared_ptr<ShardGroup> group = nullptr;
    ParameterOwner* owner = nullptr;
    size_t unit = 0;
    size_t first_number = 0;  // Shard::number of the first parameter
  };

  // Turns each parameter into a sharded tensor. REQUIRES: dense leaves of one
  // dtype and device.
  FlatShard(std::vector<UnitParameter> parameters, Context context);
  // Leaves the parameters sharded and clears their owner.
  ~FlatShard();
  FlatShard(const FlatShard&) = delete;
  FlatShard& operator=(const FlatShard&) = delete;

  const std::vector<UnitParameter>& parameters() const { return parameters_; }
  const ShardLayout& layout() const { return layout_; }
  const Context& context() const { return context_; }
  c10::Device device() const { return shard_.device(); }
  at::ScalarType dtype() const { return shard_.scalar_type(); }
  bool is_trained(size_t parameter) const {
    return parameters_[parameter].tensor.requires_grad();
  }
  bool is_trained() const;
  // True if forward and backward can use the shard itself: one rank, no cast.
  bool is_whole_here() const {
    return context_.num_ranks == 1 && context_.compute_dtype == dtype();
  }
  int64_t shard_bytes() const { return static_cast<int64_t>(shard_.nbytes()); }
  void rename(size_t parameter, std::string name);
  void belong_to(ParameterOwner* owner, std::shared_ptr<ShardGroup> group,
                 size_t unit, size_t first_number);

  // Sets whether unbound parameters report the compute dtype.
  void show_compute_dtype(bool value);

  // Takes over values from Module::to(), to_empty() or `.data =`. Returns true
  // if dtype or device has changed. Throws RuntimeError if a parameter is plain
  // now, or if only some have changed dtype or device.
  bool adopt_pieces();

  // ---- Unsharded parameters.

  int64_t whole_bytes() const;     // in the compute dtype; 0: is_whole_here()
  int64_t gradient_bytes() const;  // of unsharded gradients
  // Returns a view of `bytes` as unsharded parameters [W * S].
  at::Tensor whole_in(const at::Tensor& bytes) const;
  // Copies the shard into this rank's chunk of `whole`.
  void write_own_slice(const at::Tensor& whole);
  // Records a use of the shard by the current stream, for the allocator.
  void note_use() { shard_uses_.add_current(); }
  // Makes the parameters views into `whole` until unbind().
  void bind(const at::Tensor& whole);
  void unbind();
  // Copies this rank's chunk of the unsharded parameters into the shard, or of
  // plain tensors assigned to `.data`. Throws ValueError if one of these has
  // another size, dtype or device. REQUIRES: bound.
  void read_own_slice();

  // ---- Gradients.

  // Provides memory for gradients [W * S] of the reduce dtype, until
  // take_gradients(). Each stream waits for `last_use` before its first write.
  void set_gradients(at::Tensor bytes, StreamPoint last_use);
  bool has_gradients() const { return gradients_.defined(); }
  // Writes the parameter's gradient, or adds it to an earlier one.
  void accumulate(size_t parameter, const at::Tensor& gradient);
  // Returns memory for the argument of accumulate(), which then need not copy.
  // Undefined if the memory is in use or was returned before.
  at::Tensor gradient_slot(size_t parameter);
  // True if the current stream has written a gradient.
  bool is_written_here() const { return writers_.has_current(); }
  // Returns gradients [W * S], with zeros where none was written. The current
  // stream waits for the writers.
  at::Tensor take_gradients();
  // Releases the memory, in the order of the current stream.
  void drop_gradients();

  // Returns memory [S] of the reduce dtype for a reduce-scatter.
  at::Tensor make_sum();
  // Adds a reduce-scatter's result to the sum for deliver().
  void add_sum(const at::Tensor& sum);
  bool has_sum() const { return sum_.defined(); }
  // Sum over the shard group only; the next sum over replicas includes it.
  bool has_partial_sum() const { return partial_sum_.defined(); }
  // Clears it. The current stream waits for it.
  at::Tensor take_partial_sum();
  // Adds the sum to it and clears the sum.
  void keep_partial_sum();
  void drop_partial_sum();
  // Multiplies the sum by `scale` and sets it as `.grad` of the `used`
  // parameters, or adds it there. Throws RuntimeError if a `.grad` is plain.
  void deliver(std::span<const char> used, double scale);
  void drop_sum();

 private:
  enum class Slot : char { kEmpty, kLent, kWritten };  // by gradient_slot()

  at::Tensor piece_of(const at::Tensor& flat, size_t parameter) const;
  at::Tensor slot_of(const at::Tensor& whole, size_t parameter) const;
  Shard make_piece(size_t parameter) const;
  bool fits(size_t parameter) const;
  void begin_write();
  bool is_own(const Shard& shard) const;
  void refuse_exchanged();
  void bind_parameter(size_t parameter) const;
  void unbind(const UnitParameter& parameter) const;

  std::vector<UnitParameter> parameters_;
  Context context_;
  const ShardLayout layout_;
  at::Tensor shard_;  // [S]; the parameters' local tensors are views into it
  StreamUses shard_uses_;
  bool shows_compute_dtype_ = false;
  bool has_warned_ = false;  // of writes in the compute dtype
  at::Tensor whole_;         // while bound

  at::Tensor gradients_;
  std::vector<Slot> slots_;  // of gradients_, by parameter
  StreamPoint last_use_;     // of the memory of gradients_, by its last user
  StreamUses writers_;       // of gradients_
  at::Tensor sum_;
  at::Tensor partial_sum_;
  StreamPoint partial_sum_made_;
  struct Delivered {
    at::Tensor sum = {};
    bool is_lent = false;                    // by make_sum()
    std::vector<at::Tensor> gradients = {};  // views of `sum`, by parameter
  };
  Delivered delivered_;  // by the last deliver()
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_FLAT_SHARD_H_
