// How often an engine calls its policy and its entries, which it knows by their
// interfaces alone: the policy once for a gradient, all else for an entry or an
// iteration.

#include <torch/torch.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "brigade/comm/recording_group.h"
#include "brigade/engine/engine.h"
#include "brigade/tests/engine/scripted_policy.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using testing::ScriptedEntry;
using testing::ScriptedPolicy;

class CountedCollective final : public Collective {
 public:
  CountedCollective(Collective& counted, int64_t& count)
      : counted_(counted), count_(count) {}

  std::optional<size_t> unit() const override { return called().unit(); }
  size_t group() const override { return called().group(); }
  size_t num_awaited() const override { return called().num_awaited(); }
  bool is_left_out() override { return called().is_left_out(); }
  bool needs_pack() override { return called().needs_pack(); }
  void pack() override { called().pack(); }
  c10::intrusive_ptr<c10::ivalue::Future> launch() override {
    return called().launch();
  }
  c10::intrusive_ptr<c10::ivalue::Future> launch_substitute() override {
    return called().launch_substitute();
  }
  at::Tensor result_of(const c10::IValue& value) override {
    return called().result_of(value);
  }
  void deliver(const at::Tensor& result) override { called().deliver(result); }
  c10::Device device() const override { return called().device(); }
  bool fails_by_network_only() const override {
    return called().fails_by_network_only();
  }
  std::string describe() const override { return called().describe(); }

 private:
  Collective& called() const {
    ++count_;
    return counted_;
  }

  Collective& counted_;
  int64_t& count_;
};

class CountedPolicy final : public ReductionPolicy {
 public:
  CountedPolicy(ReductionPolicy& counted, int64_t& count_of_entries)
      : counted_(counted) {
    for (Collective* entry : counted.sequence()) {
      entries_.push_back(
          std::make_unique<CountedCollective>(*entry, count_of_entries));
      sequence_.push_back(entries_.back().get());
    }
  }

  int64_t count() const { return count_; }

  std::span<Collective* const> sequence() override {
    ++count_;
    return sequence_;
  }
  uint64_t fingerprint() const override { return called().fingerprint(); }
  std::string describe_sequence() const override {
    return called().describe_sequence();
  }
  bool compares_each_iteration() const override {
    return called().compares_each_iteration();
  }
  uint64_t backward_digest() const override {
    return called().backward_digest();
  }
  uint64_t proposal() const override { return called().proposal(); }
  uint64_t order_digest(bool is_end) const override {
    return called().order_digest(is_end);
  }
  uint64_t digest_to_give() const override { return called().digest_to_give(); }
  void give(std::span<const int64_t> units, int64_t wanted) override {
    called().give(units, wanted);
  }
  const HookTraits& hook_traits() const override {
    return called().hook_traits();
  }
  bool expects_gradients() const override {
    return called().expects_gradients();
  }
  void check_variables() const override { called().check_variables(); }
  Replanned replan(const CallCollective& call) override {
    return called().replan(call);
  }
  bool before_iteration() override { return called().before_iteration(); }
  void on_prepared(std::span<const at::Tensor> outputs) override {
    called().on_prepared(outputs);
  }
  bool begins_at_outputs() const override {
    return called().begins_at_outputs();
  }
  void on_begun_together(bool has_one_order) override {
    called().on_begun_together(has_one_order);
  }
  void on_backward_begins(RunningIteration& iteration,
                          bool is_shadow) override {
    called().on_backward_begins(iteration, is_shadow);
  }
  void on_local_gradient(VariableIndex variable, bool is_defined) override {
    called().on_local_gradient(variable, is_defined);
  }
  std::optional<Slot> on_gradient(VariableIndex variable,
                                  bool is_defined) override {
    return called().on_gradient(variable, is_defined);
  }
  void on_backward_ends(RunningIteration& iteration) override {
    called().on_backward_ends(iteration);
  }
  bool may_end_without_gradients() const override {
    return called().may_end_without_gradients();
  }
  bool is_learning() const override { return called().is_learning(); }
  void on_end_confirmed(ToldAlike alike) override {
    called().on_end_confirmed(alike);
  }
  void on_end_refuted() override { called().on_end_refuted(); }
  void on_iteration_over(Outcome outcome, bool is_shadow) override {
    called().on_iteration_over(outcome, is_shadow);
  }
  std::shared_ptr<void> abandon(
      std::span<Collective* const> in_flight) override {
    return called().abandon(in_flight);
  }
  std::shared_ptr<void> let_go() override { return called().let_go(); }
  std::string_view unit_word() const override { return called().unit_word(); }
  void launch_rest_beside() override { called().launch_rest_beside(); }
  std::string describe_beside() const override {
    return called().describe_beside();
  }
  std::string all_units() const override { return called().all_units(); }
  std::string name_of(std::span<const size_t> variables) const override {
    return called().name_of(variables);
  }
  std::string describe_missing(std::span<const size_t> variables,
                               Occasion occasion) const override {
    return called().describe_missing(variables, occasion);
  }
  std::string describe_late(VariableIndex variable,
                            Occasion occasion) const override {
    return called().describe_late(variable, occasion);
  }
  [[noreturn]] void refuse(VariableIndex variable,
                           Occasion occasion) const override {
    called().refuse(variable, occasion);
  }

