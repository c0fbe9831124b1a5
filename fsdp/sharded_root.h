// Trains parameters of which each rank holds a part: gathers a unit's when it
// is used, and sums its gradients when they are there.
//
// The part of sharding that does not depend on the module's type. Whoever runs
// the module tells of each forward, and of each call of a unit in it:
//
//   ShardedRoot root(units, group, {});
//   torch::optim::AdamW optimizer(root.shards());
//   ...
//   root.forward([&] {
//     at::Tensor h = root.call(0, x, [&](at::Tensor in) { return first(in); });
//     return root.call(1, h, [&](at::Tensor in) { return second(in); });
//   }).sum().backward();
//   optimizer.step();
//
// Backward needs no calls: the outputs of a unit tell when it begins, and its
// inputs when it is left. Inside of a backward, calls are those of activation
// checkpoints that compute again.
//
// Ranks may call other units, and in another order: what one leaves out it
// gathers for its peers, and sums as zeros. What it needs more often than was
// expected, which is as often as in the last iteration that was alike on all,
// or as in the forward before a backward, once at least, all gather where they
// wait for each other next: where a forward or backward begins, or one ends
// that is reduced. They run equally many of these, else it is an error on all
// ranks; so it is to need a unit again which another rank has written since,
// and on devices behind another rank's end of a backward.
//
// A step that fails on one rank fails on all, and drops what earlier backwards
// without synchronisation have added up.
//
// A unit is released in backward when its inputs tell that it is over; one
// whose inputs need no gradient, as the first, when backward ends.
//
// On devices with streams a call of a unit begins and ends on one stream, and
// ends behind what it computes, on whichever streams; forwards begin behind
// what has written the shards. The host waits for no device there, but in a
// backward that leaves out parameters, and a peer's failure in a backward is
// told where the next forward begins. Checkpoints that run a backward of their
// own are to be in the call of a unit around them: else each is an iteration of
// its own, and its gradients belong to its stream.
//
// Thread safety: one call at a time, one backward at a time.

#ifndef BRIGADE_FSDP_SHARDED_ROOT_H_
#define BRIGADE_FSDP_SHARDED_ROOT_H_

#include <ATen/core/Tensor.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "brigade/engine/engine.h"
#include "brigade/fsdp/forward_dtypes.h"
#include "brigade/fsdp/make_units.h"
#include "brigade/fsdp/memory/gradient_memory.h"
#include "brigade/fsdp/memory/memory_pool.h"
#include "brigade/fsdp/schedule/call_depths.h"
#include "brigade/fsdp/schedule/live_calls.h"
#include "brigade/fsdp/schedule/memory_plan.h"
#include "brigade/fsdp/schedule/sharding_timeline.h"
#include "brigade/fsdp/schedule/step_plans.h"
#include "brigade/fsdp/schedule/unit_calls.h"
#include "brigade/fsdp/sharding_options.h"
#include "brigade/fsdp/transport/shard_transport.h"
#include "brigade/fsdp/units/mesh_transports.h"
#include "brigade/fsdp/units/unit.h"
#include "brigade/fsdp/units/unit_gathers.h"
#include "brigade/fsdp/units/unit_policy.h"
#include "brigade/hooks/autograd_node.h"
#include "brigade/hooks/backward_streams.h"
#include "brigade/hooks/output_tensors.h"

