// A module whose parameters are sharded over ranks. Made by fully_shard()
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
// Parameters keep their whole shapes. In a forward or backward the first
// operator that uses one gathers its unit; outside, operators act on this
// rank's pieces (fsdp/shard_operators.h).
//
// A forward and a backward are collective: every rank opens the same ones, in
// the same order. Inside, ranks may use units in any order, or not at all.
//
// Failure: an error on one rank is a PeerError that names it on all others when
// that forward or backward ends, with the error's text unless autograd's nodes
// have thrown it. No rank has changed a gradient, and gradients accumulated
// without synchronisation are dropped; the model stays usable. On devices ranks
// learn of it at most max_unconfirmed_iterations later, and the groups are
// closed.
//
// Thread safety: one forward or backward at a time: a second one is an error on
// all ranks. A backward's threads may use parameters at once.
//
// Source: Zhao et al., "PyTorch FSDP" (2023). Differences: units are gathered
// by use and not by module hooks; ranks issue one recorded sequence.

#ifndef BRIGADE_FSDP_SHARDED_MODEL_H_
#define BRIGADE_FSDP_SHARDED_MODEL_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "brigade/checkpoint/checkpoint.h"
#include "brigade/hooks/nested_tensors.h"
#include "brigade/observing/timeline.h"

namespace brigade {

struct UnitSettings;  // fsdp/fully_shard.h

// Since construction, on this rank.
struct ShardedModelStatistics {
  int64_t segments = 0;          // forwards and backwards
  int64_t learned_segments = 0;  // those without a recorded schedule
  int64_t rounds = 0;            // beyond one per segment
  int64_t late_gradients = 0;
  int64_t all_gathers = 0;
  int64_t reductions = 0;  // of units
  int64_t reduced_backwards = 0;
  int64_t sent_by_gathers = 0;  // bytes, as many as a ring sends
  int64_t sent_by_sums = 0;
  int64_t buffer_bytes = 0;  // now
  int64_t peak_buffer_bytes = 0;
  int64_t shard_bytes = 0;
  int64_t padding_bytes = 0;
};

class ShardedModel {
 public:
  // Awaits outstanding statuses; never throws. Parameters stay sharded, and are
  // of no use in a forward any more.
  virtual ~ShardedModel() = default;
  ShardedModel(const ShardedModel&) = delete;
  ShardedModel& operator=(const ShardedModel&) = delete;

  // ---- Forward. Collective.

  // Runs `run(inputs...)` as one forward. Floating inputs are cast to
  // param_dtype, floating outputs to output_dtype, where these are set, in the
  // nests of hooks/nested_tensors.h. A forward inside of a backward
  // (recomputation) or of another forward is a part of it. Throws what `run`
  // throws, or PeerError.
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
  // The same in parts. Each begin_forward() that returns is followed by
  // end_forward() or forward_failed(), which does not throw.
  virtual void begin_forward() = 0;
  virtual void end_forward(const std::vector<at::Tensor>& outputs) = 0;
  virtual void forward_failed(const std::exception_ptr& error) noexcept = 0;

  // ---- Between forwards and backwards. Collective.

  // Unsharded until reshard(): operators act on the whole parameters.
  // `may_write`: values that all ranks write alike are kept by reshard();
  // otherwise writing is an error. `units`: places in unit_names().
  virtual void unshard(const std::vector<size_t>& units,
                       bool may_write = false) = 0;
  virtual void reshard(const std::vector<size_t>& units,
                       bool drops_writes = false) = 0;

  // The same of all units, until the scope ends. If it ends by an exception,
  // writes are dropped.
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

  // Reduces the gradients of backwards without synchronisation.
  virtual void reduce() = 0;

  // The norm of all gradients of all ranks; gradients are multiplied by
  // max_norm / (norm + 1e-6) if that is less than 1. `p`: infinity: the
  // largest. The same bits on all ranks.
  virtual double clip_grad_norm(double max_norm, double p = 2.0) = 0;

  // How many ranks have data for another step.
  virtual int64_t num_ranks_with(bool has_data) = 0;
  // In place of the forwards and the backward of a step, on a rank without
  // data: adds zeros to the peers' gradients, and gets the sums. Throws
  // RuntimeError if no rank has data.
  virtual void step_without_data() = 0;

  // Awaits outstanding statuses, and that peers come here. Call it before
  // collectives of your own that must not meet a failed rank.
  virtual void meet_peers() = 0;

  // ---- Settings. Equal on all ranks, changed between forwards and backwards.

  // False: backwards accumulate on this rank, without communication.
  void set_synchronizes(bool value) { synchronizes_ = value; }
  virtual UnitSettings& settings(size_t unit) = 0;
  // Reduce-scatters that hold memory for a unit's gradients at once; the next
  // unit's gradients wait for the oldest. 2 at first. Throws ValueError for 0.
  virtual void set_max_reducing(size_t value) = 0;

  // ---- Units and statistics.

  virtual std::vector<std::string> unit_names() const = 0;
  // Where a custom autograd function may write the gradient of a parameter, in
  // its backward, before it returns it: nothing is copied then. Undefined if it
  // is to return one of its own.
  virtual at::Tensor gradient_slot(const at::Tensor& parameter) = 0;

  virtual bool can_continue() const = 0;
  virtual ShardedModelStatistics statistics() const = 0;
  // Units, bytes, and the schedules and buffers of a step, in words: as
  // planned, and those in use.
  virtual std::string explain() const = 0;
  // The last step that was sampled: the first ten and every n-th.
  virtual ShardingTimeline timeline() const = 0;
  virtual void set_timeline_sample_rate(int64_t rate) = 0;
  // How long a rank waits for its peers before it warns; 0: never.
  virtual void set_stall_report_after(std::chrono::milliseconds time) = 0;

 protected:
  ShardedModel(std::optional<at::ScalarType> param_dtype,
               std::optional<at::ScalarType> output_dtype)
      : param_dtype_(param_dtype), output_dtype_(output_dtype) {}
  bool synchronizes() const { return synchronizes_; }

 private:
  const std::optional<at::ScalarType> param_dtype_;
  const std::optional<at::ScalarType> output_dtype_;
  bool synchronizes_ = true;
};

// The parameters for save_checkpoint() and load_checkpoint() (checkpoint/
// checkpoint.h). Collective. Valid until the next forward or backward.
//
//   save_checkpoint("checkpoint", checkpoint_model(*sharded), optimizer);
//   load_checkpoint("checkpoint", checkpoint_model(*sharded), optimizer);
CheckpointModel checkpoint_model(ShardedModel& model);

}  // namespace brigade

#endif  // BRIGADE_FSDP_SHARDED_MODEL_H_
