// Random programs on sharded models, each compared with the same program in one
// process, whose loss is the average of all ranks' losses.
//
// A failure prints the seed and the operations so far; run one seed by
// --gtest_filter='*/17'.

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "brigade/comm/errors/peer_error.h"
#include "brigade/fsdp/fully_shard.h"
#include "brigade/fsdp/segmented_model.h"
#include "brigade/hooks/checkpoint.h"
#include "brigade/tests/fsdp/random_sharded_program.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace sharded_programs_test {

using ::testing::HasSubstr;
using testing::run_ranks;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr int64_t kSize = 4;
constexpr int kNumSeeds = 60;

at::Tensor random(at::IntArrayRef sizes, uint64_t seed, at::ScalarType dtype) {
  return torch::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed),
                      at::kDouble)
      .to(dtype);
}

// ---- The module.

struct NormImpl : torch::nn::Module {
  explicit NormImpl(at::ScalarType dtype)
      : gain(register_parameter("gain", torch::zeros({kSize}, dtype))) {}
  at::Tensor gain;
};
TORCH_MODULE(Norm);

struct InnerImpl : torch::nn::Module {
  explicit InnerImpl(at::Tensor shared, at::ScalarType dtype)
      : weight(register_parameter(
            "weight",
            shared.defined() ? shared : torch::zeros({kSize, kSize}, dtype))),
        bias(register_parameter("bias", torch::zeros({kSize}, dtype))) {}
  at::Tensor weight, bias;
};
TORCH_MODULE(Inner);

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const BlockPlan& plan)
      : weight(register_parameter("weight",
                                  torch::zeros({kSize, kSize}, plan.dtype))),
        bias(register_parameter("bias", torch::zeros({kSize}, plan.bias_dtype),
                                !plan.is_bias_frozen)),
        norm(register_module("norm", Norm(plan.dtype))),
        inner(register_module(
            "inner",
            Inner(plan.is_tied ? weight : at::Tensor(), plan.bias_dtype))) {}
  at::Tensor run(const at::Tensor& x, const Call& call) {
    const auto same = [&x](const at::Tensor& t) { return t.to(x.dtype()); };
    at::Tensor y = torch::tanh(x.matmul(same(weight)) + same(bias));
    if (call.uses_norm) y = y * same(norm->gain);
    if (call.uses_inner) {
      y = y + torch::sin(y.matmul(same(inner->weight).t())) * same(inner->bias);
    }
    return x + y;
  }
  at::Tensor weight, bias;
  Norm norm;
  Inner inner;
};
TORCH_MODULE(Block);

// Called with what a group of calls returns.
using AtGroup = std::function<void(size_t group, at::Tensor& output)>;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(const Plan& plan, uint64_t seed)
      : embed(register_parameter("embed",
                                 torch::zeros({kSize, kSize}, plan.dtype))),
        rare(register_parameter("rare", torch::zeros({kSize}, plan.dtype))),
        head(register_parameter("head",
                                torch::zeros({kSize, kSize}, plan.dtype))) {
    register_module("blocks", blocks);
    for (const BlockPlan& block : plan.blocks) blocks->push_back(Block(block));
    const torch::NoGradGuard no_grad;
    for (at::Tensor& parameter : parameters()) {
      parameter.copy_(random(parameter.sizes(), seed++, at::kDouble).mul_(0.5));
    }
  }
  // Of two outputs.
  std::pair<at::Tensor, at::Tensor> run(const Path& path,
                                        const at::Tensor& input,
                                        const AtGroup& at_group) {
    at::Tensor x = input.matmul(embed);
    if (at_group) at_group(0, x);
    at::Tensor view;
    if (path.keeps_view) view = block(0)->weight.t();
    const at::Tensor middle = x * 2;
    for (const CallGroup& group : path.groups) {
      const auto call = [this, calls = group.calls](at::Tensor y) {
        for (const Call& c : calls) y = block(c.block)->run(y, c);
        return y;
      };
      x = group.is_checkpointed ? checkpoint(call, x) : call(x);
      if (at_group) at_group(1, x);
    }
    if (path.uses_rare) x = x + rare;
    if (view.defined()) x = x + x.matmul(view.to(x.dtype()));
    x = x.matmul(head);
    if (at_group) at_group(2, x);
    return {x, middle};
  }
  Block block(size_t i) {
    return Block(std::dynamic_pointer_cast<BlockImpl>(blocks->ptr(i)));
  }
  torch::nn::ModuleList blocks;
  at::Tensor embed, rare, head;
};
TORCH_MODULE(Net);