namespace brigade {

// Counts since construction, bytes as they are now.
struct ShardingStatistics {
  int64_t late_gathers = 0;      // needed, and not expected
  int64_t ahead_gathers = 0;     // launched before their need
  int64_t unneeded_gathers = 0;  // launched, and not needed on this rank
  int64_t near_gathers = 0;  // of a segment, among those who kept its slices
  int64_t allocations = 0;   // of memory for whole units and gradients
  int64_t unplanned =
      0;  // of these: not of the plan (fsdp/schedule/memory_plan.h)
  int64_t whole_bytes = 0;  // that memory
  int64_t peak_whole_bytes = 0;
  int64_t planned_bytes = 0;    // its peak in steps that are as expected
  int64_t shard_bytes = 0;      // parameters that this rank holds, with padding
  int64_t padding_bytes = 0;    // in all shards of all units, on all ranks
  int64_t sent_by_gathers = 0;  // bytes, of this rank, without what asks peers
  int64_t sent_by_sums = 0;     // of gradients
};

// What this rank holds of a parameter.
struct NamedShard {
  std::string name;  // "blocks.2.weight"
  at::Tensor shard;
  std::vector<int64_t> whole_sizes;
};

class ShardedRoot final : private UnitPolicy::Listener {
 public:
  // Collective: ranks connect. `units`: of make_units(), by the same group and
  // options, or each by its mesh's group, with the number of its mesh. Errors:
  // PeerError if ranks don't meet.
  ShardedRoot(std::vector<Unit> units,
              c10::intrusive_ptr<c10d::ProcessGroup> group,
              ShardingOptions options);
  // Makes the units, too. Errors: make_units()' too.
  ShardedRoot(const std::vector<UnitSpec>& units,
              c10::intrusive_ptr<c10d::ProcessGroup> group,
              ShardingOptions options);
  ~ShardedRoot();
  ShardedRoot(const ShardedRoot&) = delete;
  ShardedRoot& operator=(const ShardedRoot&) = delete;

  // By unit, by parameter as given: what this rank holds of it, 1D unless it
  // holds all. What an optimizer is given; `.grad` is the average over ranks
  // of its mesh.
  std::vector<at::Tensor> shards() const;
  // The same, of one unit, in the order of its UnitSpec.
  const std::vector<at::Tensor>& shards_of(size_t unit) const {
    return units_[unit].shards;
  }
  const Unit& unit(size_t unit) const { return units_[unit]; }
  size_t num_units() const { return units_.size(); }
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }
  // Of the root's mesh: this rank's place in its row, and the row's length.
  int shard_rank() const { return transports_.root().shard_rank(); }
  int num_shards() const { return transports_.root().num_shards(); }
  const ShardingStreams& streams() const {
    return transports_.root().streams();
  }
  // Whether this rank is in the first row of the unit's mesh; those of others
  // hold copies.
  bool is_first_replica(size_t unit) const;
  // Some units are on meshes of their own; of these some on fewer ranks than
  // the root has, which have other parameters.
  bool has_own_meshes() const;
  bool has_other_units_elsewhere() const;

  // ---- A forward: all of it between these, on all ranks.

  // Parameters whose shards require gradients do so from here on, so that they
  // may be frozen and thawed in between, alike on all ranks.
  //
  // Errors: RuntimeError on all ranks if some do something else, or a shard was
  // given other memory since it was made; PeerError if a rank has failed or is
  // lost.
  void begin_forward();
  void end_forward();
  // In place of end_forward(): peers are told. Does not throw.
  void forward_failed(const std::exception_ptr& error);

  template <typename Forward>
  auto forward(const Forward& run) {
    begin_forward();
    try {
      auto outputs = run();
      end_forward();
      return outputs;
    } catch (...) {
      forward_failed(std::current_exception());
      throw;
    }
  }

  // ---- A call of a unit.

  // A handle of the call, for its two ends and its backward.
  struct Call {
    const size_t unit;
    const int64_t version;                 // of what forward has read
    const uint64_t first_node;             // of autograd's, by sequence number
    int64_t open_in = 0;                   // the backward that goes through it
    std::shared_ptr<void> live = nullptr;  // of LiveCalls
    bool is_seen = false;                  // held by its graph
    // On devices: what it computes behind its gate, and where that ends.
    RecordedSince inside = {};
    std::vector<WeakNodePtr> ends = {};
  };

