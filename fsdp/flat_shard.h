// Parameters of a unit that travel together, of one dtype: this rank's shard
// of them, the whole parameters while they are gathered, and their gradients.
//
// Decides what lies where; communicates nothing and owns no memory but the
// shard's and its gradient's. Lengths: W ranks, S elements of a shard, W * S of
// the whole.
//
// Thread safety: none; the owner serialises calls.

#ifndef BRIGADE_FSDP_FLAT_SHARD_H_
#define BRIGADE_FSDP_FLAT_SHARD_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "brigade/comm/streams/streams.h"
#include "brigade/fsdp/fully_shard_options.h"
#include "brigade/fsdp/shard_layout.h"
#include "brigade/fsdp/sharded_tensor.h"

namespace brigade {

class FlatShard {
 public:
  // The ranks that share the parameters, the dtypes, and the model.
  struct Context {
    int num_ranks = 1;
    int rank = 0;
    at::ScalarType compute_dtype = at::kFloat;  // in forward and backward
    at::ScalarType reduce_dtype = at::kFloat;   // of sums of gradients
    std::shared_ptr<ShardGroup> group = nullptr;
    ParameterOwner* owner = nullptr;
    size_t unit = 0;
    size_t first_number = 0;  // of the first parameter, among the owner's
  };

  // Makes each parameter a sharded tensor. REQUIRES: dense leaves of one dtype
  // and device, each with elements.
  FlatShard(std::vector<UnitParameter> parameters, Context context);
  // Parameters forget their owner, and stay sharded.
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
  // This rank's shard is all that forward and backward need.
  bool is_whole_here() const {
    return context_.num_ranks == 1 && context_.compute_dtype == dtype();
  }
  void rename(size_t parameter, std::string name);
  // The parameters are those of `unit` of this owner from here on.
  void belong_to(ParameterOwner* owner, std::shared_ptr<ShardGroup> group,
                 size_t unit, size_t first_number);

  // Whether the parameters have the compute dtype, also while they are not
  // bound, as in a forward or backward.
  void show_compute_dtype(bool value);

  // Takes over pieces that the parameters were given since: by Module::to(),
  // to_empty() or `.data =`. Returns true if dtype or device has changed.
  // Throws RuntimeError for a parameter that is plain now, or if only some have
  // changed dtype or device.
  bool adopt_pieces();

  // ---- Whole parameters.

  int64_t whole_bytes() const;     // in the compute dtype; 0: is_whole_here()
  int64_t gradient_bytes() const;  // of whole gradients
  // `bytes` as the whole parameters [W * S].
  at::Tensor whole_in(const at::Tensor& bytes) const;
  // This rank's slice of `whole` gets the shard.
  void write_own_slice(const at::Tensor& whole);
  // The current stream uses the shard, or may: the allocator is told of it
  // before its memory is dropped.
  void note_use() { shard_uses_.add_current(); }
  // Parameters read `whole` until unbind().
  void bind(const at::Tensor& whole);
  void unbind();
  // The shard gets this rank's slice of the whole parameters, or of the plain
  // tensors that they were given (`.data =`). Throws ValueError if these don't
  // fit. REQUIRES: bound.
  void read_own_slice();

  // ---- Gradients.

  // Memory for gradients [W * S] of the reduce dtype, until take_gradients().
  // Each stream that writes to it waits for `last_use` first.
  void set_gradients(at::Tensor bytes, StreamPoint last_use);
  bool has_gradients() const { return gradients_.defined(); }
  // Writes the parameter's gradient, or adds it to what is there.
  void accumulate(size_t parameter, const at::Tensor& gradient);
  // Where a gradient may be written before accumulate() gets it; undefined if
  // there is one already, or the slot is given.
  at::Tensor gradient_slot(size_t parameter);
  // The current stream has written some of it.
  bool is_written_here() const { return writers_.has_current(); }
  // [W * S], zeros where there is no gradient. The current stream is behind
  // those that have written them.
  at::Tensor take_gradients();
  // The same without zeros: the memory is free after the current stream.
  void drop_gradients();

  // [S] for a sum, in the reduce dtype.
  at::Tensor make_sum();
  // `sum` is what this rank gets of the gradients: adds up until deliver().
  void add_sum(const at::Tensor& sum);
  bool has_sum() const { return sum_.defined(); }
  // Sums over a row only, that the next sum takes with it.
  bool has_row_sum() const { return row_sum_.defined(); }
  // None is left. For the current stream, which is behind it.
  at::Tensor take_row_sum();
  void keep_row_sum();
  void drop_row_sum();
  // The sum times `scale` becomes `.grad` of the parameters, or is added to it:
  // of those that are `used`. Throws RuntimeError for a `.grad` that is not
  // sharded.
  void deliver(const std::vector<char>& used, double scale);
  void drop_sum();

 private:
  enum class Slot : char { kEmpty, kLent, kWritten };  // by gradient_slot()

  at::Tensor piece_of(const at::Tensor& flat, size_t parameter) const;
  at::Tensor slot_of(const at::Tensor& whole, size_t parameter) const;
  Shard make_piece(size_t parameter) const;
  bool fits(size_t parameter) const;
  void take_plain(size_t parameter);
  void begin_write();
  bool is_own(const Shard& shard) const;
  void refuse_exchanged();
  void bind_parameter(size_t parameter) const;
  void unbind(const UnitParameter& parameter) const;

  std::vector<UnitParameter> parameters_;
  Context context_;
  const ShardLayout layout_;
  at::Tensor shard_;  // [S]; this rank's pieces of the parameters are views
  StreamUses shard_uses_;
  bool is_bound_ = false;
  bool shows_compute_dtype_ = false;
  at::Tensor whole_;  // while bound

  at::Tensor gradients_;
  std::vector<Slot> slots_;  // of gradients_, by parameter
  StreamPoint last_use_;     // of gradients_' memory before
  StreamUses writers_;       // of gradients_
  at::Tensor sum_;
  at::Tensor row_sum_;
  StreamPoint row_sum_made_;
  struct Given {
    at::Tensor sum = {};
    bool is_lent = false;                    // by make_sum()
    std::vector<at::Tensor> gradients = {};  // of its pieces, by parameter
  };
  Given given_;  // by the last deliver()
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_FLAT_SHARD_H_
