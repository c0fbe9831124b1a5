// Scenario matrix of sharded training: faults x situations.
//
// Each cell trains some steps, one of which fails on one rank. Checks that the
// failed rank gets its own exception and the others an error with its rank and
// text, that no gradient changes, and that later steps have the results of one
// process, or throw if the failure closes the group. If a process dies, checks
// that the survivors' error names it and that their parameters and gradients do
// not change.

#include <ATen/CPUGeneratorImpl.h>
#include <signal.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <latch>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/process_group.h"
#include "brigade/fsdp/fully_shard.h"
#include "brigade/fsdp/sharded_tensor.h"
#include "brigade/hooks/activation_checkpoint.h"
#include "brigade/tests/support/local_ranks.h"
#include "brigade/tests/support/process_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace sharded_scenarios_test {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using testing::ProcessRanks;
using testing::RankContext;
using testing::RankFunction;
using testing::run_ranks;
using ::testing::StartsWith;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr int kBlocks = 4;
constexpr int64_t kSize = 5;

enum class Fault {
  kForward,
  kBackward,
  kHook,
  kHookAfterLaunch,
  kHookFuture,
  kHookAlways,  // also on zeros
  kOutOfMemory,
  kRecomputation,
  kProcess,
  kNone,
};
constexpr const char* kFaults[] = {
    "Forward",         "Backward",      "Hook",
    "HookAfterLaunch", "HookFuture",    "HookAlways",
    "OutOfMemory",     "Recomputation", "Process"};

enum class Situation {
  kLearning,
  kCursor,
  kCheckpointEach,   // activation checkpointing of each block
  kCheckpointAll,    // one activation checkpoint around four blocks
  kNoSync,           // fails in the backward that accumulates
  kAfterNoSync,      // fails in the backward that reduces
  kJoin,             // the last rank has no data
  kJoinWithoutData,  // fails on the rank without data
  kMeshes,           // two experts on 4 ranks
  kReplicas,         // 4 ranks, num_shards = 2
  kChainedModels,    // one loss through two models
  kTwoModels,        // a second model is trained in turn
  kEvaluation,       // a forward without gradients before each step
  kInEvaluation,     // fails in the evaluation
  kUserCollective,   // in each forward, and before each backward
  // The program's, between two units of each backward.
  kCollectiveInBackward,
};
constexpr const char* kSituations[] = {
    "Learning",   "Cursor",       "CheckpointEach", "CheckpointAll",
    "NoSync",     "AfterNoSync",  "Join",           "JoinWithoutData",
    "Meshes",     "Replicas",     "ChainedModels",  "TwoModels",
    "Evaluation", "InEvaluation", "UserCollective", "CollectiveInBackward"};

bool is_checkpointed(Situation s) {
  return s == Situation::kCheckpointEach || s == Situation::kCheckpointAll;
}

bool exists(Fault fault, Situation situation) {
  switch (fault) {
    case Fault::kRecomputation:
      return is_checkpointed(situation);
    case Fault::kHook:
    case Fault::kHookAfterLaunch:
    case Fault::kHookFuture:
    case Fault::kHookAlways:  // hooks run in reductions only
      return situation != Situation::kNoSync &&
             situation != Situation::kInEvaluation;
    case Fault::kBackward:
      return situation != Situation::kJoinWithoutData &&
             situation != Situation::kInEvaluation;
    case Fault::kForward:
    case Fault::kOutOfMemory:  // a rank without data runs no user code
      return situation != Situation::kJoinWithoutData;
    default:
      return true;
  }
}

int world_size_of(Situation situation) {
  switch (situation) {
    case Situation::kMeshes:
    case Situation::kReplicas:
      return 4;
    case Situation::kJoin:
    case Situation::kJoinWithoutData:
      return 3;
    default:
      return 2;
  }
}

int failing_rank(Situation situation) {
  return situation == Situation::kJoin ? 1 : world_size_of(situation) - 1;
}

// Autograd does not pass on the exceptions of its nodes.
const char* error_text_on_peers(Fault fault) {
  return fault == Fault::kBackward || fault == Fault::kRecomputation
             ? "its backward raised an exception"
             : "bang";
}