// Without repetition of tied ones.
std::vector<at::Tensor> parameters_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& parameter : module.parameters()) {
    if (std::ranges::none_of(all, [&](const at::Tensor& other) {
          return other.is_same(parameter);
        })) {
      all.push_back(parameter);
    }
  }
  return all;
}

// ---- One rank.

void run_on(bool other_thread, const std::function<void()>& function) {
  if (!other_thread) return function();
  std::exception_ptr error;
  std::thread([&] {
    try {
      function();
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
}

class Runner {
 public:
  Runner(const Plan& plan, const Group& group)
      : plan_(plan),
        rank_(group->getRank()),
        plain_(plan, plan.seed),
        net_(plan, plan.seed + static_cast<uint64_t>(rank_)) {
    if (plan.is_optimizer_first) optimizer_ = make_optimizer(*net_);
    UnitSelection selection = {.is_unit = [&plan](const UnitCandidate& c) {
      for (size_t i = 0; i < plan.blocks.size(); ++i) {
        const std::string name = "blocks." + std::to_string(i);
        if (c.name == name) return plan.blocks[i].is_unit;
        if (c.name == name + ".inner") return plan.blocks[i].is_inner_unit;
      }
      return false;
    }};
    if (plan.has_joint_norms) {
      selection.joint_unit_of =
          [](const UnitCandidate& c) -> std::optional<std::string> {
        if (c.name.ends_with(".norm")) return "norms";
        return std::nullopt;
      };
    }
    model_ = fully_shard(*net_, group, plan.options, selection);
    model_->set_max_reducing(plan.max_reducing);
    if (!plan.is_optimizer_first) optimizer_ = make_optimizer(*net_);
    plain_optimizer_ = make_optimizer(*plain_);
    note_synchronized();
  }

  void run(const Operation& op) {
    switch (op.kind) {
      case Kind::kForward:
        return forward(op);
      case Kind::kBackward:
        return backward(op);
      case Kind::kInputGradient:
        return input_gradient(op);
      case Kind::kDropForwards:
        return open_.clear();
      case Kind::kEvaluate:
        return evaluate(op);
      case Kind::kZeroGrad:
        optimizer_->zero_grad(op.flag);
        plain_optimizer_->zero_grad(op.flag);
        return note_synchronized();
      case Kind::kOptimizerStep:
        optimizer_->step();
        plain_optimizer_->step();
        return compare(/*of_gradients=*/false);
      case Kind::kClip:
        return clip();
      case Kind::kSynchronize: {
        synchronizes_ = op.flag;
        return model_->set_synchronizes(op.flag);
      }
      case Kind::kReduce:
        model_->reduce();
        note_synchronized();
        return compare(/*of_gradients=*/true);
      case Kind::kUnevenStep:
        return uneven_step(op);
      case Kind::kUnshard:
        return unshard(op);
      case Kind::kReshard:
        return model_->reshard(unsharded_);
      case Kind::kFailForward:
        return fail_forward(op);
      case Kind::kFailBackward:
        return fail_backward(op);
      case Kind::kFreeze: {
        const auto name = name_of_parameter(op.index);
        plain_->named_parameters()[name].set_requires_grad(op.flag);
        net_->named_parameters()[name].set_requires_grad(op.flag);
        return;
      }
      case Kind::kChangeSettings:
        return change_settings(op);
    }
  }

 private:
  struct Open {
    at::Tensor input;
    at::Tensor losses[2];
    at::Tensor plain_input;  // of this rank
    at::Tensor plain_losses[2];
    bool has_groups = true;
  };

  std::unique_ptr<torch::optim::Optimizer> make_optimizer(
      const torch::nn::Module& module) const {
    if (plan_.is_adamw) {  // a large eps: zeros of rounding stay small
      return std::make_unique<torch::optim::AdamW>(
          parameters_of(module), torch::optim::AdamWOptions(0.02).eps(1e-2));
    }
    return std::make_unique<torch::optim::SGD>(
        parameters_of(module), torch::optim::SGDOptions(0.05).momentum(0.9));
  }

  std::string name_of_parameter(size_t index) {
    std::vector<std::string> names = plain_->named_parameters().keys();
    // Something is always trained.
    std::erase_if(names, [](const std::string& name) {
      return name == "embed" || name == "head";
    });
    return names[index % names.size()];
  }

  at::Tensor data_of(int rank, uint64_t seed) const {
    return random({3, kSize},
                  plan_.seed * 100000 + seed * 10 + static_cast<uint64_t>(rank),
                  plan_.dtype);
  }

  static void losses_of(const std::pair<at::Tensor, at::Tensor>& outputs,
                        at::Tensor (&losses)[2]) {
    // Bounded, so that rounding is not amplified.
    losses[0] = outputs.first.tanh().square().mean();
    losses[1] = (outputs.second.sin() * outputs.first.tanh()).mean();
  }

  const Path& path_of(const Operation& op, int rank) const {
    return op.paths[static_cast<size_t>(rank)];
  }

  // Sums of plain losses of the ranks that have data, over the world size.
  void plain_forward(const Operation& op, Open& open, uint64_t seed) {
    for (int rank = 0; rank < plan_.world_size; ++rank) {
      if (!op.has_data.empty() && !op.has_data[static_cast<size_t>(rank)]) {
        continue;
      }
      at::Tensor x = data_of(rank, seed).set_requires_grad(true);
      if (rank == rank_) open.plain_input = x;
      at::Tensor losses[2];
      losses_of(plain_->run(path_of(op, rank), x, nullptr), losses);
      for (int i = 0; i < 2; ++i) {
        const at::Tensor part = losses[i] / plan_.world_size;
        open.plain_losses[i] =
            open.plain_losses[i].defined() ? open.plain_losses[i] + part : part;
      }
    }
  }

  void sharded_forward(const Operation& op, Open& open, uint64_t seed,
                       const AtGroup& at_group = nullptr) {
    open.input = data_of(rank_, seed).set_requires_grad(true);
    run_on(op.is_on_thread, [&] {
      losses_of(model_->forward([&] {
        return net_->run(path_of(op, rank_), open.input, at_group);
      }),
                open.losses);
    });
  }

  void forward(const Operation& op) {
    Open open;
    plain_forward(op, open, op.seed);
    // Not on what the forward returns: that is before its backward.
    const AtGroup at_group = [this](size_t group, at::Tensor& output) {
      if (group == 2 || !output.requires_grad()) return;
      output.register_hook([this, group](const at::Tensor&) -> at::Tensor {
        if (fails_at_ == group) throw std::runtime_error("bang in backward");
        return {};
      });
    };
    sharded_forward(op, open, op.seed, at_group);
    open.has_groups = !path_of(op, rank_).groups.empty();
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(open.losses[i].requires_grad(), true);
    }
    open_.push_back(std::move(open));
  }

  at::Tensor loss_of(const Operation& op, bool of_plain) {
    at::Tensor loss;
    for (const size_t forward : op.forwards) {
      const auto& losses =
          of_plain ? open_[forward].plain_losses : open_[forward].losses;
      for (size_t i = 0; i < 2; ++i) {
        if (op.loss != 2 && op.loss != i) continue;
        loss = loss.defined() ? loss + losses[i] : losses[i];
      }
    }
    return loss;
  }

  void backward(const Operation& op) {
    loss_of(op, /*of_plain=*/true).backward({}, op.flag);
    run_on(op.is_on_thread,
           [&] { loss_of(op, /*of_plain=*/false).backward({}, op.flag); });
    if (synchronizes_) {
      note_synchronized();
      compare(/*of_gradients=*/true);
    }
  }

  void input_gradient(const Operation& op) {
    Open& open = open_[op.forwards[0]];
    const auto expected = torch::autograd::grad(
        {open.plain_losses[1]}, {open.plain_input}, {}, /*retain_graph=*/true);
    const auto found = torch::autograd::grad({open.losses[1]}, {open.input}, {},
                                             /*retain_graph=*/true);
    expect_close(found[0], expected[0] * plan_.world_size, "input's gradient");
    compare(/*of_gradients=*/true);
  }

  void evaluate(const Operation& op) {
    const torch::NoGradGuard no_grad;
    const at::Tensor x = data_of(rank_, op.seed);
    const Path& path = path_of(op, rank_);
    const auto found =
        model_->forward([&] { return net_->run(path, x, nullptr); });
    expect_close(found.first, plain_->run(path, x, nullptr).first, "output");
  }

  void clip() {
    bool has_any = false;
    for (const at::Tensor& p : parameters_of(*plain_)) {
      has_any = has_any || p.grad().defined();
    }
    if (!has_any) return;
    const double expected =
        torch::nn::utils::clip_grad_norm_(parameters_of(*plain_), 0.05);
    EXPECT_NEAR(model_->clip_grad_norm(0.05), expected,
                tolerance() * (1 + expected));
    note_synchronized();
    compare(/*of_gradients=*/true);
  }

  void uneven_step(const Operation& op) {
    int64_t count = 0;
    for (const bool has : op.has_data) count += has ? 1 : 0;
    const bool has_data = op.has_data[static_cast<size_t>(rank_)];
    EXPECT_EQ(model_->num_ranks_with(has_data), count);
    if (count == 0) return;
    at::Tensor plain_loss = torch::zeros({}, plan_.dtype);
    at::Tensor loss = torch::zeros({}, plan_.dtype);
    for (uint64_t i = 0; i < (op.flag ? 2u : 1u); ++i) {
      Open open;
      plain_forward(op, open, op.seed + 500 * i);
      plain_loss = plain_loss + open.plain_losses[0];
      if (!has_data) continue;
      sharded_forward(op, open, op.seed + 500 * i);
      loss = loss + open.losses[0];
    }
    plain_loss.backward();
    if (has_data) {
      loss.backward();
    } else {
      model_->step_without_data();
    }
    note_synchronized();
    compare(/*of_gradients=*/true);
  }

  void unshard(const Operation& op) {
    unsharded_.clear();
    for (size_t i = 0; i < model_->unit_names().size(); ++i) {
      if ((op.index >> i) % 2 == 0) unsharded_.push_back(i);
    }
    model_->unshard(unsharded_, op.flag);
    const torch::NoGradGuard no_grad;
    const auto plain = plain_->named_parameters();
    for (const size_t unit : unsharded_) {
      for (const auto& item : net_->named_parameters()) {
        const auto& own = segments().units()[unit].parameters;
        if (std::ranges::none_of(own, [&](const at::Tensor& p) {
              return p.is_same(item.value());
            })) {
          continue;
        }
        expect_close(item.value().clone(), plain[item.key()], item.key());
        if (op.flag) {
          item.value().mul_(0.9);
          plain[item.key()].mul_(0.9);
        }
      }
    }
  }

  void expect_error(const Operation& op, const std::string& words,
                    const std::function<void()>& function) {
    try {
      function();
      ADD_FAILURE() << "did not fail";
    } catch (const std::exception& error) {
      EXPECT_THAT(error.what(), HasSubstr(words));
      EXPECT_EQ(dynamic_cast<const PeerError*>(&error) != nullptr,
                rank_ != op.rank)
          << error.what();
    }
    EXPECT_TRUE(model_->can_continue());
    // What was accumulated without synchronisation is dropped.
    const auto parameters = parameters_of(*plain_);
    for (size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].mutable_grad() =
          synchronized_[i].defined() ? synchronized_[i].clone() : at::Tensor();
    }
    open_.clear();
    compare(/*of_gradients=*/true);
    compare(/*of_gradients=*/false);
  }

  void fail_forward(const Operation& op) {
    expect_error(op, "bang in forward", [&] {
      Open open;
      sharded_forward(op, open, op.seed, [&](size_t group, at::Tensor&) {
        if (rank_ == op.rank && group == 2 * (op.index % 2)) {
          throw std::runtime_error("bang in forward");
        }
      });
    });
  }

  void fail_backward(const Operation& op) {
    if (rank_ == op.rank) {
      fails_at_ = open_[op.forwards[0]].has_groups ? op.index % 2 : 0;
    }
    // Autograd does not tell what its nodes have thrown.
    expect_error(op,
                 rank_ == op.rank ? "bang in backward" : "backward has thrown",
                 [&] { loss_of(op, /*of_plain=*/false).backward(); });
    fails_at_ = std::nullopt;
  }

  void change_settings(const Operation& op) {
    const size_t unit = op.index % model_->unit_names().size();
    model_->settings(unit).reshards_after_forward = op.flag;
    model_->settings(unit).reshards_after_backward = op.index % 3 != 0;
    model_->set_max_reducing(1 + op.index % 4);
    model_->settings(unit).forward_prefetch_depth.reset();
    if (op.index % 5 == 0) model_->settings(unit).forward_prefetch_depth = 2;
  }

  void note_synchronized() {
    synchronized_.clear();
    for (const at::Tensor& p : parameters_of(*plain_)) {
      synchronized_.push_back(p.grad().defined() ? p.grad().clone()
                                                 : at::Tensor());
    }
  }

  double tolerance() const { return plan_.is_exact ? 1e-9 : 1e-4; }

  void expect_close(const at::Tensor& found, const at::Tensor& expected,
                    const std::string& what) {
    EXPECT_TRUE(torch::allclose(found, expected.to(found.dtype()), tolerance(),
                                tolerance()))
        << what << " on rank " << rank_ << "\n"
        << found << "\n"
        << expected;
  }

  void compare(bool of_gradients) {
    const auto plain = plain_->named_parameters();
    for (const auto& item : net_->named_parameters()) {
      const at::Tensor expected =
          of_gradients ? plain[item.key()].grad() : plain[item.key()];
      const at::Tensor found =
          of_gradients ? item.value().grad() : item.value();
      ASSERT_EQ(found.defined(), expected.defined())
          << item.key() << "'s gradient on rank " << rank_;
      if (!found.defined()) continue;
      expect_close(gather_whole(found), expected,
                   item.key() + (of_gradients ? "'s gradient" : ""));
    }
  }

  const Plan& plan_;
  const int rank_;
  Net plain_, net_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_, plain_optimizer_;
  SegmentedModel& segments() { return dynamic_cast<SegmentedModel&>(*model_); }

  std::unique_ptr<ShardedModel> model_;
  bool synchronizes_ = true;
  std::vector<Open> open_;
  std::vector<size_t> unsharded_;
  std::vector<at::Tensor> synchronized_;  // plain gradients, in order
  std::optional<size_t> fails_at_;        // group of calls, in backward
};

class ShardedProgramsTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(, ShardedProgramsTest, ::testing::Range(0, kNumSeeds));

TEST_P(ShardedProgramsTest, TrainsAsOneProcess) {
  const Plan plan = make_plan(static_cast<uint64_t>(GetParam()));
  run_ranks(
      plan.world_size,
      [&](const Group& group) {
        const ::testing::ScopedTrace trace_of_plan(__FILE__, __LINE__,
                                                   describe(plan));
        Runner runner(plan, group);
        std::string done;
        for (const Operation& op : plan.operations) {
          done += "\n  " + describe(op);
          const ::testing::ScopedTrace trace(__FILE__, __LINE__, done);
          try {
            runner.run(op);
          } catch (const std::exception& error) {
            ADD_FAILURE() << "rank " << group->getRank() << ": "
                          << std::string(error.what()).substr(0, 1000);
            throw;
          }
          // An operation that has gone wrong is shown alone.
          if (::testing::Test::HasFailure()) return;
        }
      },
      std::chrono::seconds(4));
}

}  // namespace sharded_programs_test
}  // namespace brigade