  // The unit is whole when it returns. Inputs that require a gradient are
  // replaced by stand-ins, which the unit is to compute with.
  std::shared_ptr<Call> begin_call(size_t unit, std::span<at::Tensor> inputs);
  void end_call(const std::shared_ptr<Call>& call,
                std::span<const at::Tensor> outputs);
  // In place of end_call(): the unit has thrown.
  void abort_call(const Call& call);

  template <typename Run>
  auto call(size_t unit, at::Tensor input, const Run& run) {
    const auto called = begin_call(unit, {&input, 1});
    try {
      auto outputs = run(std::move(input));
      end_call(called, tensors_of(outputs));
      return outputs;
    } catch (...) {
      abort_call(*called);
      throw;
    }
  }

  // ---- Beside backwards.

  // Reduces what backwards without synchronisation have added up, as a backward
  // would that brings no gradients. Collective. Errors: RuntimeError while
  // synchronizes() is false, or that of all units.
  void reduce();

  // Whether backwards have added up what was not reduced over all ranks.
  bool holds_gradients() const;

  // To be called where shards were written by what does not count it: through
  // Tensor::data(), or by a fused optimizer. What is whole is out of date then.
  void shards_changed();

  std::vector<NamedShard> named_shards() const;

  // Collective, where programs launch something of their own behind a forward:
  // a rank whose forward needed a unit once more than its peers' waits for them
  // to gather it, which what they launch would meet. What is collective here
  // needs no such call.
  void meet_peers() { ask({.words = "meets its peers"}); }

  // How many ranks have data for another step; this one does, or not.
  // Collective.
  int64_t num_ranks_with(bool has_data);

  // In place of a forward and a backward that is reduced, on a rank without
  // data: takes part in those of the others, and adds zeros to their gradients.
  // The average is that over all ranks. Shards get their gradients here too, so
  // the optimizer steps as on the others.
  void step_without_data();

  // Where a custom autograd function may write the gradient of a whole
  // parameter, in backward, and return it: nothing is copied then. Of the
  // parameter's shape, in the reduce dtype; what it holds is anything.
  // Undefined if the parameter has a gradient in this backward already, or the
  // backward returns gradients (torch::autograd::grad), so that one of the
  // function's own is to be returned. Errors: ValueError for a
  // tensor that is no parameter of a unit.
  at::Tensor gradient_slot(const at::Tensor& parameter) {
    return policy_->gradient_slot(parameter);
  }

  // ---- Settings.

  // While off, backwards add gradients up on this rank, whole: nothing is
  // communicated but parameters. Of one unit: UnitSettings::synchronizes. Alike
  // on all ranks; read when a backward begins.
  void set_synchronizes(bool value) { synchronizes_ = value; }
  bool synchronizes() const { return synchronizes_; }

  // False: backwards sum gradients over the ranks of a row only, and keep the
  // sums, which the next backward adds to its own before it sums over all. Of
  // no effect on meshes of one row. Of one unit:
  // UnitSettings::sums_over_replicas. Alike on all ranks; read when a backward
  // begins.
  void set_sums_over_replicas(bool value) {
    policy_->set_sums_over_replicas(value);
  }

  // Memory is planned when the first forward begins, of what is set then.

  // Reductions that keep the memory of whole gradients; at least 1.
  // Alike on all ranks, on devices.
  void set_max_reducing(size_t value);

  UnitSettings& settings(size_t unit) { return units_.at(unit).settings; }

  // What whoever runs the module casts inputs and outputs to, of the unit as
  // its settings are now, or of the whole forward; call() casts nothing.
  ForwardDtypes forward_dtypes(size_t unit) const;
  ForwardDtypes forward_dtypes() const;

  // ---- Whole parameters, outside of a forward and backward. Collective.

  // All units are whole until reshard(). `writes`: what is in them then becomes
  // their value: alike on all ranks.
  void unshard();
  void reshard(bool writes);