at::Tensor random(at::IntArrayRef sizes, uint64_t seed) {
  return torch::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed));
}

struct BlockImpl : torch::nn::Module {
  BlockImpl()
      : lin(register_module("lin", torch::nn::Linear(kSize, kSize))),
        gain(register_parameter("gain", torch::ones({kSize}))) {}
  at::Tensor forward(const at::Tensor& x) {
    return x + torch::tanh(lin(x)) * gain;
  }
  torch::nn::Linear lin;
  at::Tensor gain;
};
TORCH_MODULE(Block);

// Called after each block of a forward.
using AtBlock = std::function<void(int block, at::Tensor& output)>;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(uint64_t seed)
      : expert(register_module("expert", torch::nn::Linear(kSize, kSize))),
        head(register_module("head", torch::nn::Linear(kSize, 3))) {
    register_module("blocks", blocks);
    for (int i = 0; i < kBlocks; ++i) blocks->push_back(Block());
    const torch::NoGradGuard no_grad;  // ranks are threads with one generator
    for (at::Tensor& parameter : parameters()) {
      parameter.copy_(random(parameter.sizes(), seed++).mul_(0.3));
    }
  }
  at::Tensor block(int i, const at::Tensor& x, const AtBlock& at_block) {
    at::Tensor y = blocks[static_cast<size_t>(i)]->as<Block>()->forward(x);
    if (at_block) at_block(i, y);
    return y;
  }
  at::Tensor forward(const at::Tensor& input, Situation situation,
                     const AtBlock& at_block) {
    at::Tensor x = input + torch::relu(expert(input));
    if (situation == Situation::kCheckpointEach) {
      for (int i = 0; i < kBlocks; ++i) {
        x = checkpoint(
            [this, i, at_block](const at::Tensor& in) {
              return block(i, in, at_block);
            },
            x);
      }
    } else {
      const auto all = [this, at_block](at::Tensor y) {
        for (int i = 0; i < kBlocks; ++i) y = block(i, y, at_block);
        return y;
      };
      if (situation == Situation::kCheckpointAll) {
        x = checkpoint(all, x);
      } else {
        x = all(x);
      }
    }
    return head(x);
  }
  void take_expert_of(const NetImpl& other) {
    const torch::NoGradGuard no_grad;
    expert->weight.copy_(other.expert->weight);
    expert->bias.copy_(other.expert->bias);
  }
  torch::nn::ModuleList blocks;
  torch::nn::Linear expert, head;
};
TORCH_MODULE(Net);

// Reduces as without a hook, and throws as `fault` says.
class FaultyHook : public ReductionHook {
 public:
  FuturePtr reduce(const Reduction& reduction) override {
    ++calls_;
    if (fault == Fault::kHookAlways) throw std::runtime_error(kText);
    if (fault == Fault::kHook && calls_ % 3 == 2) {
      fault = Fault::kNone;
      throw std::runtime_error(kText);
    }
    FuturePtr sum = reduction.sum(reduction.whole, reduction.shard);
    if (fault == Fault::kHookAfterLaunch && calls_ % 3 == 2) {
      fault = Fault::kNone;
      throw std::runtime_error(kText);
    }
    if (fault == Fault::kHookFuture && calls_ % 3 == 2) {
      fault = Fault::kNone;
      return sum->then(
          [](c10::ivalue::Future&) -> at::IValue {
            throw std::runtime_error(kText);
          },
          sum->elementType());
    }
    return sum;
  }
  std::string hook_name() const override { return "faulty"; }

  static constexpr const char* kText = "bang in a hook";
  Fault fault = Fault::kNone;

 private:
  int calls_ = 0;
};

at::Tensor data_of(int rank, int step, int micro) {
  return random({4, kSize},
                static_cast<uint64_t>(1000 * step + 100 * micro + rank));
}

