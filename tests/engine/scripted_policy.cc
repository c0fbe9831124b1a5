#include "brigade/tests/engine/scripted_policy.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm_hooks/then_collective.h"
#include "brigade/engine/running_iteration.h"

namespace brigade::testing {

class ScriptedCollective final : public Collective {
 public:
  ScriptedCollective(ScriptedPolicy& policy, size_t index,
                     std::optional<size_t> unit, ScriptedEntry entry)
      : policy_(policy), index_(index), unit_(unit), entry_(entry) {}

  std::optional<size_t> unit() const override { return unit_; }
  size_t group() const override { return entry_.group; }
  size_t num_awaited() const override {
    return entry_.waits_for_word ? 1 : entry_.num_gradients;
  }
  bool is_left_out() override { return entry_.is_left_out; }
  bool needs_pack() override { return entry_.needs_pack; }

  void pack() override {
    policy_.throw_if_scripted(Step::kPack, index_);
    note("pack");
  }

  c10::intrusive_ptr<c10::ivalue::Future> launch() override {
    policy_.throw_if_scripted(Step::kLaunch, index_);
    note("launch");
    if (policy_.when_launched) policy_.when_launched(index_);
    const auto first = all_reduce(policy_.contribution);
    policy_.throw_if_scripted(Step::kLaunched, index_);
    if (!policy_.chains) return first;
    future_ = then_collective(first, [this](const c10::IValue& sum) {
      note("launch behind");
      return all_reduce(sum.toTensorVector()[0][0].item<double>());
    });
    return future_;
  }

  c10::intrusive_ptr<c10::ivalue::Future> launch_substitute() override {
    policy_.throw_if_scripted(Step::kSubstitute, index_);
    note("substitute");
    return all_reduce(0);
  }

  at::Tensor result_of(const c10::IValue& value) override {
    policy_.throw_if_scripted(Step::kResult, index_);
    return value.toTensorVector().front();
  }

  void deliver(const at::Tensor& result) override {
    policy_.throw_if_scripted(Step::kDeliver, index_);
    if (result.defined()) {
      TORCH_CHECK(result.numel() == numel(), "the result of another entry");
      policy_.results_[index_] = result[0].item<double>();
    }
    if (!unit_ && future_) future_->waitAndThrow();
    note("deliver");
  }

  c10::Device device() const override { return at::kCPU; }
  bool fails_by_network_only() const override {
    return policy_.traits.fails_by_network_only || !unit_;
  }
  std::string describe() const override {
    return absl::StrCat("entry ", index_);
  }

 private:
  int64_t numel() const { return static_cast<int64_t>(index_) + 1; }

  void note(const char* step) { policy_.note(absl::StrCat(step, " ", index_)); }

  c10::intrusive_ptr<c10::ivalue::Future> all_reduce(double value) {
    std::vector<at::Tensor> tensors = {at::full({numel()}, value)};
    future_ = policy_.groups_[group()]->allreduce(tensors)->getFuture();
    return future_;
  }

