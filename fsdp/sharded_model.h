// A module whose parameters are sharded over ranks. Made by fully_shard()
// (fsdp/fully_shard.h), or of units by hand.
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
// have thrown it. No rank has changed a gradient, and what was accumulated
// without synchronisation is dropped; the model stays usable. On devices ranks
// learn of it at most max_unconfirmed_iterations later, and the groups are
// closed.
//
// Thread safety: forwards of one thread at a time; a backward's threads may use
// parameters at once.
//
// Source: Zhao et al., "PyTorch FSDP" (2023). Differences: units are gathered
// by use and not by module hooks; ranks issue one recorded sequence.

#ifndef BRIGADE_FSDP_SHARDED_MODEL_H_
#define BRIGADE_FSDP_SHARDED_MODEL_H_

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "brigade/engine/observing/stall_watch.h"
#include "brigade/fsdp/forward_dtypes.h"
#include "brigade/fsdp/post_accumulate_hooks.h"
#include "brigade/fsdp/segment_run.h"
#include "brigade/hooks/gradient_hooks.h"
#include "brigade/hooks/output_tensors.h"

namespace brigade {

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
  int64_t planned_buffer_bytes = 0;
  int64_t extra_buffers = 0;  // beyond the plan
  int64_t shard_bytes = 0;
  int64_t padding_bytes = 0;
};

class ShardedModel final : public ParameterOwner {
 public:
  // Collective. Throws as connect_units(), and leaves `units` then.
  ShardedModel(std::vector<ShardedUnit>&& units,
               c10::intrusive_ptr<c10d::ProcessGroup> group,
               FullyShardOptions options = {});
  // Awaits outstanding statuses; never throws. Parameters stay sharded, and are
  // of no use in a forward any more.
  ~ShardedModel() override;
  ShardedModel(const ShardedModel&) = delete;
  ShardedModel& operator=(const ShardedModel&) = delete;

  // ---- Forward. Collective.

  // Runs `run(inputs...)` as one forward. Floating inputs are cast to
  // param_dtype, floating outputs to output_dtype, where these are set. A
  // forward inside of a backward (recomputation) or of another forward is a
  // part of it. Throws what `run` throws, or PeerError.
  template <typename Run, typename... Inputs>
  auto forward(const Run& run, Inputs&&... inputs) {
    begin_forward();
    try {
      auto outputs = forward_in(
          {.inputs = options_.param_dtype, .outputs = options_.output_dtype},
          run, std::forward<Inputs>(inputs)...);
      end_forward(tensors_of(outputs));
      return outputs;
    } catch (...) {
      forward_failed(std::current_exception());
      throw;
    }
  }
  // The same in parts. Each begin_forward() that returns is followed by
  // end_forward() or forward_failed(), which does not throw.
  void begin_forward();
  void end_forward(const std::vector<at::Tensor>& outputs);
  void forward_failed(const std::exception_ptr& error) noexcept;

  // ---- Between forwards and backwards. Collective.

  // Unsharded until reshard(): operators act on the whole parameters.
  // `may_write`: what they hold at reshard() becomes their value, alike on all
  // ranks; otherwise writing is an error.
  void unshard(std::span<const size_t> units, bool may_write = false);
  void reshard(std::span<const size_t> units, bool drops_writes = false);

  // The same of all units, until the scope ends. If it ends by an exception,
  // what was written is dropped.
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

  // Reduces what backwards without synchronisation have accumulated.
  void reduce();

  // The norm of all gradients of all ranks; gradients are multiplied by
  // max_norm / (norm + 1e-6) if that is less than 1. `p`: infinity: the
  // largest. The same bits on all ranks.
  double clip_grad_norm(double max_norm, double p = 2.0);

  // How many ranks have data for another step.
  int64_t num_ranks_with(bool has_data);
  // In place of the forwards and the backward of a step, on a rank without
  // data: adds zeros to the peers' gradients, and gets the sums.
  void step_without_data();

  // Awaits outstanding statuses, and that peers come here. Call it before
  // collectives of your own that must not meet a failed rank.
  void meet_peers();

  // ---- Settings. Equal on all ranks, changed between segments.

  // False: backwards accumulate on this rank, without communication.
  void set_synchronizes(bool value) { synchronizes_ = value; }
  UnitSettings& settings(size_t unit) { return units_.at(unit).settings; }
  // Runs when a forward begins; what it throws fails the forward.
  void set_forward_check(std::function<void()> check) {
    forward_check_ = std::move(check);
  }
  void set_max_reducing(size_t value) { options_.max_reducing = value; }

  // ---- What it consists of.

