// Sharded training as a policy of the engine: each backward sums the gradients
// of every unit once, in one agreed order, and each rank gets its shard of the
// sums.
//
// Which parameters a rank has used may differ: what it has not used counts as
// zeros, and the gradient of a parameter that no rank used stays as it is.
// Ranks tell at the end of an iteration in which order they have needed units;
// if all have told the same, that is how the next one goes. They tell where
// backward begins, too, in which order its forward has.
//
// A unit may add its gradients up on this rank while others are reduced
// (UnitSettings::synchronizes): it is not in the sequence of that backward.
//
// Thread safety: none; the engine's lock covers the policy, and take() comes on
// the thread that calls the engine next.

#ifndef BRIGADE_FSDP_UNITS_UNIT_POLICY_H_
#define BRIGADE_FSDP_UNITS_UNIT_POLICY_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/engine/state/reduction_policy.h"
#include "brigade/fsdp/memory/gradient_memory.h"
#include "brigade/fsdp/schedule/gather_waits.h"
#include "brigade/fsdp/schedule/reached_units.h"
#include "brigade/fsdp/units/mesh_transports.h"
#include "brigade/fsdp/units/unit.h"
#include "brigade/fsdp/units/unit_gathers.h"
#include "brigade/fsdp/units/unit_reduction.h"
#include "brigade/fsdp/units/used_sum.h"

namespace brigade {

class UnitPolicy final : public ReductionPolicy {
 public:
  struct Listener {
    // An iteration is over. `ended_well`: on this rank, and, unless that is
    // refuted later, on all. Does not throw.
    virtual void on_backward_over(bool ended_well) = 0;

   protected:
    ~Listener() = default;
  };

  // `backward_order`: of the units, until one has been seen. REQUIRES: all
  // others outlive this object.
  UnitPolicy(std::vector<Unit>& units, MeshTransports& transports,
             UnitGathers& gathers, GradientMemory& memory, Listener& listener,
             uint64_t fingerprint_of_units, std::vector<size_t> backward_order);
  // Gives back the memory of gradients that were not reduced.
  ~UnitPolicy() override { drop_gradients(); }

  // All parameters that can be trained, unit by unit: the engine's variables.
  // Those that require no gradient now are not waited for, and units without
  // others not reduced.
  std::vector<at::Tensor> variables() const;

  // Parameters have been frozen or thawed: tells from the next iteration on.
  void note_trained_changed();

  // From the next backward on; alike on all ranks. False: only rows of the mesh
  // sum gradients, and keep the sums as a part of the next ones.
  void set_sums_over_replicas(bool value) { sums_over_replicas_ = value; }

  // Orders that a pass is expected to follow, equal on all ranks; units in
  // them that are whole are left out. Digests are for peers to compare.
  std::vector<size_t> expected_in_forward() const;
  // In which order forward needs units, if it needs each once: as the last
  // iteration that ranks agreed on, or else as they are numbered.
  const std::vector<size_t>& calling_order() const { return calling_order_; }
  std::vector<size_t> expected_in_backward() const;
  ReachedUnits& reached() { return reached_; }
  const ReachedUnits& reached() const { return reached_; }
  // While units are whole between passes, no gradient is to come.
  void refuse_gradients(bool value) { refuses_gradients_ = value; }

  // Those whose gradients a backward reduces, in the sequence's order, once for
  // each of their reductions.
  std::vector<size_t> reduced_units() const;

  // Variables whose gradients the running iteration waits for, by reduction, in
  // the order on which ranks have agreed.
  struct Awaited {
    size_t unit = 0;
    std::vector<size_t> variables = {};
  };
  std::vector<Awaited> awaited() const;
  // Of one unit.
  std::vector<size_t> awaited_of(size_t unit) const;
  // Units whose sums come before those of `unit`, and wait for gradients.
  std::vector<size_t> units_ahead_of(size_t unit) const;
  // Units that no rank's backward comes to. None behind several forwards: what
  // one has left whole another may have used without a call.
  std::vector<size_t> unreached() const;
  // Gradients that are marked next are those that this rank can't bring.
  void note_given_up(size_t unit) { is_given_up_[unit] = 1; }

  bool is_reducing() const { return is_reducing_; }  // in an iteration

  // On devices, whether waiting for this unit's gather, now, may take peers
  // that wait for sums which this rank has not launched: see
  // schedule/gather_waits.h.
  bool is_out_of_turn(size_t unit) const;
  // All ranks are where this one is, and have launched what the backward
  // expects to gather.
  void note_ranks_are_alike() {
    waits_ = GatherWaits();
    num_sums_alike_ = memory_.num_launched();
  }
  size_t num_sums_launched() const { return memory_.num_launched(); }

  // A forward is over, whose gathers are these; its backward needs `backward`,
  // as far as can be told.
  void note_forward(std::vector<size_t> record, std::vector<size_t> backward);
  // Reduced or not.
  void note_backward_over() {
    follows_forward_ = false;
    num_forwards_ = 0;
    reached_.backward_over();
  }
  // What ranks expect who have not seen one forward.
  std::vector<size_t> agreed_in_backward() const {
    return expected_in(backward_order_);
  }

  // Of GradientHooks: adds it to what its unit reduces.
  void take(VariableIndex variable, const at::Tensor& gradient);

  // See ShardedRoot.
  at::Tensor gradient_slot(const at::Tensor& parameter);