// One rank's sharded training, and the same training in one process.
class Program {
 public:
  Program(const Group& group, Situation situation)
      : situation_(situation),
        group_(group),
        rank_(group->getRank()),
        size_(group->getSize()),
        net_(seed_of(rank_)) {
    const bool has_meshes = situation == Situation::kMeshes;
    plain_.push_back(Net(seed_of(0)));
    if (has_meshes) {  // differs in the expert only
      plain_.push_back(Net(seed_of(0)));
      plain_[1]->take_expert_of(*Net(seed_of(1)));
    }
    FullyShardOptions options = {.comm_hook = hook_};
    if (situation == Situation::kReplicas) options.num_shards = 2;
    UnitSelection selection = {.is_unit = [](const UnitCandidate& candidate) {
      return candidate.name.starts_with("blocks.")
                 ? candidate.name.find('.', 7) == std::string::npos
                 : candidate.name == "expert" || candidate.name == "head";
    }};
    if (has_meshes) {
      selection.mesh_of =
          [this](const std::string& unit) -> std::optional<UnitMesh> {
        if (unit != "expert") return std::nullopt;
        return UnitMesh{.ranks = {rank_ % 2, rank_ % 2 + 2}};
      };
    }
    model_ = fully_shard(*net_, group, options, selection);
    if (has_meshes) {
      for (size_t i = 0; i < model_->unit_names().size(); ++i) {
        if (model_->unit_names()[i] == "expert") {
          model_->settings(i).gradient_divisor = size_;
        }
      }
    }
    optimizer_.emplace(net_->parameters(), 0.05);
    for (Net& plain : plain_) {
      plain_optimizers_.emplace_back(plain->parameters(), 0.05);
    }
    if (situation == Situation::kTwoModels ||
        situation == Situation::kChainedModels) {
      second_ = Net(77);
      plain_second_ = Net(77);
      second_model_ = fully_shard(*second_, group, {}, selection);
      second_optimizer_.emplace(second_->parameters(), 0.05);
      plain_second_optimizer_.emplace(plain_second_->parameters(), 0.05);
    }
  }

  // Runs the forwards and backwards of one step, with `fault` on this rank.
  void run(int step, Fault fault) {
    if (situation_ == Situation::kEvaluation) evaluate(step);
    if (situation_ == Situation::kInEvaluation) {
      const torch::NoGradGuard no_grad;
      run_once(step, 3, fault);
      fault = Fault::kNone;
    }
    if (situation_ == Situation::kTwoModels) {
      second_model_
          ->forward([&] {
            return loss_of(second_, data_of(rank_, step, 5), nullptr);
          })
          .backward();
    }
    if (situation_ == Situation::kNoSync ||
        situation_ == Situation::kAfterNoSync) {
      const bool fails_first = situation_ == Situation::kNoSync;
      model_->set_requires_gradient_sync(false);
      run_once(step, 0, fails_first ? fault : Fault::kNone);
      model_->set_requires_gradient_sync(true);
      run_once(step, 1, fails_first ? Fault::kNone : fault);
      return;
    }
    if (situation_ == Situation::kJoin ||
        situation_ == Situation::kJoinWithoutData) {
      const bool has_data = rank_ != size_ - 1;
      EXPECT_EQ(model_->num_ranks_with(has_data), size_ - 1);
      if (!has_data) {
        hook_->fault = fault;
        if (fault == Fault::kProcess) raise(SIGKILL);
        model_->step_without_data();
        return;
      }
    }
    run_once(step, 0, fault);
  }

  // Trains one step without faults, and compares it with one process.
  void train(int step) {
    zero_grad();
    run(step, Fault::kNone);
    for (size_t i = 0; i < plain_.size(); ++i) plain_[i]->zero_grad();
    if (plain_second_) plain_second_->zero_grad();
    at::Tensor loss = torch::zeros({});
    const bool is_joined = situation_ == Situation::kJoin ||
                           situation_ == Situation::kJoinWithoutData;
    for (int rank = 0; rank < (is_joined ? size_ - 1 : size_); ++rank) {
      for (int micro = 0; micro < num_micros(); ++micro) {
        at::Tensor x = data_of(rank, step, micro);
        if (situation_ == Situation::kUserCollective) x = x * size_;
        Net& plain = plain_of(rank);
        loss = loss + (situation_ == Situation::kChainedModels
                           ? chained_loss(plain, plain_second_, x, nullptr)
                           : loss_of(plain, x, nullptr));
      }
      if (situation_ == Situation::kTwoModels) {
        loss = loss + loss_of(plain_second_, data_of(rank, step, 5), nullptr);
      }
    }
    (loss / size_).backward();
    if (plain_.size() == 2) share_gradients();
    compare(*net_, *plain_of(rank_));
    if (second_) compare(*second_, *plain_second_);
    optimizer_->step();
    for (auto& optimizer : plain_optimizers_) optimizer.step();
    if (second_) {
      second_optimizer_->step();
      plain_second_optimizer_->step();
    }
  }

