// Parameters of a unit that travel together: of one dtype, all trained or all
// frozen. This rank's shard of them, and the whole ones while they are
// gathered.
//
// Owns the shard (what the optimizer sees), the storage of the whole parameters
// and the memory of their gradients. Decides what lies where; communicates
// nothing. Lengths: W ranks, S elements of a shard, W * S of the whole.
//
// On devices with streams everything runs on the calling thread's current one,
// behind what other calls have put on others, as is said where that is more
// than the memory's own order.
//
// Thread safety: none; one backward at a time, and nothing else beside it.

#ifndef BRIGADE_FSDP_UNITS_SEGMENT_H_
#define BRIGADE_FSDP_UNITS_SEGMENT_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "brigade/fsdp/layout/shard_layout.h"
#include "brigade/fsdp/memory/gradient_memory.h"
#include "brigade/fsdp/memory/memory_pool.h"
#include "brigade/fsdp/memory/whole_storage.h"
#include "brigade/fsdp/schedule/memory_uses.h"
#include "brigade/fsdp/streams/stream_uses.h"
#include "brigade/fsdp/units/shard_gradient.h"
#include "brigade/hooks/autograd_node.h"

namespace brigade {

struct NamedParameter {
  std::string name;  // "blocks.2.weight"
  at::Tensor tensor;
  int64_t block_numel = 1;  // see layout/shard_spec.h
  // What forward and backward see it in; unset: what the options say.
  std::optional<at::ScalarType> whole_dtype = std::nullopt;
};

struct SegmentOptions {
  std::string unit;  // its name, for errors
  int num_ranks = 1;
  int rank = 0;
  at::ScalarType whole_dtype = at::kFloat;   // forward and backward see it
  at::ScalarType reduce_dtype = at::kFloat;  // gradients travel in it
  // By parameter, leaves that become this rank's shards, so that whoever has
  // them goes on with them. None: new ones.
  std::vector<at::Tensor> shards = {};
};

class Segment {
 public:
  // Takes this rank's part of each parameter, and makes the parameter, which
  // keeps its shape and strides, a view of a storage without memory, in
  // `whole_dtype`. REQUIRES: all are leaves of one dtype and device, and dense.
  // On meta there is no memory for shards either: nothing is to be bound.
  //
  // Errors: ValueError for blocks that ShardLayout refuses.
  Segment(std::vector<NamedParameter> parameters, SegmentOptions options);
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  const std::vector<NamedParameter>& parameters() const { return parameters_; }
  const ShardLayout& layout() const { return layout_; }

  // Whether the parameter, or any of them, requires a gradient.
  bool is_trained(size_t parameter) const {
    return parameters_[parameter].tensor.requires_grad();
  }
  bool is_trained() const;
  bool can_be_trained() const { return can_be_trained_; }  // by its dtype
  // From here on those are whose shards require a gradient, or whose whole
  // parameters were told to since this was called before; what was taken of
  // others is forgotten. Returns whether they are others than before.
  bool follow_shards();

  // The unit's name and a parameter's, for errors and files.
  void rename_unit(const std::string& name);
  void rename_parameter(size_t parameter, std::string name);
  at::ScalarType dtype() const { return shard_.scalar_type(); }
  at::ScalarType whole_dtype() const { return options_.whole_dtype; }
  at::ScalarType reduce_dtype() const { return options_.reduce_dtype; }
  c10::Device device() const { return shard_.device(); }
  int rank() const { return options_.rank; }
  // This rank's shard is all of it, as forward and backward see it.
  bool is_whole_here() const {
    return options_.num_ranks == 1 && whole_dtype() == dtype();
  }
  int64_t whole_bytes() const;     // of the parameters
  int64_t gradient_bytes() const;  // of all gradients, whole

  // Among all of a root, for its plan of memory.
  void set_place(size_t unit, size_t segment) { place_ = {unit, segment}; }
  MemoryUse use_for(Purpose purpose) const {
    return {place_.first, place_.second, purpose};
  }

  // By parameter: the elements of it that this rank holds, 1D in the order of
  // memory, perhaps none; all of them, in the parameter's shape. Leaves: what
  // an optimizer is given.
  const std::vector<at::Tensor>& shards() const { return shards_; }
  // [S], which they are views of.
  const at::Tensor& shard() const { return shard_; }

  // Of a flat tensor that is laid out as the shard, or as the whole: the
  // elements of one parameter, as shards() and the parameter have them.
  at::Tensor part_of(const at::Tensor& shard, size_t parameter) const {
    return view_of(shard, parameter);
  }
  at::Tensor whole_of(const at::Tensor& whole, size_t parameter) const {
    return slot(whole, parameter);
  }

  // The shard gets its part of a whole parameter, of its sizes.
  void assign(size_t parameter, const at::Tensor& whole);

  // ---- Whole parameters.

  // From here on they read `memory`, at least [whole_bytes()].
  void bind(at::Tensor memory);
  // Gives the memory back.
  at::Tensor unbind();
  bool is_bound() const { return whole_.is_bound(); }

