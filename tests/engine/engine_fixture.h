// An engine over a scripted policy, a model whose gradients come in any order,
// and peers that do as this rank does unless the test says otherwise.
//
//   sequence({2, 1, 0});
//   prepare();
//   backward({2, 0});
//   expect_events({"pack 1"});
//   backward({1});

#ifndef BRIGADE_TESTS_ENGINE_ENGINE_FIXTURE_H_
#define BRIGADE_TESTS_ENGINE_ENGINE_FIXTURE_H_

#include <torch/torch.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "brigade/comm/status/rank_status.h"
#include "brigade/comm/recording_group.h"
#include "brigade/engine/engine.h"
#include "brigade/tests/engine/scripted_policy.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade::testing {

class EngineFixture : public ::testing::Test {
 protected:
  using Variables = std::vector<size_t>;

  void sequence(const std::vector<ScriptedEntry>& entries,
                bool one_backward_per_forward = false) {
    engine_ = nullptr;
    policy_ = std::make_unique<ScriptedPolicy>(
        ScriptedPolicy::Groups{recording_.group()}, entries);
    variables_.clear();
    for (size_t v = 0; v < policy_->num_variables(); ++v) {
      variables_.push_back(at::ones({}).requires_grad_());
    }
    // An engine wants a variable, if only one that gets no gradient.
    if (variables_.empty()) variables_.push_back(at::ones({}).requires_grad_());
    engine_ = std::make_unique<Engine>(
        std::vector{recording_.group()},
        std::vector<std::vector<at::Tensor>>{variables_}, *policy_,
        EngineOptions{.name = "Engine",
                      .failure_patience = std::chrono::seconds(1),
                      .one_backward_per_forward = one_backward_per_forward,
                      .make_hooks = make_hooks});
    engine_->connect();
    take_statuses();
  }

  // Of the engines of sequence().
  decltype(EngineOptions::make_hooks) make_hooks = {};

  Engine& engine() { return *engine_; }
  ScriptedPolicy& policy() { return *policy_; }
  RecordingGroup& recording() { return recording_; }

  // ---- An iteration.

  // Its backward brings gradients in this order. `between(v)` is called in it
  // before the gradient of v is accumulated.
  at::Tensor output(const Variables& order,
                    const std::function<void(size_t)>& between = {}) const {
    at::Tensor sum = at::zeros({});
    for (auto v = order.rbegin(); v != order.rend(); ++v) {
      at::Tensor factor = variables_[*v] * 1;
      if (between) {
        factor.register_hook(
            [between, v = *v](const at::Tensor&) { between(v); });
      }
      sum = sum + factor;
    }
    return sum;
  }

  // A forward; without an output that tells, any backward may be its own.
  void prepare() { prepare(at::Tensor()); }
  void prepare(const at::Tensor& output) {
    std::vector<at::Tensor> outputs;
    if (output.defined()) outputs.push_back(output);
    engine_->prepare(outputs);
  }

  // One through no output that was prepared.
  void backward(const Variables& order,
                const std::function<void(size_t)>& between = {}) const {
    output(order, between).backward();
  }

  // Prepares, and goes through what it has prepared.
  void step(const Variables& order,
            const std::function<void(size_t)>& between = {}) {
    const at::Tensor loss = output(order, between);
    prepare(loss);
    loss.backward();
  }

  // ---- Peers.

  // At exchanges of this kind, rank 1 does otherwise than this rank: `change`
  // is told what it would say.
  void peer_at(StatusKind kind, std::function<void(RankStatus&)> change) {
    recording_.answer_statuses_with(
        [kind, change = std::move(change)](const RankStatus& own) {
          RankStatus peer = own;
          if (own.kind == kind) change(peer);
          return std::vector<RankStatus>{own, peer};
        });
  }

  void peer_fails_at(StatusKind kind) {
    peer_at(kind, [](RankStatus& peer) {
      peer.kind = StatusKind::kFailed;
      peer.text = status_text("a peer's error");
    });
  }

  void peers_agree() { recording_.answer_statuses_with({}); }

  // ---- What came of it.

  // Since the last call.
  void expect_events(const std::vector<std::string>& events) {
    EXPECT_THAT(policy_->events(), ::testing::ElementsAreArray(events));
  }

  // What this rank has told its peers since the last call.
  std::vector<std::string> take_statuses() {
    const std::vector<std::string> all = recording_.statuses();
    const std::vector<std::string> latest(all.begin() + num_taken_, all.end());
    num_taken_ = static_cast<int64_t>(all.size());
    return latest;
  }

  // Whether an iteration has begun and is not over: its sequence can't be
  // changed then.
  bool has_begun() {
    try {
      engine_->change_sequence("has_begun", [] { return false; });
    } catch (const c10::Error&) {
      return true;
    }
    return false;
  }

 private:
  RecordingGroup recording_{2};
  std::vector<at::Tensor> variables_;
  std::unique_ptr<ScriptedPolicy> policy_;
  std::unique_ptr<Engine> engine_;
  int64_t num_taken_ = 0;  // of the statuses
};

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_ENGINE_ENGINE_FIXTURE_H_