  void zero_grad() {
    net_->zero_grad();
    if (second_) second_->zero_grad();
  }

  void evaluate(int step) {
    const torch::NoGradGuard no_grad;
    const at::Tensor x = data_of(rank_, step, 3);
    const at::Tensor found =
        model_->forward([&] { return net_(x, situation_, nullptr); });
    EXPECT_TRUE(torch::allclose(found, plain_of(rank_)(x, situation_, nullptr),
                                1e-4, 1e-5));
  }

  bool can_continue() const {
    return model_->can_continue() &&
           (!second_model_ || second_model_->can_continue());
  }

  // Returns this rank's shards of parameters or of gradients, if any.
  std::vector<at::Tensor> shards(bool of_gradients) const {
    std::vector<at::Tensor> all;
    for (const Net& net : {net_, second_}) {
      if (!net) continue;
      for (const at::Tensor& parameter : net->parameters()) {
        const at::Tensor of = of_gradients ? parameter.grad() : parameter;
        all.push_back(of.defined() ? shard_of(of)->local.clone()
                                   : at::Tensor());
      }
    }
    return all;
  }

 private:
  // Ranks start with different parameters; fully_shard() broadcasts the
  // first's.
  static uint64_t seed_of(int rank) {
    return 7 + 100 * static_cast<uint64_t>(rank);
  }

  Net& plain_of(int rank) {
    return plain_[static_cast<size_t>(rank) % plain_.size()];
  }

  int num_micros() const {
    return situation_ == Situation::kNoSync ||
                   situation_ == Situation::kAfterNoSync
               ? 2
               : 1;
  }

  at::Tensor loss_of(Net& net, const at::Tensor& x, const AtBlock& at_block) {
    return net(x, situation_, at_block).square().mean();
  }

  at::Tensor chained_loss(Net& first, Net& second, const at::Tensor& x,
                          const AtBlock& at_block) {
    const at::Tensor middle = first(x, situation_, at_block);
    return second(torch::cat({middle, middle.slice(1, 0, kSize - 3)}, 1),
                  situation_, nullptr)
        .square()
        .mean();
  }

  void run_once(int step, int micro, Fault fault) {
    int forwards_of_block_1 = 0;
    const bool is_twice = is_checkpointed(situation_);
    const AtBlock at_block = [&, fault](int block, at::Tensor& output) {
      if (situation_ == Situation::kCollectiveInBackward) {
        output.register_hook([group = group_](const at::Tensor& gradient) {
          std::vector<at::Tensor> ones = {torch::ones({})};
          group->allreduce(ones)->wait();
          return gradient * ones[0] / group->getSize();
        });
      }
      if (block != 1) return;
      ++forwards_of_block_1;
      const bool is_first = forwards_of_block_1 == 1;
      if (fault == Fault::kForward && is_first) {
        throw std::runtime_error("bang in forward");
      }
      if (fault == Fault::kRecomputation && !is_first) {
        throw std::runtime_error("bang in recomputation");
      }
      if (fault == Fault::kOutOfMemory && is_first) {
        TORCH_CHECK_WITH(OutOfMemoryError, false, "bang: out of memory");
      }
      if (fault == Fault::kProcess && is_first == !is_twice) {
        if (situation_ != Situation::kCollectiveInBackward) raise(SIGKILL);
        output.register_hook([](const at::Tensor&) { raise(SIGKILL); });
      }
      if (fault == Fault::kBackward && output.requires_grad()) {
        output.register_hook([](const at::Tensor&) -> at::Tensor {
          throw std::runtime_error("bang in backward");
        });
      }
    };
    hook_->fault = fault;
    at::Tensor x = data_of(rank_, step, micro);
    const auto forward = [&]() -> at::Tensor {
      if (situation_ != Situation::kUserCollective) {
        return loss_of(net_, x, at_block);
      }
      std::vector<at::Tensor> ones = {torch::ones({})};
      group_->allreduce(ones)->wait();
      return loss_of(net_, x * ones[0], at_block);
    };
    at::Tensor loss;
    if (situation_ == Situation::kChainedModels) {
      const at::Tensor middle =
          model_->forward([&] { return net_(x, situation_, at_block); });
      const at::Tensor next =
          torch::cat({middle, middle.slice(1, 0, kSize - 3)}, 1);
      loss = second_model_->forward(
          [&] { return second_(next, situation_, nullptr); });
      loss = loss.square().mean();
    } else {
      loss = model_->forward(forward);
    }
    if (situation_ == Situation::kUserCollective) {
      std::vector<at::Tensor> sum = {loss.detach().clone()};
      group_->allreduce(sum)->wait();
    }
    if (loss.requires_grad()) loss.backward();
  }

