// A module whose parameters are sharded over ranks, created by fully_shard()
// (fsdp/fully_shard.h).
//
//   auto sharded = brigade::fully_shard(*net, group);
//   torch::optim::AdamW optimizer(net->parameters(), 1e-3);
//   for (...) {
//     optimizer.zero_grad();
//     at::Tensor loss =
//         sharded->forward([&] { return net->forward(x).square().mean(); });
//     loss.backward();
//     optimizer.step();
//   }
//
// Parameters keep their unsharded shapes. In a forward or backward the first
// operator that uses a parameter unshards its unit. Outside, operators act on
// shards (docs/guides/sharding.md).
//
// Forwards and backwards are collective: all ranks run the same ones in one
// order. Inside them, ranks may use units in any order, or not at all.
//
// Failure: an error on one rank becomes a PeerError on all others when that
// forward or backward ends. It names the rank and has the error's text, except
// for errors in autograd nodes. `.grad` does not change; gradients accumulated
// without synchronization are dropped; the model stays usable. On devices ranks
// get it after at most max_unconfirmed_iterations more, and the process groups
// are closed.
//
// Thread safety: one forward or backward at a time; a second one is an error on
// all ranks. Threads of a backward may use parameters concurrently.
//
// Source: Zhao et al., "PyTorch FSDP" (2023). Differences: parameter use
// unshards a unit, not a module hook; all ranks issue one recorded sequence.

#ifndef BRIGADE_FSDP_SHARDED_MODEL_H_
#define BRIGADE_FSDP_SHARDED_MODEL_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "brigade/checkpoint/checkpoint.h"
#include "brigade/hooks/nested_tensors.h"
#include "brigade/observing/timeline.h"

namespace brigade {

// ---- Options.

// Comm hook of sharding: replaces the reduce-scatter of a unit's gradients.
//
//   class Clipped : public ReductionHook {
//     FuturePtr reduce(const Reduction& reduction) override {
//       reduction.whole.clamp_(-1, 1);
//       return reduction.sum(reduction.whole, reduction.shard);
//     }
//     std::string hook_name() const override { return "clipped"; }
//   };
//
// Every rank calls its hook for the same units in the same order, one call at a
// time. A rank that has not used a unit passes zeros.
class ReductionHook {
 public:
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

  // Gradients of one unit in a shard group of F ranks, S elements per shard.
  struct Reduction {
    std::string unit;  // its name
    size_t index = 0;  // of the unit, identical on all ranks
    at::Tensor whole;  // [F * S]: this rank's unsharded gradients; writable
    at::Tensor shard;  // [S], of the dtype of `whole`: receives the sum
    int rank = 0;      // in the shard group; `shard` is this chunk of `whole`

    // Reduce-scatter of `whole` [F * S] into `shard` [S], scaled, over all
    // ranks. Both tensors have one floating dtype, any.
    std::function<FuturePtr(const at::Tensor& whole, const at::Tensor& shard)>
        sum = {};
  };

  virtual ~ReductionHook() = default;

  // Writes the scaled sum into `shard`; calls `sum` exactly once. Owns `whole`
  // and `shard` until the returned future is complete. On devices with streams,
  // launches on the current stream and returns a complete future.
  //
  // Other collectives need a process group that nothing else uses, and must be
  // identical on all ranks. An exception ends the iteration on all ranks;
  // throws only before the first other collective.
  virtual FuturePtr reduce(const Reduction& reduction) = 0;

  // Appears in messages; compared across ranks.
  virtual std::string hook_name() const = 0;

  // True if reduce() and its future fail only when the network fails.
  virtual bool fails_by_network_only() const { return false; }
};

// Returns a hook that sends gradients in `wire_dtype`. Where sums are in rank
// order, they are computed in float32 and rounded once. Gradients are stored
// and accumulated in the reduce dtype. Needs no extra memory. Complex
// gradients, and those with elements no longer than `wire_dtype`, are not
// compressed.
//
// Errors: ValueError unless `wire_dtype` is float16 or bfloat16.
std::shared_ptr<ReductionHook> compression_hook(at::ScalarType wire_dtype);

// Options of fully_shard(), compared across ranks.
struct FullyShardOptions {
  // Size of the shard group; divides the world size. Each run of `num_shards`
  // consecutive ranks is a replica of the model. 1: no sharding. Unset: all
  // ranks.
  std::optional<int> num_shards = std::nullopt;

  // True: units reshard after forward and unshard for backward (ZeRO-3). False:
  // they stay unsharded until backward (ZeRO-2). A number, which is more than
  // 1, less than the number of shards, and divides it: they reshard to this
  // many consecutive ranks, for example those of a host. ZeRO-1:
  // shard_optimizer_state().
  std::variant<bool, int> reshard_after_forward = true;

  // All-gathers issued ahead of the unit in use.
  size_t prefetch_depth = 1;

  // Dtype of parameters in forward and backward. Unset: their own, which
  // optimizers always see.
  std::optional<at::ScalarType> param_dtype = std::nullopt;