  std::span<Collective* const> sequence() override { return sequence_; }
  // Of the units. Order and settings are compared where a backward begins: a
  // rank adopts them there, and may fail before.
  uint64_t fingerprint() const override { return fingerprint_of_units_; }
  std::string describe_sequence() const override;
  bool compares_each_iteration() const override { return true; }
  uint64_t backward_digest() const override;
  uint64_t proposal() const override;
  uint64_t order_digest(bool is_end) const override;
  // A rank may have made its step already.
  uint64_t digest_to_give() const override {
    return gathers_.digest_of_writes();
  }
  void give(std::span<const int64_t> units, int64_t wanted) override {
    gathers_.give(units, wanted);
  }
  const HookTraits& hook_traits() const override { return traits_; }

  bool expects_gradients() const override;
  void check_variables() const override {}
  Replanned replan(const CallCollective& call) override;
  bool before_iteration() override { return false; }
  void on_prepared(std::span<const at::Tensor> outputs) override {}
  bool begins_at_outputs() const override { return true; }
  void on_begun_together(bool has_one_order) override;
  void on_backward_begins(RunningIteration& iteration, bool is_shadow) override;
  void on_local_gradient(VariableIndex variable, bool is_defined) override;
  std::optional<Slot> on_gradient(VariableIndex variable,
                                  bool is_defined) override;
  void on_backward_ends(RunningIteration& iteration) override;
  bool may_end_without_gradients() const override { return true; }
  bool is_learning() const override { return false; }
  void on_end_confirmed(ToldAlike alike) override;
  void on_end_refuted() override;
  void on_iteration_over(Outcome outcome, bool is_shadow) override;

  std::shared_ptr<void> abandon(
      std::span<Collective* const> in_flight) override;
  std::shared_ptr<void> let_go() override;

  std::string_view unit_word() const override { return "reduction"; }
  void launch_rest_beside() override { gathers_.launch_expected(); }
  std::string describe_beside() const override {
    return gathers_.describe_last();
  }
  std::string name_of(std::span<const size_t> variables) const override;
  std::string describe_missing(std::span<const size_t> variables,
                               Occasion occasion) const override;
  std::string describe_late(VariableIndex variable,
                            Occasion occasion) const override;
  [[noreturn]] void refuse(VariableIndex variable,
                           Occasion occasion) const override;

 private:
  struct Variable {
    size_t reduction;
    size_t in_segment;  // parameter of the segment
    size_t unit;
  };

  // What a rank has seen of an iteration, in order.
  struct Seen {
    std::vector<size_t> forward;      // units
    std::vector<size_t> predicted;    // units: what was to follow from that
    std::vector<size_t> backward;     // units
    std::vector<size_t> completions;  // reductions
  };

  const NamedParameter& parameter(size_t variable) const;
  bool is_trained(size_t variable) const;
  uint64_t digest_of_settings() const;
  void adopt_order(std::vector<size_t> reductions);
  bool update_reduced();
  void expect_waits(const std::vector<size_t>& gathers);
  void count_ready(size_t variable);
  void mark_absent(size_t variable, RunningIteration& iteration) const;
  std::vector<size_t> expected_in(const std::vector<size_t>& backward) const;
  Seen seen() const;
  void adopt(Seen seen);
  bool has_used_all() const;
  void sum_used();
  void drop_gradients();
  std::vector<char> used_of(size_t reduction) const;

  // Constant.
  std::vector<Unit>& units_;
  ShardTransport& transport_;  // of all ranks
  UnitGathers& gathers_;
  GradientMemory& memory_;
  Listener& listener_;
  const uint64_t fingerprint_of_units_;
  const HookTraits traits_;
  std::vector<UnitReduction> reductions_;
  std::vector<Variable> variables_;
  std::unordered_map<const at::TensorImpl*, size_t> numbers_;  // of variables
  std::vector<size_t> first_variable_;                         // by reduction
  std::vector<std::vector<size_t>> reductions_of_;             // by unit
  std::unique_ptr<UsedSum> used_sum_;  // null on the CPU

  bool is_reducing_ = false;
  bool is_trained_changed_ = false;
  bool refuses_gradients_ = false;
  bool sums_over_replicas_ = true;

  // What ranks have agreed on.
  std::vector<size_t> agreed_forward_;  // of units, as ranks have seen it last
  std::vector<size_t> forward_order_;   // of units: that, and the others
  std::vector<int> num_absent_;  // by unit: forwards that have left it out
  bool is_predictable_ = true;   // its backward was the reverse of it
  std::vector<size_t> calling_order_;   // of units, each once
  std::vector<size_t> backward_order_;  // of units
  std::vector<size_t> reduction_order_;
  std::vector<char> is_reduced_;  // by reduction: it is in the sequence
  std::vector<size_t> places_;    // in the sequence, by reduction that is in it
  std::vector<Collective*> sequence_;
  std::optional<std::vector<size_t>> next_reduction_order_;

  // What this rank has seen since, forwards with a graph only.
  std::vector<size_t> forward_record_;
  size_t num_forwards_ = 0;  // since the last backward
  std::vector<size_t> backward_of_forward_;
  // The running backward expects that: all ranks have seen this forward, which
  // is another one than the last that they have agreed on.
  bool follows_forward_ = false;
  ReachedUnits reached_;
  std::vector<size_t> completion_;   // of reductions
  std::vector<size_t> num_missing_;  // gradients, by reduction
  std::vector<char> is_ready_;       // by variable
  std::vector<char> is_given_up_;    // by unit
  GatherWaits waits_;                // of the running backward, on devices
  size_t num_sums_alike_ = 0;        // where all ranks were last alike in it
  // By variable: of the gradients that are not committed.
  std::vector<int32_t> is_used_;

  // The last iteration's, if it was delivered before its end was confirmed.
  std::optional<Seen> unconfirmed_;
  bool is_confirmed_ = false;  // the running one's
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_UNITS_UNIT_POLICY_H_