  void share_gradients() {
    // All parameters but the experts' are replicated.
    const auto other = plain_[1]->named_parameters();
    for (auto& item : plain_[0]->named_parameters()) {
      if (item.key().starts_with("expert")) continue;
      const at::Tensor sum = item.value().grad() + other[item.key()].grad();
      item.value().mutable_grad() = sum;
      other[item.key()].mutable_grad() = sum.clone();
    }
  }

  void compare(const torch::nn::Module& found,
               const torch::nn::Module& expected) {
    const auto parameters = expected.named_parameters();
    for (const auto& item : found.named_parameters()) {
      ASSERT_TRUE(item.value().grad().defined()) << item.key();
      const at::Tensor whole = gather_whole(item.value().grad());
      EXPECT_TRUE(
          torch::allclose(whole, parameters[item.key()].grad(), 1e-4, 1e-6))
          << item.key() << " on rank " << rank_ << "\n"
          << whole << "\n"
          << parameters[item.key()].grad();
    }
  }

  const Situation situation_;
  const Group group_;
  const int rank_;
  const int size_;
  const std::shared_ptr<FaultyHook> hook_ = std::make_shared<FaultyHook>();
  Net net_;
  Net second_ = nullptr;
  std::vector<Net> plain_;
  Net plain_second_ = nullptr;
  std::unique_ptr<ShardedModel> model_;
  std::unique_ptr<ShardedModel> second_model_;
  std::optional<torch::optim::SGD> optimizer_, second_optimizer_,
      plain_second_optimizer_;
  std::vector<torch::optim::SGD> plain_optimizers_;
};

bool are_same(const std::vector<at::Tensor>& a,
              const std::vector<at::Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].defined() != b[i].defined()) return false;
    if (a[i].defined() && !at::equal(a[i], b[i])) return false;
  }
  return a.size() == b.size();
}

int failing_step(Situation situation) {
  return situation == Situation::kLearning ? 0 : 3;
}

class ScenarioTest
    : public ::testing::TestWithParam<std::tuple<Fault, Situation>> {};

enum class Outcome { kTrainsOn, kClosed, kLost };

Outcome outcome_of(Fault fault, Situation situation) {
  if (fault == Fault::kProcess) return Outcome::kLost;
  // The hook throws again when the failed rank sends zeros.
  if (fault == Fault::kHookAlways) return Outcome::kClosed;
  // The failed rank does not join the program's next collective.
  const bool is_in_backward =
      fault != Fault::kForward && fault != Fault::kOutOfMemory;
  return situation == Situation::kCollectiveInBackward && is_in_backward
             ? Outcome::kClosed
             : Outcome::kTrainsOn;
}