  // Dtype in which gradients are summed. Unset: the parameters' own.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;

  // Dtype to which floating outputs of the model are cast. Unset: no cast.
  std::optional<at::ScalarType> output_dtype = std::nullopt;

  // Sums gradients in rank order on devices too, for reproducible bits.
  bool reproducible = false;

  // Replaces the reduce-scatter. Null: none.
  std::shared_ptr<ReductionHook> comm_hook = nullptr;

  // False: each rank shards its own values instead of those of the first rank
  // of its mesh.
  bool broadcast_parameters = true;

  // On devices: iterations whose status may be outstanding, 0 to 16.
  int max_unconfirmed_iterations = 1;
};

// Settings of one unit; may change between forwards and backwards. Equal on all
// ranks, except for the prefetch depths.
struct UnitSettings {
  // False: stays unsharded from forward to backward.
  bool reshard_after_forward = true;
  // As a number in FullyShardOptions::reshard_after_forward. Only values that
  // some unit of the mesh had at construction are valid. Unset: only shards
  // stay.
  std::optional<int> reshard_to = std::nullopt;
  // False: stays unsharded until its shards are written.
  bool reshard_after_backward = true;
  // True: stays unsharded from its first use to the end of a forward or
  // backward, for modules in several places. Constant.
  bool spans_segments = false;
  // False: its backward reads none of its parameters.
  bool gathers_in_backward = true;
  // Divisor of the summed gradients. Unset: the number of ranks of its mesh.
  // Constant while sums over replicas are outstanding (sums_over_replicas).
  std::optional<double> gradient_divisor = std::nullopt;
  // False: backwards accumulate its gradients on this rank.
  bool synchronizes = true;
  // False: sums stay within the shard group, and the next sum includes them.
  bool sums_over_replicas = true;
  // True: unsharded parameters are always in the same memory.
  bool keeps_storage = false;
  // All-gathers issued ahead while this unit is in use. Unset: prefetch_depth.
  std::optional<size_t> forward_prefetch_depth = std::nullopt;
  std::optional<size_t> backward_prefetch_depth = std::nullopt;

  bool keeps_slices() const {
    return reshard_after_forward && reshard_to && gathers_in_backward;
  }
};

// Ranks that hold a unit, if not all ranks do (experts).
//
// Each rank names the ranks that hold the same parameters as it does. All
// meshes of a unit have one size; their parameters differ only in names and
// values:
//
//   4 ranks, expert 0 on {0, 2} and expert 1 on {1, 3}:
//   selection.mesh_of = [rank](const std::string&) {
//     return UnitMesh{.ranks = rank % 2 == 0 ? std::vector{0, 2}
//                                            : std::vector{1, 3}};
//   };
struct UnitMesh {
  // Ranks of the model's group, ascending.
  std::vector<int> ranks = {};

  // As FullyShardOptions::num_shards, among `ranks`.
  std::optional<int> num_shards = std::nullopt;

  int size() const { return static_cast<int>(ranks.size()); }
  int shard_group_size() const { return num_shards.value_or(size()); }
  // Position of `rank` in `ranks`; -1 if absent.
  int index_of(int rank) const;

  friend bool operator==(const UnitMesh&, const UnitMesh&) = default;
};

// ---- Model.

// Counts on this rank since construction.
struct ShardedModelStatistics {
  int64_t segments = 0;          // forwards and backwards
  int64_t learned_segments = 0;  // without a recorded schedule
  int64_t rounds = 0;            // beyond one per segment
  int64_t late_gradients = 0;    // extra reductions of units
  int64_t all_gathers = 0;       // of units
  int64_t reductions = 0;        // of units
  int64_t reduced_backwards = 0;
  int64_t sent_by_gathers = 0;  // bytes, as rings send them
  int64_t sent_by_sums = 0;     // by reductions
  int64_t buffer_bytes = 0;     // currently allocated
  int64_t peak_buffer_bytes = 0;
  int64_t shard_bytes = 0;
  int64_t padding_bytes = 0;
};

class ShardedModel {
 public:
  // Awaits outstanding statuses; prints a failure that they bring to stderr,
  // and closes the process groups then. Parameters stay sharded, unusable in
  // forwards. Never throws.
  virtual ~ShardedModel() = default;
  ShardedModel(const ShardedModel&) = delete;
  ShardedModel& operator=(const ShardedModel&) = delete;

  // ---- Forward. Collective.

  // Runs `run(inputs...)` as one forward. Casts floating inputs to param_dtype
  // and floating outputs to output_dtype, if set (hooks/nested_tensors.h). A
  // forward inside a backward (recomputation) or another forward is a part of
  // it. Throws PeerError, and the exceptions of `run`.
  template <typename Run, typename... Inputs>
  auto forward(const Run& run, Inputs&&... inputs) {
    begin_forward();
    try {
      auto outputs = run(ForwardArgument<Inputs>(std::forward<Inputs>(inputs),
                                                 options_.param_dtype)
                             .get()...);
      if (options_.output_dtype) cast_tensors(outputs, *options_.output_dtype);
      end_forward(tensors_of(outputs));
      return outputs;
    } catch (...) {
      forward_failed(std::current_exception());
      throw;
    }
  }