  // The same of one unit, which trains on meanwhile: it is released by
  // reshard(), or as its settings say, behind the next forward or backward.
  //
  // Launches the gather, unless the unit is whole already; also inside of a
  // forward or backward, on all ranks in the same place. Its parameters are to
  // be read behind await_unit(), or in a call of it. Of no effect while all
  // units are whole.
  //
  // Errors: RuntimeError on all ranks if some do something else.
  void unshard(size_t unit);
  // Whether it is whole, for the current stream too, from here on; then
  // `on_released`, if any, is called once when it no longer is. On this rank.
  // Errors: PeerError if a rank is lost.
  bool await_unit(size_t unit, std::function<void()> on_released = {});
  // On this rank, and alike on all before the next forward or backward begins.
  // `writes`: as above. Of no effect in a call of the unit, in its backward,
  // and while all units are whole.
  void reshard(size_t unit, bool writes);

  // What all ranks of a row of the segment's mesh hold, [W * S], of which this
  // one holds `shard` [S], laid out as the segment; any dtype. Collective,
  // between forwards and backwards.
  at::Tensor gather(const Segment& segment, const at::Tensor& shard);

  // The parameters of one unit, whole, as its UnitSpec has them, in their own
  // dtype; or gives their values. The first is collective.
  std::vector<at::Tensor> gather_unit(size_t unit);
  void assign_unit(size_t unit, std::span<const at::Tensor> wholes);

  // Sums, or the largest, of each value over all ranks, in their order, and the
  // same on all. `values`: 1D, float64, replaced; 0 for what another replica
  // counts. Collective.
  void sum_over_ranks(const at::Tensor& values, bool takes_largest);

  // The norm over all parameters of all ranks' gradients, which are multiplied
  // by max_norm / (norm + 1e-6), as torch's are, if that is less than 1. `p`:
  // infinity for the largest. The same number on all ranks. Collective. Errors:
  // ValueError for p <= 0.
  double clip_grad_norm(double max_norm, double p = 2.0);

  ShardingStatistics statistics() const;
  EngineStatistics engine_statistics() const { return engine_->statistics(); }

  // When units were gathered and reduced in the last step that was sampled: the
  // first 10 are, and every 100th, or that of the sample rate (0: none). What
  // backwards without synchronisation have gathered is the step's that is
  // reduced. On devices, waits for these. Errors: ValueError for a negative
  // rate.
  ShardingTimeline timeline() const;
  void set_timeline_sample_rate(int64_t sample_rate);

  // A rank that has waited so long for its peers warns once, and says for which
  // unit's gather, and how far the late ranks are (docs/timeline.md). At first
  // half of the group's timeout, 60 s at most; 0: never. Errors: ValueError for
  // a negative time.
  void set_stall_report_after(std::chrono::milliseconds time) {
    engine_->set_stall_report_after(time);
  }
  // Called on a thread of its own with what would have been a warning; null:
  // warn again.
  void set_stall_handler(
      std::function<void(const std::string& report)> handler) {
    engine_->set_stall_handler(std::move(handler));
  }

  // Units, bytes, padding, the orders in which units are gathered and reduced,
  // and the buffers that they are in, in words: before the first forward what
  // it is planned to be, as settings are now.
  std::string explain() const;

  bool can_continue() const { return engine_->can_continue(); }

 private:
  // What ranks ask each other before they go on.
  struct Question {
    std::string words;  // "rank 3 <words>"
    // In place of them, where they are other ones on each rank, as a unit's
    // name on other meshes.
    std::string words_of_all = words;
    std::vector<size_t> said = {};
    std::optional<size_t> wanted = std::nullopt;  // a unit: Engine::ask()
  };

  // Goes on where all ranks say the same.
  ToldAlike ask(const Question& question);
  // The same for a unit that this rank needs and no rank expects: all gather
  // it, where they wait for each other next.
  void ask_for(size_t unit);