  // `memory` as [W * S] elements.
  at::Tensor whole_in(const at::Tensor& memory) const;
  // This rank's slice of that gets what the shard holds.
  void write_own_slice(const at::Tensor& whole) const;
  // Counts changes of the shard in place.
  int64_t version() const { return shard_._version(); }

  // Some optimizers write without counting. Asked where a pass begins: counts a
  // possible step if the shards have gradients, or have had some since this was
  // asked before.
  void note_possible_step();
  int64_t num_possible_steps() const { return num_possible_steps_; }

  // What is bound is the whole of what the shard was then.
  void set_bound_version(int64_t version, int64_t num_possible_steps) {
    bound_version_ = version;
    bound_possible_steps_ = num_possible_steps;
  }
  // Whether the shard is what it was then.
  bool is_bound_current() const {
    return bound_version_ == version() &&
           bound_possible_steps_ == num_possible_steps_;
  }

  // Of the whole parameters, the first that was written to since it was bound,
  // if any.
  std::optional<size_t> written_parameter() const;

  // Until read_own_slice() whole parameters may be given other memory, as
  // torch::load() does.
  void expect_other_memory();
  // What is wrong with what they were given; empty: nothing.
  std::string describe_unfit_memory() const;
  void drop_other_memory();
  // The shard gets what the whole parameters hold, where that is not what the
  // shard holds, rounded. REQUIRES: is_bound(), and
  // describe_unfit_memory() has nothing.
  void read_own_slice();

  // ---- Gradients of the running backward.

  // Writes the parameter's gradient, or adds it to what is there; any stream.
  void take(size_t parameter, const at::Tensor& gradient,
            GradientMemory& memory);
  // [W * S], zeros where nothing was taken; made if need be. The current stream
  // is behind those that took them.
  at::Tensor finish_gradients(GradientMemory& memory);
  // Where a whole gradient is to be written: a view, of the parameter's shape,
  // in the reduce dtype; undefined if it was given, or taken, before. It counts
  // when take() gets it.
  at::Tensor gradient_slot(size_t parameter, GradientMemory& memory);
  // Forgets them. The memory is the caller's; undefined if there is none.
  Buffer take_gradient_memory();
  // The same of gradients that are finished, and read on the stream that has
  // finished them.
  Buffer take_finished_gradients();

  // ---- The shard's gradient.

  // There is memory for the sum of gradients that have been taken.
  void prepare_sum();
  ShardGradient& shard_gradient() { return shard_gradient_; }
  const ShardGradient& shard_gradient() const { return shard_gradient_; }
  // The sum in pending(), times `scale`, becomes the gradient of the shards, or
  // is added to it; of those only that are `used`. REQUIRES: the current stream
  // is behind the sum.
  void commit(const std::vector<char>& used, double scale) {
    may_be_stepped_ = true;
    shard_gradient_.commit(shards_, used, scale);
  }

  // Whether it has gradients that are in no sum yet; in none over all ranks.
  bool has_whole_gradients() const { return gradients_.defined(); }
  bool holds_gradients() const {
    return gradients_.defined() || shard_gradient_.has_partial();
  }

 private:
  at::Tensor slot(const at::Tensor& flat, size_t parameter) const;
  bool has_own_memory(size_t parameter) const;
  void give_own_memory(size_t parameter);
  void take_back_parameters();
  at::Tensor view_of(const at::Tensor& flat, size_t parameter) const;
  void acquire_gradients(GradientMemory& memory);
  void wait_to_write();
  void zero_gradients(int64_t begin, int64_t end);
  void zero_unwritten_gradients();
  void forget(size_t parameter);
  bool is_own_slot(size_t parameter, const at::Tensor& gradient) const;

  SegmentOptions options_;  // constant but for the name
  std::vector<NamedParameter> parameters_;
  const ShardLayout layout_;
  const bool can_be_trained_;

  at::Tensor shard_;
  std::vector<at::Tensor> shards_;

  std::pair<size_t, size_t> place_;  // unit, and segment of it

  WholeStorage whole_;
  std::vector<at::Tensor> views_;  // of it, by parameter
  at::Tensor bound_memory_;
  int64_t bound_version_ = -1;
  int64_t bound_possible_steps_ = 0;
  int64_t num_possible_steps_ = 0;
  bool may_be_stepped_ = false;          // has had gradients
  std::vector<int64_t> bound_versions_;  // by parameter, of the whole one
  // Likewise: where backwards bring its gradient, and hooks are.
  std::vector<NodePtr> accumulators_;
  std::vector<char> was_trained_;  // by parameter, as was seen last

  Buffer gradient_memory_;
  at::Tensor gradients_;  // [W * S], in it
  std::vector<char> is_written_;
  std::vector<char> is_lent_;  // by gradient_slot()
  bool is_padding_zeroed_ = false;
  StreamUses gradient_writers_;

  ShardGradient shard_gradient_;
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_UNITS_SEGMENT_H_