  // ---- Between forwards and backwards. Collective.

  // Unshards units (indices into unit_names()) until reshard(). Returns those
  // that no earlier call holds. `may_write`: reshard() keeps values,
  // written identically on all ranks; otherwise a write is an error. Throws
  // ValueError for an unknown unit, and RuntimeError if `may_write` is given
  // and one of the units is unsharded without it.
  virtual std::vector<size_t> unshard(const std::vector<size_t>& units,
                                      bool may_write = false) = 0;
  virtual void reshard(const std::vector<size_t>& units,
                       bool drop_writes = false) = 0;

  // Unshards all units until the scope ends; an exception drops the writes.
  // Units that were unsharded before, as by an outer scope, remain so, with
  // their writes.
  class Unsharded {
   public:
    Unsharded(ShardedModel& model, bool may_write);
    ~Unsharded() noexcept(false);
    Unsharded(const Unsharded&) = delete;
    Unsharded& operator=(const Unsharded&) = delete;

   private:
    ShardedModel& model_;
    const std::vector<size_t> units_;
    const int num_exceptions_;
  };
  [[nodiscard]] Unsharded unsharded(bool may_write = false) {
    return Unsharded(*this, may_write);
  }

  // Reduces gradients that were accumulated without synchronization.
  virtual void reduce() = 0;

  // Returns the p-norm of the gradients of all ranks, with the same bits on all
  // ranks. Multiplies gradients by max_norm / (norm + 1e-6) if that is below 1.
  // `p` may be infinity.
  virtual double clip_grad_norm(double max_norm, double p = 2.0) = 0;

  // Returns the number of ranks with data for another step.
  virtual int64_t num_ranks_with(bool has_data) = 0;
  // Replaces the forwards and the backward of a step on a rank without data:
  // contributes zeros and gets the reduced gradients. Throws RuntimeError if no
  // rank has data.
  virtual void step_without_data() = 0;

  // Waits for all ranks and their statuses. Call it before your own
  // collectives, which a failed rank would not join.
  virtual void barrier() = 0;

  // ---- Settings. Equal on all ranks; change them between forwards and
  // backwards.

  // False: backwards accumulate gradients without communication.
  void set_requires_gradient_sync(bool value) { synchronizes_ = value; }
  virtual UnitSettings& settings(size_t unit) = 0;
  // Sets how many units (initially 2) may hold gradient memory in reduce-
  // scatters; the next unit waits for the oldest. Throws ValueError for 0.
  virtual void set_max_reducing(size_t value) = 0;

  // ---- Units and statistics.

  virtual std::vector<std::string> unit_names() const = 0;
  // Returns a view in which a custom autograd function may compute and return a
  // parameter's gradient in backward, which saves a copy. Undefined: no slot is
  // free, and the function allocates.
  virtual at::Tensor gradient_slot(const at::Tensor& parameter) = 0;

  // False after a failure that closed the process groups.
  virtual bool can_continue() const = 0;
  virtual ShardedModelStatistics statistics() const = 0;
  // Returns a description of units, schedules and buffers. Evaluation and
  // unshard() may allocate more than the planned buffers.
  virtual std::string explain() const = 0;
  // Returns the last sampled step; the first ten and every n-th are sampled.
  virtual ShardingTimeline timeline() const = 0;
  virtual void set_timeline_sample_rate(int64_t rate) = 0;
  // A rank warns after waiting this long for its peers; 0: never.
  virtual void set_stall_report_after(std::chrono::milliseconds time) = 0;

 protected:
  explicit ShardedModel(FullyShardOptions options)
      : options_(std::move(options)) {}

  // The steps of forward(). One of the other two follows a begin_forward() that
  // returned.
  virtual void begin_forward() = 0;
  virtual void end_forward(const std::vector<at::Tensor>& outputs) = 0;
  virtual void forward_failed(const std::exception_ptr& error) noexcept = 0;

  const FullyShardOptions options_;
  bool synchronizes_ = true;
};

// Returns the parameters for save_checkpoint() and load_checkpoint()
// (checkpoint/checkpoint.h), valid until the next forward or backward.
// Collective. Throws RuntimeError while a unit is unsharded by unshard() or
// unsharded().
CheckpointModel checkpoint_model(ShardedModel& model);

// Returns the units to keep unsharded from forward to backward in `max_bytes`
// of additional memory: those whose all-gathers in backward took longest per
// byte in the last sampled step, on the slowest rank (planning/planners.h).
// Collective, equal on all ranks. Throws RuntimeError if a rank has sampled no
// step.
//
//   for (size_t unit : units_to_keep(*model, 1 << 30)) {
//     model->settings(unit).reshard_after_forward = false;
//   }
std::vector<size_t> units_to_keep(ShardedModel& model, int64_t max_bytes);

}  // namespace brigade

#endif  // BRIGADE_FSDP_SHARDED_MODEL_H_