std::vector<std::tuple<Fault, Situation>> cells(Outcome outcome) {
  std::vector<std::tuple<Fault, Situation>> all;
  for (size_t i = 0; i < std::size(kFaults); ++i) {
    for (size_t j = 0; j < std::size(kSituations); ++j) {
      const auto fault = static_cast<Fault>(i);
      const auto situation = static_cast<Situation>(j);
      if (exists(fault, situation) && outcome_of(fault, situation) == outcome) {
        all.emplace_back(fault, situation);
      }
    }
  }
  return all;
}

std::string name_of_cell(
    const ::testing::TestParamInfo<std::tuple<Fault, Situation>>& info) {
  const auto [fault, situation] = info.param;
  return absl::StrCat(kFaults[static_cast<size_t>(fault)], "In",
                      kSituations[static_cast<size_t>(situation)]);
}

// Runs a step that fails on all ranks, `fault` on one of them.
void expect_failure(Program& program, int step, const Group& group, Fault fault,
                    Situation situation) {
  const int failing = failing_rank(situation);
  const bool is_failing = group->getRank() == failing;
  const bool trains_on = outcome_of(fault, situation) == Outcome::kTrainsOn;
  const auto gradients = program.shards(/*of_gradients=*/true);
  const auto parameters = program.shards(/*of_gradients=*/false);
  try {
    program.run(step, is_failing ? fault : Fault::kNone);
    ADD_FAILURE() << "rank " << group->getRank() << " did not fail";
  } catch (const PeerError& error) {
    EXPECT_FALSE(is_failing) << error.what();
    if (trains_on) {
      EXPECT_THAT(error.what(), HasSubstr("rank " + std::to_string(failing)));
      EXPECT_THAT(error.what(), HasSubstr(error_text_on_peers(fault)));
    }
  } catch (const std::exception& error) {
    if (!is_failing) {  // it waited in the program's collective
      EXPECT_TRUE(situation == Situation::kCollectiveInBackward && !trains_on)
          << error.what();
    } else {
      EXPECT_THAT(error.what(), HasSubstr("bang"));
      EXPECT_EQ(dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr,
                fault == Fault::kOutOfMemory);
    }
  }
  if (situation != Situation::kTwoModels) {
    EXPECT_TRUE(are_same(program.shards(true), gradients));
  }
  EXPECT_TRUE(are_same(program.shards(false), parameters));
}

INSTANTIATE_TEST_SUITE_P(, ScenarioTest,
                         ::testing::ValuesIn(cells(Outcome::kTrainsOn)),
                         name_of_cell);

TEST_P(ScenarioTest, AllRanksThrowThenTrainLikeOneProcess) {
  const auto [fault, situation] = GetParam();
  run_ranks(world_size_of(situation), [&](const Group& group) {
    Program program(group, situation);
    int step = 0;
    for (; step < failing_step(situation); ++step) program.train(step);
    for (int time = 0; time < 2; ++time) {
      expect_failure(program, step, group, fault, situation);
      ASSERT_TRUE(program.can_continue());
      program.train(step++);
      program.train(step++);
    }
    program.evaluate(step);
  });
}

class ClosedGroupTest : public ScenarioTest {};
INSTANTIATE_TEST_SUITE_P(, ClosedGroupTest,
                         ::testing::ValuesIn(cells(Outcome::kClosed)),
                         name_of_cell);

TEST_P(ClosedGroupTest, AllRanksThrowInThisStepAndInLaterOnes) {
  const auto [fault, situation] = GetParam();
  std::latch all_threw(world_size_of(situation));
  run_ranks(
      world_size_of(situation),
      [&](const Group& group) {
        Program program(group, situation);
        int step = 0;
        for (; step < failing_step(situation); ++step) program.train(step);
        expect_failure(program, step, group, fault, situation);
        all_threw.arrive_and_wait();  // the end of a model would wake its peers
        if (situation != Situation::kCollectiveInBackward) {
          EXPECT_FALSE(program.can_continue());
        }
        EXPECT_ANY_THROW(program.run(step, Fault::kNone));
      },
      // Only the program's own collective may wait for it.
      std::chrono::seconds(
          situation == Situation::kCollectiveInBackward ? 3 : 600));
}

