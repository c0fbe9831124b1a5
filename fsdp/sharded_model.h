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
// shards (fsdp/shard_operators.h).
//
// Forwards and backwards are collective: all ranks run the same ones in one
// order. Inside them, ranks may use units in any order, or not at all.
//
// Failure: an error on one rank becomes a PeerError on all others when that
// forward or backward ends. It names the rank and has the error's text, except
// for errors in autograd nodes. `.grad` does not change; gradients accumulated
// without synchronization are dropped; the model stays usable. On devices ranks
// get the error up to max_unconfirmed_iterations later, and the process groups
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

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "brigade/checkpoint/checkpoint.h"
#include "brigade/fsdp/fully_shard_options.h"
#include "brigade/hooks/nested_tensors.h"
#include "brigade/observing/timeline.h"

namespace brigade {

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
  // Awaits outstanding statuses. Parameters stay sharded, unusable in forwards.
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
      auto outputs = run(
          ForwardArgument<Inputs>(std::forward<Inputs>(inputs), param_dtype_)
              .get()...);
      if (output_dtype_) cast_tensors(outputs, *output_dtype_);
      end_forward(tensors_of(outputs));
      return outputs;
    } catch (...) {
      forward_failed(std::current_exception());
      throw;
    }
  }
  // The steps of forward(). end_forward() or forward_failed() must follow a
  // begin_forward() that returned.
  virtual void begin_forward() = 0;
  virtual void end_forward(const std::vector<at::Tensor>& outputs) = 0;
  virtual void forward_failed(const std::exception_ptr& error) noexcept = 0;

  // ---- Between forwards and backwards. Collective.

  // Unshards units (indices into unit_names()) until reshard(). `may_write`:
  // reshard() keeps values, written identically on all ranks; otherwise a write
  // is an error.
  virtual void unshard(const std::vector<size_t>& units,
                       bool may_write = false) = 0;
  virtual void reshard(const std::vector<size_t>& units,
                       bool drop_writes = false) = 0;

  // Unshards all units until the scope ends; an exception drops the writes.
  class Unsharded {
   public:
    Unsharded(ShardedModel& model, bool may_write);
    ~Unsharded() noexcept(false);
    Unsharded(const Unsharded&) = delete;
    Unsharded& operator=(const Unsharded&) = delete;

   private:
    ShardedModel& model_;
    std::vector<size_t> units_;
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
  // Returns a description of units, schedules and buffers.
  virtual std::string explain() const = 0;
  // Returns the last sampled step; the first ten and every n-th are sampled.
  virtual ShardingTimeline timeline() const = 0;
  virtual void set_timeline_sample_rate(int64_t rate) = 0;
  // A rank warns after waiting this long for its peers; 0: never.
  virtual void set_stall_report_after(std::chrono::milliseconds time) = 0;

 protected:
  explicit ShardedModel(const FullyShardOptions& options)
      : param_dtype_(options.param_dtype),
        output_dtype_(options.output_dtype) {}
  bool synchronizes() const { return synchronizes_; }

 private:
  const std::optional<at::ScalarType> param_dtype_;
  const std::optional<at::ScalarType> output_dtype_;
  bool synchronizes_ = true;
};

// Returns the parameters for save_checkpoint() and load_checkpoint()
// (checkpoint/checkpoint.h), valid until the next forward or backward.
// Collective.
CheckpointModel checkpoint_model(ShardedModel& model);

}  // namespace brigade

#endif  // BRIGADE_FSDP_SHARDED_MODEL_H_