  const std::vector<ShardedUnit>& units() const { return units_; }
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }

  // Where a custom autograd function may write the gradient of a parameter, in
  // its backward, before it returns it: nothing is copied then. Undefined if it
  // is to return one of its own.
  at::Tensor gradient_slot(const at::Tensor& parameter);

  bool is_in_forward() const { return kind_ == Open::kForward; }
  bool can_continue() const { return !is_broken_; }
  ShardedModelStatistics statistics() const;
  // Units, bytes, and the schedules and buffers of the last step, in words.
  std::string explain() const;
  // The last step that was sampled: the first ten and every n-th.
  ShardingTimeline timeline() const;
  void set_timeline_sample_rate(int64_t rate) {
    recorder_.set_sample_rate(rate);
  }
  // Null: no peers.
  StallWatch* stall_watch() { return stall_watch_.get(); }

  // ParameterOwner.
  ParameterState use(std::span<const Shard* const> parameters) override;
  void written(size_t unit) override;

  // GradientHooks' sink. Of no use to others.
  void take(VariableIndex variable, const at::Tensor& gradient);

 private:
  enum class Open { kNone, kForward, kBackward };

  // What a forward leads to. Lives as long as its outputs' graph.
  struct ForwardRecord {
    std::vector<uint32_t> expected;  // by unit: trained parameters in use
    bool is_done = false;            // a backward has gone through it
  };

  struct Parameter {
    size_t unit;
    size_t flat;
    size_t in_flat;
  };

  struct SegmentFacts {
    uint64_t tag = 0;
    std::vector<char> kept_before = {};  // by unit: unsharded at the start
    bool has_grad = false;
    bool is_shadow = false;
  };

  void check_usable() const;
  void make_hooks();
  void show_compute_dtypes(bool value);
  void check_neighbours() const;
  void adopt_pieces();
  void prepare();
  void release_stale();
  uint64_t settings_digest() const;
  UnitRules rules_for(SegmentKind kind, bool has_grad,
                      const std::vector<char>& unsharded) const;
  void open(SegmentKind kind);
  void open_backward(const std::shared_ptr<ForwardRecord>& reached);
  std::vector<uint32_t> expected_gradients(
      const std::shared_ptr<ForwardRecord>& reached) const;
  void close();
  void abandon(const std::string& error) noexcept;
  void end_backward();
  void deliver(std::vector<at::Tensor>& hooked);
  void release_after_segment();
  void plan_buffers_of(const RecordedSchedule& schedule);
  void break_off() noexcept;
  void release_memory() noexcept;
  bool is_due(const ShardedUnit& unit) const {
    return synchronizes_ && unit.settings.synchronizes && unit.is_trained();
  }
  bool has_held_gradients(const ShardedUnit& unit) const;
  bool is_own_thread() const;

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  FullyShardOptions options_;
  const std::unique_ptr<ShardMeshes> meshes_;
  std::vector<ShardedUnit> units_;
  BufferMemory memory_;
  const std::shared_ptr<Progress> progress_ = std::make_shared<Progress>();
  SegmentExchange exchange_;
  ShardingRecorder recorder_;
  std::unique_ptr<StallWatch> stall_watch_;
  std::vector<Parameter> parameters_;  // by number
  std::vector<at::Tensor> hooked_;     // of these, those of floating dtypes
  std::vector<size_t> number_of_hooked_;
  std::unique_ptr<GradientHooks> hooks_;
  std::optional<HiddenPostAccumulateHooks> hidden_hooks_;  // in backward

  mutable std::recursive_mutex mutex_;
  std::atomic<Open> kind_ = Open::kNone;
  std::optional<SegmentRun> run_;
  SegmentFacts facts_;
  std::thread::id forward_thread_;
  std::function<void()> forward_check_;
  int depth_ = 0;  // of nested forwards
  bool synchronizes_ = true;
  std::atomic<bool> is_broken_ = false;
  std::string why_broken_;
  int last_backward_ = -1;  // the graph task whose segment has ended

  std::map<uint64_t, RecordedSchedule> schedules_;  // by tag
  std::map<SegmentKind, SegmentPlan> step_;  // the last of each kind, for plans
  std::vector<int64_t> planned_;
  std::vector<std::weak_ptr<ForwardRecord>> forwards_;
  std::shared_ptr<ForwardRecord> last_forward_;
  std::shared_ptr<ForwardRecord> last_reached_;
  std::vector<char> used_in_forward_;  // by number
  std::vector<char> used_;  // by number: has a gradient that is not reduced
  bool may_write_ = false;  // units by hand
  ShardedModelStatistics statistics_;
  std::shared_ptr<char> alive_ = std::make_shared<char>();
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_SHARDED_MODEL_H_