  // sharded_root_forward.cc
  void check_shards();
  void check_settings();
  [[noreturn]] void refuse_to_begin(const std::string& text);
  void follow_shards();
  void claim_kept();
  void release_outdated();
  void release_if_outdated(size_t unit);
  const std::vector<size_t>& ahead_of(size_t unit) const;
  void need(size_t unit);
  static void refuse_writes(const Unit& unit);
  void release_if_unused(size_t unit);
  void release_behind_forward(size_t unit);
  void pass_over_before(size_t place);
  void pass_over_for(size_t unit);
  bool may_be_called(size_t unit) const;
  void leave_forward(size_t unit);

  // sharded_root_backward.cc
  void give_up_left_out_by(size_t unit);
  void give_up_unreached();
  bool may_be_used(size_t unit) const;
  void give_up_gradients(size_t unit);
  void ask_out_of_turn(size_t unit);
  void open(const std::shared_ptr<Call>& call);
  void close(Call& call);
  void release_behind_backward(size_t unit);
  void begin_backward();
  void begin_backward_through(std::vector<char> units);
  std::vector<char> units_that_graphs_reach() const;
  void on_backward_over(bool ended_well) override;
  void drop_pass();
  void leave_backward();
  void await_backward();
  bool is_reduced() const;
  void end_backward(bool ended_well);
  void run_empty_backward();
  void bring_no_gradients();

  // sharded_root_between.cc
  const Unit& unit_of(const Segment& segment) const;

  // sharded_root_observed.cc
  void note_step_begins();
  void note_reduced_backward();

  // sharded_root_memory.cc
  std::vector<UnitCall> expected_calls() const;
  std::vector<char> expected_to_be_reached() const;
  MemoryPlan make_plan() const;
  absl::StatusOr<MemoryPlan> plan_of_calls() const;
  void follow_last_step();
  void drop_step();
  bool adds_up_gradients(size_t unit) const;
  void plan_memory();

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const ShardingOptions options_;
  MeshTransports transports_;
  MemoryPool pool_;
  GradientMemory gradient_memory_;
  std::vector<Unit> units_;
  std::optional<int64_t> planned_bytes_;  // none before the first forward
  std::vector<UnitCall> planned_calls_;
  std::vector<char> planned_reached_;  // by unit, in backward
  StepPlans step_plans_;               // what is planned in place of them
  CallDepths call_depths_;
  LiveCalls live_calls_;
  BackwardStreams backward_streams_;
  std::set<size_t> units_that_add_up_;  // gradients over several backwards
  bool must_plan_ = false;              // anew, where the next step begins
  bool is_step_over_ = false;           // and has not been looked at
  std::unique_ptr<UnitGathers> gathers_;
  std::unique_ptr<UnitPolicy> policy_;
  std::unique_ptr<Engine> engine_;

  enum class Pass { kNone, kForward, kBackward, kApart };
  Pass pass_ = Pass::kNone;  // left under the mutex by a backward
  std::mutex pass_mutex_;
  std::condition_variable backward_is_over_;
  bool peers_know_ = false;  // of the failure that is on its way out of forward
  bool synchronizes_ = true;
  bool keeps_units_ = false;  // this forward, or the last: for its backward
  bool computes_backward_ = false;   // this one, or the last: a graph's
  bool backward_reduces_ = false;    // this one, or the last
  bool is_behind_backward_ = false;  // that ended well, since when nothing ran

  // By unit: calls between their ends, in forward; calls whose backward is
  // under way; whether it stays whole until a backward.
  std::vector<int> num_running_;
  std::vector<int> num_open_;
  std::vector<char> is_kept_;
  // By unit: called in this forward, and in the last that ended well, one
  // without gradients, and one with them. Empty: there was none.
  std::vector<char> called_;
  std::array<std::vector<char>, 2> called_before_;
  bool forward_is_over_ = false;  // but for what peers need
  std::vector<char> is_held_;     // by unit, by hand: unshard(unit)
  std::vector<std::function<void()>> on_released_;  // of await_unit()
  int64_t backward_ = 0;                            // counts them

  // Callbacks of graphs that outlive this object look at it.
  std::shared_ptr<char> alive_ = std::make_shared<char>();
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_SHARDED_ROOT_H_
