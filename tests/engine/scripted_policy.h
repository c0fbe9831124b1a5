// A reduction policy for tests of the engine: its entries are given by how many
// gradients each waits for, all-reduce a tensor of one size each, and note what
// becomes of them.
//
//   RecordingGroup recording(2);
//   ScriptedPolicy policy({recording.group()}, {2, owners_word(), 0});
//   policy.fail(Step::kPack, 1);
//   ...
//   EXPECT_THAT(policy.events(), ElementsAre("pack 0", "launch 0"));
//
// Variables are numbered by entry: 0 and 1 are those of entry 0 here.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_TESTS_ENGINE_SCRIPTED_POLICY_H_
#define BRIGADE_TESTS_ENGINE_SCRIPTED_POLICY_H_

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "brigade/engine/state/collective.h"
#include "brigade/engine/state/reduction_policy.h"

namespace brigade::testing {

struct ScriptedError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct ScriptedEntry {
  // Implicit, so that a sequence can be written as a list of counts.
  ScriptedEntry(size_t count) : num_gradients(count) {}

  size_t num_gradients = 0;  // that it waits for
  size_t group = 0;          // that it is launched on
  bool waits_for_word = false;
  bool has_unit = true;
  bool is_left_out = false;
  bool needs_pack = true;
};

inline ScriptedEntry owners_word() {
  ScriptedEntry entry(0);
  entry.waits_for_word = true;
  return entry;
}

inline ScriptedEntry without_unit(ScriptedEntry entry) {
  entry.has_unit = false;
  return entry;
}

inline ScriptedEntry on_group(size_t group, ScriptedEntry entry) {
  entry.group = group;
  return entry;
}

inline ScriptedEntry left_out(ScriptedEntry entry) {
  entry.is_left_out = true;
  return entry;
}

inline ScriptedEntry without_pack(ScriptedEntry entry) {
  entry.needs_pack = false;
  return entry;
}

// Of an entry, in the words that events begin with.
enum class Step {
  kPack,
  kLaunch,    // before anything travels
  kLaunched,  // behind that
  kSubstitute,
  kResult,
  kDeliver
};

class ScriptedCollective;

class ScriptedPolicy final : public ReductionPolicy {
 public:
  using Groups = std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>;

  ScriptedPolicy(Groups groups, std::vector<ScriptedEntry> entries);
  ~ScriptedPolicy() override;

  // ---- The script.

  // Once, at this step of the entry.
  void fail(Step step, size_t entry,
            std::exception_ptr error =
                std::make_exception_ptr(ScriptedError("as scripted")));

  // What was scripted to fail and has not.
  void fail_no_more() { errors_.clear(); }

  // From here on. REQUIRES: the engine is asked to take it.
  void adopt(std::vector<ScriptedEntry> entries);

  // At the next replan(): the same sequence, or these entries.
  void replan_to_same() { replanned_ = Replanned::kSameSequence; }
  void replan_to(std::vector<ScriptedEntry> entries);

  // Called by a launch of the entry.
  std::function<void(size_t entry)> when_launched = {};

  // In the iterations that follow.
  std::vector<size_t> unused = {};           // known when a backward begins
  std::vector<size_t> unused_in_end = {};    // known when one ends
  std::optional<size_t> delivered_at_begin;  // entries up to this one
  bool has_gradients_to_come = true;
  bool begins_with_outputs = false;
  bool ends_without_gradients = false;
  bool compares_iterations = false;
  bool learns = true;
  bool chains =
      false;  // each launch has a second one behind it, like the first
  double contribution = 1;  // to each entry; a substitute's is 0
  HookTraits traits = {.fails_by_network_only = true, .name = "scripted"};

  // ---- What came of it.

  // Since the last call, in order: "pack 0", "launch 0", "substitute 0",
  // "deliver 0", "abandon 0", "local 2" (a gradient that is not reduced),
  // "give 3", "give 3 here" (where it is wanted), "replan", "ended everywhere",
  // "delivered", "aborted", "delivery failed".
  std::vector<std::string> events() { return std::exchange(events_, {}); }

  // That were delivered last, by entry.
  const std::map<size_t, double>& results() const { return results_; }

  size_t num_variables() const { return entry_of_.size(); }

  // ---- What the engine asks.

  std::span<Collective* const> sequence() override { return sequence_; }
  uint64_t fingerprint() const override { return fingerprint_; }
  std::string describe_sequence() const override;
  bool compares_each_iteration() const override { return compares_iterations; }
  const HookTraits& hook_traits() const override { return traits; }
  void give(std::span<const int64_t> units, int64_t wanted) override;

  bool expects_gradients() const override { return has_gradients_to_come; }
  void check_variables() const override {}
  Replanned replan(const CallCollective& call) override;
  bool before_iteration() override { return false; }
  void on_prepared(std::span<const at::Tensor> /*outputs*/) override {}
  bool begins_at_outputs() const override { return begins_with_outputs; }
  void on_begun_together(bool has_one_order) override;
  void on_backward_begins(RunningIteration& iteration, bool is_shadow) override;
  void on_local_gradient(VariableIndex variable, bool is_defined) override;
  std::optional<Slot> on_gradient(VariableIndex variable,
                                  bool is_defined) override;
  void on_backward_ends(RunningIteration& iteration) override;
  bool may_end_without_gradients() const override {
    return ends_without_gradients;
  }
  bool is_learning() const override { return learns; }
  void on_end_confirmed(ToldAlike alike) override;
  void on_end_refuted() override;
  void on_iteration_over(Outcome outcome, bool is_shadow) override;
  void launch_rest_beside() override { note("rest beside"); }

  std::shared_ptr<void> abandon(
      std::span<Collective* const> in_flight) override;
  std::shared_ptr<void> let_go() override { return nullptr; }

  std::string_view unit_word() const override { return "unit"; }
  std::string name_of(std::span<const size_t> variables) const override;
  std::string describe_missing(std::span<const size_t> variables,
                               Occasion occasion) const override;
  std::string describe_late(VariableIndex variable,
                            Occasion occasion) const override;
  [[noreturn]] void refuse(VariableIndex variable,
                           Occasion occasion) const override;

 private:
  friend class ScriptedCollective;

  void note(std::string event) { events_.push_back(std::move(event)); }
  void throw_if_scripted(Step step, size_t entry);
  void mark(RunningIteration& iteration, std::span<const size_t> variables);

  const Groups groups_;
  uint64_t fingerprint_ = 0;
  std::vector<std::unique_ptr<ScriptedCollective>> entries_;
  std::vector<Collective*> sequence_;
  std::vector<uint32_t> entry_of_;  // by variable
  std::map<std::pair<Step, size_t>, std::exception_ptr> errors_;
  Replanned replanned_ = Replanned::kNotDue;
  std::vector<ScriptedEntry> next_entries_;
  std::vector<std::string> events_;
  std::map<size_t, double> results_;
};

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_ENGINE_SCRIPTED_POLICY_H_