  ScriptedPolicy& policy_;
  const size_t index_;
  const std::optional<size_t> unit_;
  const ScriptedEntry entry_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // of the last launch
};

ScriptedPolicy::ScriptedPolicy(Groups groups,
                               std::vector<ScriptedEntry> entries)
    : groups_(std::move(groups)) {
  adopt(std::move(entries));
}

ScriptedPolicy::~ScriptedPolicy() = default;

void ScriptedPolicy::fail(Step step, size_t entry, std::exception_ptr error) {
  errors_[{step, entry}] = std::move(error);
}

void ScriptedPolicy::throw_if_scripted(Step step, size_t entry) {
  const auto found = errors_.find({step, entry});
  if (found == errors_.end()) return;
  const std::exception_ptr error = found->second;
  errors_.erase(found);
  std::rethrow_exception(error);
}

void ScriptedPolicy::adopt(std::vector<ScriptedEntry> entries) {
  ++fingerprint_;
  entries_.clear();
  sequence_.clear();
  entry_of_.clear();
  size_t num_units = 0;
  for (size_t e = 0; e < entries.size(); ++e) {
    std::optional<size_t> unit;
    if (entries[e].has_unit) unit = num_units++;
    entries_.push_back(
        std::make_unique<ScriptedCollective>(*this, e, unit, entries[e]));
    sequence_.push_back(entries_.back().get());
    entry_of_.insert(entry_of_.end(), entries[e].num_gradients,
                     static_cast<uint32_t>(e));
  }
}

void ScriptedPolicy::replan_to(std::vector<ScriptedEntry> entries) {
  replanned_ = Replanned::kOtherSequence;
  next_entries_ = std::move(entries);
}

void ScriptedPolicy::give(std::span<const int64_t> units, int64_t wanted) {
  for (const int64_t unit : units) {
    note(absl::StrCat("give ", unit, unit == wanted ? " here" : ""));
  }
}

Replanned ScriptedPolicy::replan(const CallCollective& call) {
  if (replanned_ == Replanned::kNotDue) return Replanned::kNotDue;
  call("agreeing on a sequence", [this] {
    std::vector<at::Tensor> order = {at::zeros({1})};
    groups_.front()->broadcast(order)->wait();
  });
  note("replan");
  if (replanned_ == Replanned::kOtherSequence) adopt(next_entries_);
  return std::exchange(replanned_, Replanned::kNotDue);
}

std::string ScriptedPolicy::describe_sequence() const {
  return absl::StrCat(entries_.size(), " entries");
}

void ScriptedPolicy::mark(RunningIteration& iteration,
                          std::span<const size_t> variables) {
  for (const size_t variable : variables) {
    iteration.mark(variable,
                   {.entry = entry_of_[variable], .has_gradient = false});
  }
}

void ScriptedPolicy::on_backward_begins(RunningIteration& iteration,
                                        bool is_shadow) {
  if (!is_shadow) mark(iteration, unused);
  if (delivered_at_begin) iteration.deliver_through(*delivered_at_begin);
}

void ScriptedPolicy::on_local_gradient(VariableIndex variable,
                                       bool /*is_defined*/) {
  note(absl::StrCat("local ", variable.parameter));
}

std::optional<Slot> ScriptedPolicy::on_gradient(VariableIndex variable,
                                                bool is_defined) {
  return Slot{.entry = entry_of_[variable.parameter],
              .has_gradient = is_defined};
}

void ScriptedPolicy::on_backward_ends(RunningIteration& iteration) {
  mark(iteration, unused_in_end);
}

void ScriptedPolicy::on_begun_together(bool has_one_order) {
  if (!has_one_order) note("begun in other orders");
}

void ScriptedPolicy::on_end_confirmed(ToldAlike alike) {
  note(absl::StrCat("end confirmed", alike.proposals ? "" : ", no proposal",
                    alike.orders ? "" : ", other orders"));
}

void ScriptedPolicy::on_end_refuted() { note("end refuted"); }

void ScriptedPolicy::on_iteration_over(Outcome outcome, bool /*is_shadow*/) {
  switch (outcome) {
    case Outcome::kDelivered:
      return note("delivered");
    case Outcome::kAborted:
      return note("aborted");
    case Outcome::kDeliveryFailed:
      return note("delivery failed");
  }
}

std::shared_ptr<void> ScriptedPolicy::abandon(
    std::span<Collective* const> in_flight) {
  for (const Collective* const entry : in_flight) {
    const auto found = std::ranges::find(sequence_, entry);
    note(absl::StrCat("abandon ", found - sequence_.begin()));
  }
  return nullptr;
}

std::string ScriptedPolicy::name_of(std::span<const size_t> variables) const {
  return absl::StrCat("variables ", absl::StrJoin(variables, ", "));
}

std::string ScriptedPolicy::describe_missing(std::span<const size_t> variables,
                                             Occasion occasion) const {
  return absl::StrCat(name_of(variables), " got no gradient in ",
                      describe(occasion));
}

std::string ScriptedPolicy::describe_late(VariableIndex variable,
                                          Occasion occasion) const {
  return absl::StrCat("variable ", variable.parameter, " came after ",
                      describe(occasion));
}

void ScriptedPolicy::refuse(VariableIndex variable, Occasion occasion) const {
  TORCH_CHECK(false, "variable ", variable.parameter, " came twice in ",
              describe(occasion));
}

}  // namespace brigade::testing