 private:
  ReductionPolicy& called() const {
    ++count_;
    return counted_;
  }

  ReductionPolicy& counted_;
  std::vector<std::unique_ptr<Collective>> entries_;
  std::vector<Collective*> sequence_;
  mutable int64_t count_ = 0;
};

struct Calls {
  int64_t of_policy = 0;
  int64_t of_entries = 0;
};

struct CountingSink final {
  void take(VariableIndex, const at::Tensor&) { ++num_taken; }
  size_t num_taken = 0;
};

// In an iteration behind the first ones: a forward and a backward in which as
// many gradients come for each entry. `sink`: null, or takes them.
Calls calls_of_iteration(size_t num_entries, size_t gradients_per_entry,
                         CountingSink* sink = nullptr) {
  RecordingGroup recording(/*world_size=*/2);
  ScriptedPolicy scripted(
      {recording.group()},
      std::vector<ScriptedEntry>(num_entries, gradients_per_entry));
  scripted.learns = false;
  Calls calls;
  CountedPolicy policy(scripted, calls.of_entries);
  std::vector<at::Tensor> variables;
  for (size_t v = 0; v < scripted.num_variables(); ++v) {
    variables.push_back(at::ones({}).requires_grad_());
  }
  EngineOptions options = {.name = "Engine",
                           .failure_patience = std::chrono::seconds(1),
                           .one_backward_per_forward = true};
  if (sink != nullptr) {
    options.make_hooks = [sink](
                             std::span<const std::vector<at::Tensor>> replicas,
                             const EngineListener& listener) {
      return std::make_shared<GradientHooks>(replicas, listener, *sink);
    };
  }
  Engine engine({recording.group()},
                std::vector<std::vector<at::Tensor>>{variables}, policy,
                std::move(options));
  engine.connect();
  Calls before;
  for (int iteration = 0; iteration < 3; ++iteration) {
    before = {.of_policy = policy.count(), .of_entries = calls.of_entries};
    const at::Tensor loss = at::stack(variables).sum();
    engine.prepare(std::vector{loss});
    loss.backward();
  }
  EXPECT_EQ(engine.statistics().reduced, 3);
  return {.of_policy = policy.count() - before.of_policy,
          .of_entries = calls.of_entries - before.of_entries};
}

TEST(VirtualCallsTest, OneForEachGradient) {
  for (const size_t num_entries : {1, 2, 7}) {
    const Calls few = calls_of_iteration(num_entries, 10);
    const Calls many = calls_of_iteration(num_entries, 50);
    EXPECT_EQ(many.of_policy - few.of_policy, num_entries * (50 - 10));
    EXPECT_EQ(many.of_entries, few.of_entries);
  }
}

// Nor is who takes gradients, as sharding does, called by way of a table.
TEST(VirtualCallsTest, OneForEachGradientThatASinkTakes) {
  static_assert(!std::is_polymorphic_v<CountingSink>);
  CountingSink sink;
  const Calls few = calls_of_iteration(2, 10, &sink);
  const Calls many = calls_of_iteration(2, 50, &sink);
  EXPECT_EQ(sink.num_taken, 3 * 2 * (10 + 50));
  EXPECT_EQ(many.of_policy - few.of_policy, 2 * (50 - 10));
  EXPECT_EQ(many.of_entries, few.of_entries);
}

TEST(VirtualCallsTest, AllOthersForAnEntryOrAnIteration) {
  const Calls one = calls_of_iteration(1, 1);
  const Calls two = calls_of_iteration(2, 1);
  const Calls hundred = calls_of_iteration(100, 1);
  const int64_t policy_per_entry = two.of_policy - one.of_policy;
  const int64_t per_entry = two.of_entries - one.of_entries;
  EXPECT_EQ(hundred.of_policy - one.of_policy, 99 * policy_per_entry);
  EXPECT_EQ(hundred.of_entries - one.of_entries, 99 * per_entry);
  EXPECT_EQ(policy_per_entry, 1);  // its gradient
  EXPECT_LE(one.of_policy, 23);
  EXPECT_LE(per_entry, 16);
}

}  // namespace
}  // namespace brigade