// The failed rank never begins the backward of the inner model.
TEST(ChainedModelsTest, AFailureBeforeTheInnerBackwardIsAnErrorOnBothRanks) {
  run_ranks(
      2,
      [](const Group& group) {
        Net inner(7);
        Net outer(7);
        const auto inner_model = fully_shard(*inner, group);
        const auto outer_model = fully_shard(*outer, group);
        const at::Tensor x = data_of(group->getRank(), 0, 0);
        const at::Tensor middle = inner_model->forward(
            [&] { return inner(x, Situation::kCursor, nullptr); });
        const at::Tensor next =
            torch::cat({middle, middle.slice(1, 0, kSize - 3)}, 1);
        const at::Tensor loss = outer_model->forward([&] {
          return outer(next, Situation::kCursor,
                       [&](int block, at::Tensor& output) {
                         if (block != 1 || group->getRank() == 0) return;
                         output.register_hook(
                             [](const at::Tensor&) -> at::Tensor {
                               throw std::runtime_error("bang in backward");
                             });
                       })
              .sum();
        });
        EXPECT_ANY_THROW(loss.backward());
        for (const Net& net : {inner, outer}) {
          for (const at::Tensor& parameter : net->parameters()) {
            EXPECT_FALSE(parameter.grad().defined());
          }
        }
      },
      std::chrono::seconds(1));
}

const RankFunction kTrain("scenario", [](RankContext& rank) {
  const auto situation =
      static_cast<Situation>(std::stoi(rank.arguments().at(0)));
  torch::set_num_threads(1);
  GroupScope scope(init_process_group({.timeout = std::chrono::seconds(5)}));
  Program program(scope.group(), situation);
  const int failing = failing_step(situation);
  for (int step = 0; step < failing; ++step) program.train(step);
  const auto gradients = program.shards(/*of_gradients=*/true);
  const auto parameters = program.shards(/*of_gradients=*/false);
  try {
    program.run(failing, rank.rank() == failing_rank(situation)
                             ? Fault::kProcess
                             : Fault::kNone);
    rank.report("no error");
  } catch (const c10::DistBackendError&) {
    const std::string text = message_of(std::current_exception());
    rank.report("error " + text.substr(0, text.find('\n')));
  } catch (const std::exception&) {  // of the program's own collective
    if (situation != Situation::kCollectiveInBackward) throw;
    rank.report("own error");
  }
  if (program.can_continue()) rank.report("can continue");
  if (situation != Situation::kTwoModels &&
      !are_same(program.shards(true), gradients)) {
    rank.report("changed gradients");
  }
  if (!are_same(program.shards(false), parameters)) {
    rank.report("changed parameters");
  }
  rank.report("end");
});

class LostProcessTest : public ScenarioTest {};
INSTANTIATE_TEST_SUITE_P(, LostProcessTest,
                         ::testing::ValuesIn(cells(Outcome::kLost)),
                         name_of_cell);

TEST_P(LostProcessTest, SurvivorsNameItAndKeepParametersAndGradients) {
  const Situation situation = std::get<1>(GetParam());
  const int lost = failing_rank(situation);
  ProcessRanks ranks(
      {.world_size = world_size_of(situation),
       .function = "scenario",
       .arguments = {std::to_string(static_cast<int>(situation))},
       .deadline = std::chrono::seconds(30)});
  const auto results = ranks.finish();
  EXPECT_EQ(results[lost].signal, SIGKILL) << results[lost].error_output;
  for (int rank = 0; rank < world_size_of(situation); ++rank) {
    if (rank == lost) continue;
    EXPECT_EQ(results[rank].exit_code, 0) << results[rank].error_output;
    ASSERT_EQ(results[rank].messages.size(), 2u)
        << ::testing::PrintToString(results[rank].messages);
    if (results[rank].messages[0] != "own error") {
      EXPECT_THAT(results[rank].messages[0],
                  AllOf(StartsWith("error "),
                        HasSubstr("rank " + std::to_string(lost))));
    }
    EXPECT_EQ(results[rank].messages[1], "end");
  }
}

}  // namespace sharded_scenarios_test
}  // namespace brigade
