// Random programs on random networks and meshes: whatever ranks do, they find
// the bits of a single process.
//
// Ranks run a program and note what they see behind each operation. A model
// then runs the same program in one thread, on whole parameters, and compares.

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/fsdp/sharded_root.h"
#include "brigade/tests/fsdp/sharded_net.h"
#include "brigade/tests/support/local_ranks.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using testing::loss_of;
using testing::run_ranks;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// By world size.
constexpr uint64_t kNumSeeds = 40;

// To look at one failure: its seed, and the actions of its program to run, one
// bit each.
constexpr std::optional<uint64_t> kOnlySeed = std::nullopt;
constexpr uint32_t kOnlyActions = ~0u;

// What ranks may not differ in yet: each of these makes some seeds fail.

// Losses of other outputs: a unit that was released is needed again on some.
constexpr bool kLossesDiffer = false;
// Inputs that take a gradient: other units are needed in backward.
constexpr bool kInputGradientsDiffer = false;
// Two forwards that differ: a unit is needed again on some ranks.
constexpr bool kSeveralForwardsDiffer = false;
// Any calls: as above, in all combinations.
constexpr bool kWildRanks = false;

// Groups are made once for so many seeds.
constexpr uint64_t kSeedsPerGroup = 20;

// A power of two: exact, so that fused arithmetic makes no difference.
constexpr double kRate = 0.125;

class Draw {
 public:
  explicit Draw(uint64_t seed) : generator_(seed) {}

  uint64_t seed() { return generator_() % 1'000'000; }
  size_t below(size_t end) { return generator_() % end; }
  int64_t between(int64_t first, int64_t last) {
    return first + static_cast<int64_t>(below(last - first + 1));
  }
  bool percent(size_t chance) { return below(100) < chance; }
  template <typename T>
  T of(const std::vector<T>& values) {
    return values[below(values.size())];
  }

 private:
  std::mt19937_64 generator_;
};

// ---- Networks: blocks of any order on a stream of one width.

enum class Role {
  kMatrix,
  kTransposed,
  kTall,
  kShift,
  kScale,
  kScalar,
  kEmpty
};

struct ParameterPlan {
  Role role;
  int64_t rank;  // of a tall one
  bool is_double;
  bool is_frozen;
  uint64_t seed;
};

// How all ranks are cut into groups, each of which holds a unit of its own.
struct MeshPlan {
  int world_size;
  int size;         // of a group, whose ranks are
  bool is_strided;  // as far from each other as there are groups
  int num_shards;

  // The group that the rank is in.
  UnitMesh of(int rank) const {
    const int num_groups = world_size / size;
    const int first = is_strided ? rank % num_groups : rank / size * size;
    UnitMesh mesh{.num_shards = num_shards};
    for (int place = 0; place < size; ++place) {
      mesh.ranks.push_back(first + place * (is_strided ? num_groups : 1));
    }
    return mesh;
  }
};

struct UnitPlan {
  std::optional<MeshPlan> mesh = std::nullopt;  // unset: the root's
  std::optional<int> reshards_to = std::nullopt;
};

struct NetPlan {
  int64_t width;
  std::vector<std::vector<ParameterPlan>> blocks;  // the last is the head
  std::vector<UnitPlan> units;                     // as FuzzNet::units()
};

class FuzzNet {
 public:
  // What `rank` has. Meshes begin with equal values.
  FuzzNet(const NetPlan& plan, int rank) : plan_(plan), rank_(rank) {
    for (const auto& block : plan.blocks) {
      std::vector<at::Tensor> made;
      for (const ParameterPlan& parameter : block) {
        made.push_back(make(parameter));
      }
      blocks_.push_back(std::move(made));
    }
  }

  // Unit 0 is the outermost, of the head; unit i + 1 is block i.
  std::vector<UnitSpec> units() const {
    std::vector<UnitSpec> specs;
    for (size_t unit = 0; unit < blocks_.size(); ++unit) {
      UnitSpec spec;
      if (unit > 0) spec.name = absl::StrCat("b", unit - 1);
      const auto& parameters = blocks_[block_of(unit)];
      for (size_t i = 0; i < parameters.size(); ++i) {
        spec.parameters.push_back({name_of(unit, i), parameters[i]});
      }
      if (unit == 0) spec.reshards_after_forward = false;
      const UnitPlan& plan = plan_.units[unit];
      if (plan.mesh) spec.mesh = plan.mesh->of(rank_);
      spec.reshards_to = plan.reshards_to;
      specs.push_back(std::move(spec));
    }
    return specs;
  }

  static std::string name_of(size_t unit, size_t parameter) {
    return absl::StrCat("p", unit, ".", parameter);
  }

  size_t num_units() const { return blocks_.size(); }
  size_t num_parameters(size_t unit) const {
    return blocks_[block_of(unit)].size();
  }

  // By parameter.
  std::vector<size_t> unit_of() const {
    std::vector<size_t> all;
    for (size_t unit = 0; unit < blocks_.size(); ++unit) {
      all.insert(all.end(), num_parameters(unit), unit);
    }
    return all;
  }

  // In the order of units().
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all;
    for (size_t unit = 0; unit < blocks_.size(); ++unit) {
      const auto& block = blocks_[block_of(unit)];
      all.insert(all.end(), block.begin(), block.end());
    }
    return all;
  }

  // With the parameters of `uses`, one bit each; none: the input itself.
  at::Tensor run(size_t unit, const at::Tensor& x, uint32_t uses) const {
    const size_t block = block_of(unit);
    at::Tensor h = x;
    bool is_changed = false;
    for (size_t i = 0; i < blocks_[block].size(); ++i) {
      if ((uses >> i & 1) == 0) continue;
      h = apply(plan_.blocks[block][i].role, blocks_[block][i], h);
      is_changed = true;
    }
    return is_changed ? torch::tanh(h) : h;
  }

 private:
  size_t block_of(size_t unit) const {
    return unit == 0 ? blocks_.size() - 1 : unit - 1;
  }

  std::vector<int64_t> sizes_of(const ParameterPlan& parameter) const {
    switch (parameter.role) {
      case Role::kMatrix:
      case Role::kTransposed:
        return {plan_.width, plan_.width};
      case Role::kTall:
        return {plan_.width, parameter.rank};
      case Role::kShift:
      case Role::kScale:
        return {plan_.width};
      case Role::kScalar:
        return {1};
      case Role::kEmpty:
        return {0};
    }
    return {};
  }

  at::Tensor make(const ParameterPlan& parameter) const {
    at::Tensor made =
        testing::random(sizes_of(parameter), parameter.seed).mul_(0.7);
    if (parameter.is_double) made = made.to(torch::kDouble);
    if (parameter.role == Role::kTransposed) made = made.t();
    return made.requires_grad_(!parameter.is_frozen);
  }

  static at::Tensor apply(Role role, const at::Tensor& parameter,
                          const at::Tensor& x) {
    const at::Tensor p = parameter.to(torch::kFloat);
    switch (role) {
      case Role::kMatrix:
      case Role::kTransposed:
        return torch::matmul(x, p);
      case Role::kTall:
        return torch::matmul(torch::matmul(x, p), p.t());
      case Role::kShift:
        return x + p;
      case Role::kScale:
      case Role::kScalar:
        return x * p;
      case Role::kEmpty:
        return x + p.sum();
    }
    return x;
  }

  const NetPlan plan_;
  const int rank_;
  std::vector<std::vector<at::Tensor>> blocks_;
};

// ---- Programs.

struct BlockCall {
  size_t block;
  uint32_t uses;
};

// What one rank runs. Outputs: the head's, and what each call returned.
struct Branch {
  std::vector<BlockCall> calls = {};
  uint32_t uses_of_head;
  std::vector<size_t> in_loss;  // outputs
  bool takes_input_gradient;
  int64_t rows;
  uint64_t seed;
};

// By rank.
using Forward = std::vector<Branch>;

enum class Kind {
  kForward,
  kBackward,  // of the sum of several forwards' losses
  kEvaluate,
  kDrop,  // a forward whose backward never comes
  kZero,
  kSgd,
  kFailingForward,
  kFailingBackward,
  kReadWhole,
  kScale,
  kClip,
  kSetReshards,
  kMeet,
};

struct Operation {
  Kind kind;
  std::vector<size_t> forwards = {};  // by number
  bool flag = false;                  // synchronizes; zeroes in place; reshards
  int rank = 0;                       // that fails
  size_t place = 0;  // where it fails: behind the call, or in it
  size_t index = 0;  // parameter, of all; unit
  std::optional<int> reshards_to = std::nullopt;
  double max_norm = 0;  // clips
  double p = 2;
};

struct Action {
  std::vector<Operation> operations;

  // Ranks call units so differently that they may be refused, all of them.
  bool may_be_refused = false;
};

struct Case {
  uint64_t seed;
  int world_size;

  // Calls of units in any order and number. Else ranks differ in what they
  // leave out, and each unit is called once.
  bool is_wild;
  ShardingOptions options;
  NetPlan net;
  std::vector<Forward> forwards;
  std::vector<Action> actions;
};

// Where a rank fails. `place`: a call of the branch; the head's behind them.
struct Fault {
  std::optional<size_t> forward = std::nullopt;
  std::optional<size_t> backward = std::nullopt;
};

// ---- Drawing them.

class CaseDraw {
 public:
  CaseDraw(uint64_t seed, int world_size) : draw_(1000 * seed + world_size) {
    case_.seed = seed;
    case_.world_size = world_size;
    case_.is_wild = world_size == 1 || (draw_.percent(50) && kWildRanks);
  }

  Case run() {
    draw_options();
    draw_net();
    draw_units();
    const int64_t num_actions = draw_.between(4, 8);
    for (int64_t i = 0; i < num_actions; ++i) {
      add(draw_action());
    }
    // What has been left open comes out.
    add(step(true));
    add({{.kind = Kind::kSgd}, {.kind = Kind::kReadWhole}});
    return case_;
  }

 private:
  using Operations = std::vector<Operation>;

  void add(Operations operations) {
    Action action{.operations = std::move(operations)};
    for (const Operation& operation : action.operations) {
      for (const size_t forward : operation.forwards) {
        if (case_.is_wild && differs(case_.forwards[forward])) {
          action.may_be_refused = true;
        }
      }
    }
    // Who has not been refused yet is refused here.
    if (action.may_be_refused) {
      action.operations.push_back({.kind = Kind::kMeet});
    }
    case_.actions.push_back(std::move(action));
  }

  static bool differs(const Forward& forward) {
    const auto differ = [](const Branch& a, const Branch& b) {
      if (a.in_loss != b.in_loss) return true;
      if (a.calls.size() != b.calls.size()) return true;
      for (size_t i = 0; i < a.calls.size(); ++i) {
        if (a.calls[i].block != b.calls[i].block) return true;
      }
      return false;
    };
    return std::any_of(
        forward.begin(), forward.end(),
        [&](const Branch& branch) { return differ(branch, forward[0]); });
  }

  static std::vector<int> divisors_of(int number) {
    std::vector<int> divisors;
    for (int i = 1; i <= number; ++i) {
      if (number % i == 0) divisors.push_back(i);
    }
    return divisors;
  }

  void draw_options() {
    takes_input_gradients_ = draw_.percent(15);
    keeps_units_ = draw_.percent(50);
    case_.options = {
        .num_shards = draw_.of(divisors_of(case_.world_size)),
        .reshards_after_forward = !keeps_units_ || draw_.percent(40),
        .prefetch_depth = draw_.below(4),
        .max_reducing = 1 + draw_.below(3),
        .failure_patience = std::chrono::seconds(5)};
    if (*case_.options.num_shards == 4 && draw_.percent(40)) {
      case_.options.reshards_to = 2;
    }
  }

  MeshPlan draw_mesh() {
    const int size = draw_.of(divisors_of(case_.world_size));
    return {.world_size = case_.world_size,
            .size = size,
            .is_strided = draw_.percent(50),
            .num_shards = draw_.of(divisors_of(size))};
  }

  void draw_units() {
    case_.net.units.resize(case_.net.blocks.size());
    std::vector<MeshPlan> meshes;
    if (draw_.percent(40)) {
      const int64_t num_meshes = draw_.between(1, 2);
      for (int64_t i = 0; i < num_meshes; ++i) meshes.push_back(draw_mesh());
    }
    for (size_t unit = 0; unit < case_.net.units.size(); ++unit) {
      UnitPlan& plan = case_.net.units[unit];
      if (unit > 0 && !meshes.empty() && draw_.percent(50)) {
        plan.mesh = draw_.of(meshes);
      }
      if (num_shards_of(plan) == 4 && draw_.percent(30)) plan.reshards_to = 2;
    }
  }

  int num_shards_of(const UnitPlan& plan) const {
    return plan.mesh ? plan.mesh->num_shards : *case_.options.num_shards;
  }

  // What a unit may be resharded to: there are groups for it.
  std::optional<int> draw_reshards_to(size_t unit) {
    const UnitPlan& plan = case_.net.units[unit];
    const bool has_groups =
        plan.mesh ? plan.reshards_to.has_value()
                  : (case_.options.reshards_to || plan.reshards_to);
    return has_groups && draw_.percent(50) ? std::optional(2) : std::nullopt;
  }

  void draw_net() {
    case_.net.width = draw_.between(1, 6);
    const size_t num_blocks = draw_.between(3, 6);
    for (size_t i = 0; i <= num_blocks; ++i) {
      const bool is_head = i == num_blocks;
      const bool all_frozen = !is_head && draw_.percent(12);
      std::vector<ParameterPlan> block;
      const int64_t num_parameters = draw_.percent(45)   ? 1
                                     : draw_.percent(75) ? 2
                                                         : 3;
      for (int64_t k = 0; k < num_parameters; ++k) {
        ParameterPlan plan{.role = draw_role(),
                           .rank = draw_.between(1, 3),
                           .is_double = draw_.percent(10),
                           .is_frozen = all_frozen || draw_.percent(12),
                           .seed = draw_.seed()};
        if (is_head && k == 0) {
          plan.role = Role::kScalar;
          plan.is_frozen = false;
        }
        block.push_back(plan);
      }
      case_.net.blocks.push_back(std::move(block));
    }
  }

  Role draw_role() {
    if (draw_.percent(3)) return Role::kEmpty;
    return draw_.of<Role>({Role::kMatrix, Role::kMatrix, Role::kTransposed,
                           Role::kTall, Role::kShift, Role::kShift,
                           Role::kScale, Role::kScalar});
  }

  size_t num_blocks() const { return case_.net.blocks.size() - 1; }

  uint32_t all_of(size_t block) const {
    return (1u << case_.net.blocks[block].size()) - 1;
  }

  bool is_trained(size_t block, uint32_t uses) const {
    const auto& parameters = case_.net.blocks[block];
    for (size_t i = 0; i < parameters.size(); ++i) {
      if ((uses >> i & 1) != 0 && !parameters[i].is_frozen) return true;
    }
    return false;
  }

  // Whether the output, numbered as a Branch's, depends on what is trained.
  bool takes_gradient(const Branch& branch, size_t output) const {
    if (branch.takes_input_gradient) return true;
    const size_t num_calls = output == 0 ? branch.calls.size() : output;
    for (size_t i = 0; i < num_calls; ++i) {
      if (is_trained(branch.calls[i].block, branch.calls[i].uses)) return true;
    }
    return output == 0 && is_trained(num_blocks(), branch.uses_of_head);
  }

  Branch draw_branch(bool is_regular) {
    Branch branch{.uses_of_head = all_of(num_blocks()),
                  .in_loss = {0},
                  .takes_input_gradient = takes_input_gradients_,
                  .rows = draw_.between(1, 4),
                  .seed = draw_.seed()};
    if (case_.is_wild || kInputGradientsDiffer) {
      branch.takes_input_gradient = draw_.percent(15);
    }
    if (is_regular) {
      for (size_t i = 0; i < num_blocks(); ++i) {
        branch.calls.push_back({i, all_of(i)});
      }
      return branch;
    }
    std::vector<size_t> blocks;
    if (case_.is_wild) {
      const size_t num_calls = draw_.below(num_blocks() + 3);
      for (size_t i = 0; i < num_calls; ++i) {
        blocks.push_back(draw_.below(num_blocks()));
      }
    } else {
      for (size_t i = 0; i < num_blocks(); ++i) {
        if (draw_.percent(75)) blocks.push_back(i);
      }
    }
    for (const size_t block : blocks) {
      const auto some = static_cast<uint32_t>(draw_.between(0, all_of(block)));
      branch.calls.push_back({block, draw_.percent(75) ? all_of(block) : some});
    }
    if (draw_.percent(30) && (case_.is_wild || kLossesDiffer)) {
      std::vector<size_t> chosen;
      for (size_t i = 0; i <= blocks.size(); ++i) {
        // Sums of three gradients have an order.
        const bool is_input = i > 0 && branch.calls[i - 1].uses == 0;
        if (draw_.percent(40) && !is_input) chosen.push_back(i);
      }
      if (std::any_of(chosen.begin(), chosen.end(),
                      [&](size_t i) { return takes_gradient(branch, i); })) {
        branch.in_loss = chosen;
      }
    }
    return branch;
  }

  size_t draw_forward(bool is_alike = false) {
    const size_t manner = is_alike ? 0 : draw_.below(10);
    Forward forward;
    if (manner < 3) {  // alike
      forward.assign(case_.world_size,
                     draw_branch(!case_.is_wild || draw_.percent(50)));
    } else {
      for (int rank = 0; rank < case_.world_size; ++rank) {
        forward.push_back(draw_branch(manner < 5));
      }
    }
    for (Branch& branch : forward) branch.seed = draw_.seed();
    case_.forwards.push_back(std::move(forward));
    return case_.forwards.size() - 1;
  }

  Operations step(bool synchronizes) {
    const size_t forward = draw_forward();
    Operations action = {{.kind = Kind::kForward, .forwards = {forward}}};
    if (draw_.percent(15)) {
      action.push_back({.kind = Kind::kEvaluate, .forwards = {draw_forward()}});
    }
    action.push_back(
        {.kind = Kind::kBackward, .forwards = {forward}, .flag = synchronizes});
    if (!synchronizes && case_.is_wild && differs(case_.forwards[forward])) {
      // Refused in a backward that is not reduced, they need not agree on it.
      action.back().flag = true;
    }
    return action;
  }

  Operations two_forwards() {
    const bool is_alike = !case_.is_wild && !kSeveralForwardsDiffer;
    const size_t first = draw_forward(is_alike);
    const size_t second = draw_forward(is_alike);
    Operations action = {{.kind = Kind::kForward, .forwards = {first}},
                         {.kind = Kind::kForward, .forwards = {second}}};
    switch (draw_.below(3)) {
      case 0:
        action.push_back({.kind = Kind::kBackward,
                          .forwards = {first, second},
                          .flag = true});
        break;
      case 1:
        action.push_back(
            {.kind = Kind::kBackward, .forwards = {first}, .flag = true});
        action.push_back(
            {.kind = Kind::kBackward, .forwards = {second}, .flag = true});
        break;
      default:
        action.push_back(
            {.kind = Kind::kBackward, .forwards = {second}, .flag = true});
        action.push_back(
            {.kind = Kind::kBackward, .forwards = {first}, .flag = true});
    }
    return action;
  }

  Operations accumulation() {
    Operations action;
    const int64_t num_batches = draw_.between(2, 4);
    for (int64_t i = 0; i < num_batches; ++i) {
      const Operations one = step(i + 1 == num_batches);
      action.insert(action.end(), one.begin(), one.end());
    }
    return action;
  }

  Operations failing_forward() {
    const size_t forward = draw_forward(/*is_alike=*/case_.is_wild);
    const int rank = static_cast<int>(draw_.below(case_.world_size));
    const size_t num_calls = case_.forwards[forward][rank].calls.size();
    return {{.kind = Kind::kFailingForward,
             .forwards = {forward},
             .rank = rank,
             .place = draw_.below(num_calls + 1)}};
  }

  Operations failing_backward() {
    const size_t forward = draw_forward(/*is_alike=*/case_.is_wild);
    const int rank = static_cast<int>(draw_.below(case_.world_size));
    for (Branch& one : case_.forwards[forward]) one.in_loss = {0};
    const Branch& branch = case_.forwards[forward][rank];
    std::vector<size_t> places = {branch.calls.size()};
    for (size_t i = 0; i < branch.calls.size(); ++i) {
      if (takes_gradient(branch, i + 1)) places.push_back(i);
    }
    return {{.kind = Kind::kFailingBackward,
             .forwards = {forward},
             .rank = rank,
             .place = draw_.of(places)}};
  }

  size_t num_parameters() const {
    size_t sum = 0;
    for (const auto& block : case_.net.blocks) sum += block.size();
    return sum;
  }

  Operations draw_action() {
    const size_t choice = draw_.below(100);
    if (choice < 24) return step(true);
    if (choice < 28) return step(false);
    if (choice < 34) {
      return {{.kind = Kind::kEvaluate, .forwards = {draw_forward()}}};
    }
    if (choice < 46) return two_forwards();
    if (choice < 54) return accumulation();
    if (choice < 60) {
      return {{.kind = Kind::kZero,
               .flag = draw_.percent(50),
               .index = draw_.percent(70) ? num_parameters()
                                          : draw_.below(num_parameters())}};
    }
    if (choice < 70) {
      return {{.kind = Kind::kSgd},
              {.kind = Kind::kZero,
               .flag = draw_.percent(30),
               .index = num_parameters()}};
    }
    if (choice < 76) {
      return failing_forward();
    }
    if (choice < 82) {
      return failing_backward();
    }
    if (choice < 85) return {{.kind = Kind::kReadWhole}};
    if (choice < 90) {
      return {{.kind = Kind::kScale, .index = draw_.below(num_parameters())}};
    }
    if (choice < 94) {
      return {{.kind = Kind::kClip,
               .max_norm = draw_.of<double>({0.01, 0.5, 2, 1e9}),
               .p = draw_.of<double>(
                   {1, 2, 3, std::numeric_limits<double>::infinity()})}};
    }
    if (choice < 97) {
      const size_t unit = draw_.below(num_blocks() + 1);
      return {{.kind = Kind::kSetReshards,
               .flag = !keeps_units_ || draw_.percent(50),
               .index = unit,
               .reshards_to = draw_reshards_to(unit)}};
    }
    const size_t dropped = draw_forward();
    return {{.kind = Kind::kForward, .forwards = {dropped}},
            {.kind = Kind::kDrop, .forwards = {dropped}}};
  }

  Draw draw_;
  Case case_;
  bool keeps_units_ = false;
  bool takes_input_gradients_ = false;
};

// ---- Describing them.

std::string describe(const Branch& branch) {
  std::ostringstream out;
  out << "[";
  for (const BlockCall& call : branch.calls) {
    out << " " << call.block << ":" << call.uses;
  }
  out << " head:" << branch.uses_of_head << "; loss of";
  for (const size_t i : branch.in_loss) out << " " << i;
  if (branch.takes_input_gradient) out << "; input's gradient";
  out << "]";
  return out.str();
}

std::string describe(const Operation& operation) {
  static const std::map<Kind, std::string> kNames = {
      {Kind::kForward, "forward"},
      {Kind::kBackward, "backward"},
      {Kind::kEvaluate, "evaluate"},
      {Kind::kDrop, "drop"},
      {Kind::kZero, "zero"},
      {Kind::kSgd, "sgd"},
      {Kind::kFailingForward, "failing forward"},
      {Kind::kFailingBackward, "failing backward"},
      {Kind::kReadWhole, "read whole"},
      {Kind::kScale, "scale"},
      {Kind::kClip, "clip"},
      {Kind::kSetReshards, "set reshards"},
      {Kind::kMeet, "meet"},
  };
  std::ostringstream out;
  out << kNames.at(operation.kind);
  for (const size_t i : operation.forwards) out << " #" << i;
  switch (operation.kind) {
    case Kind::kBackward:
      if (!operation.flag) out << " unsynchronized";
      break;
    case Kind::kZero:
      out << (operation.flag ? " in place" : " to undefined") << ", parameter "
          << operation.index;
      break;
    case Kind::kFailingForward:
    case Kind::kFailingBackward:
      out << " on rank " << operation.rank << " at " << operation.place;
      break;
    case Kind::kScale:
      out << " parameter " << operation.index;
      break;
    case Kind::kClip:
      out << " to " << operation.max_norm << ", p = " << operation.p;
      break;
    case Kind::kSetReshards:
      out << " of unit " << operation.index << ": " << operation.flag << " to "
          << operation.reshards_to.value_or(0);
      break;
    default:
      break;
  }
  return out.str();
}

std::string describe(const Case& c) {
  static const std::map<Role, std::string> kRoles = {
      {Role::kMatrix, "matrix"}, {Role::kTransposed, "transposed"},
      {Role::kTall, "tall"},     {Role::kShift, "shift"},
      {Role::kScale, "scale"},   {Role::kScalar, "scalar"},
      {Role::kEmpty, "empty"},
  };
  std::ostringstream out;
  out << "seed " << c.seed << (c.is_wild ? ", wild, " : ", ") << c.world_size
      << " ranks, " << *c.options.num_shards << " shards, reshards "
      << c.options.reshards_after_forward << " to "
      << c.options.reshards_to.value_or(0) << ", depth "
      << c.options.prefetch_depth << ", reducing " << c.options.max_reducing
      << "\nwidth " << c.net.width << "\n";
  for (size_t i = 0; i < c.net.blocks.size(); ++i) {
    out << (i + 1 == c.net.blocks.size() ? "head"
                                         : "block " + std::to_string(i))
        << ":";
    for (const ParameterPlan& parameter : c.net.blocks[i]) {
      out << " " << kRoles.at(parameter.role);
      if (parameter.role == Role::kTall) out << "(" << parameter.rank << ")";
      if (parameter.is_double) out << " double";
      if (parameter.is_frozen) out << " frozen";
      out << ";";
    }
    const UnitPlan& unit =
        c.net.units[i + 1 == c.net.blocks.size() ? 0 : i + 1];
    if (unit.mesh) {
      out << " over " << describe(unit.mesh->of(0)) << " and the like;";
    }
    if (unit.reshards_to) out << " reshards to " << *unit.reshards_to;
    out << "\n";
  }
  for (size_t i = 0; i < c.actions.size(); ++i) {
    out << "action " << i
        << (c.actions[i].may_be_refused ? ", may be refused" : "") << "\n";
    for (const Operation& operation : c.actions[i].operations) {
      out << "  " << describe(operation) << "\n";
      if (operation.kind == Kind::kBackward || operation.kind == Kind::kDrop) {
        continue;
      }
      for (const size_t forward : operation.forwards) {
        for (size_t rank = 0; rank < c.forwards[forward].size(); ++rank) {
          out << "    rank " << rank << " "
              << describe(c.forwards[forward][rank]) << "\n";
        }
      }
    }
  }
  return out.str();
}

std::vector<Action> actions_of(const Case& c) {
  std::vector<Action> chosen;
  for (size_t i = 0; i < c.actions.size(); ++i) {
    if ((kOnlyActions >> i & 1) != 0) chosen.push_back(c.actions[i]);
  }
  return chosen;
}

// ---- Running them.

struct ThrowInBackward : public torch::autograd::Function<ThrowInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            at::Tensor x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    throw std::runtime_error("bad gradient");
  }
};

at::Tensor input_of(const NetPlan& plan, const Branch& branch) {
  return testing::random({branch.rows, plan.width}, branch.seed)
      .requires_grad_(branch.takes_input_gradient);
}

// Outputs as a Branch numbers them: the head's, and those that are in the loss.
// `call(unit, input, run)` runs a unit.
template <typename Call>
std::vector<at::Tensor> run_branch(const FuzzNet& net, const Branch& branch,
                                   const at::Tensor& x, const Fault& fault,
                                   const Call& call) {
  const auto run = [&](size_t unit, const at::Tensor& in, uint32_t uses,
                       size_t place) {
    if (fault.forward == place) throw std::runtime_error("bad input");
    return net.run(unit, in, uses);
  };
  const auto is_in_loss = [&](size_t output) {
    return std::find(branch.in_loss.begin(), branch.in_loss.end(), output) !=
           branch.in_loss.end();
  };
  return call(0, x, [&](const at::Tensor& in) {
    std::vector<at::Tensor> outputs(1);
    at::Tensor h = in;
    const size_t num_calls = branch.calls.size();
    for (size_t i = 0; i < num_calls; ++i) {
      const BlockCall& one = branch.calls[i];
      h = call(one.block + 1, h, [&](const at::Tensor& inner) {
        return run(one.block + 1, inner, one.uses, i);
      });
      if (fault.backward == i) h = ThrowInBackward::apply(h);
      outputs.push_back(is_in_loss(i + 1) ? h : at::Tensor());
    }
    outputs[0] = run(0, h, branch.uses_of_head, num_calls);
    if (fault.backward == num_calls) {
      outputs[0] = ThrowInBackward::apply(outputs[0]);
    }
    return outputs;
  });
}

at::Tensor loss_of_branch(const Branch& branch,
                          const std::vector<at::Tensor>& outputs) {
  at::Tensor loss;
  for (const size_t i : branch.in_loss) {
    const at::Tensor one = loss_of(outputs[i]);
    loss = loss.defined() ? loss + one : one;
  }
  return loss;
}

std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& tensor : tensors) {
    copies.push_back(tensor.defined() ? tensor.detach().clone() : tensor);
  }
  return copies;
}

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& tensor : tensors) gradients.push_back(tensor.grad());
  return gradients;
}

std::string message_of(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  return of_torch != nullptr ? of_torch->what_without_backtrace()
                             : error.what();
}

// What a rank sees behind an operation.
struct Sight {
  bool is_refused = false;         // in this operation, or in one before
  std::vector<at::Tensor> values;  // of shards
  std::vector<at::Tensor> gradients;
  std::vector<at::Tensor> outputs;  // or inputs' gradients, or parameters
  double norm = 0;
  std::string error;
};

struct Record {
  std::vector<ShardRange> ranges;  // by parameter
  std::vector<Sight> sights;
  std::string failure;  // that ended the rank
};

struct Live {
  at::Tensor input;
  std::vector<at::Tensor> outputs = {};
};

class RankRun {
 public:
  RankRun(const Case& c, const Group& group, Record& record)
      : case_(c),
        rank_(group->getRank()),
        record_(record),
        net_(c.net, rank_),
        root_(net_.units(), group, c.options) {}

  void run() {
    note_ranges();
    for (const Action& action : actions_of(case_)) {
      bool is_refused = false;
      for (const Operation& operation : action.operations) {
        Sight sight;
        try {
          if (!is_refused) run(operation, sight);
        } catch (const std::exception& error) {
          if (!action.may_be_refused) throw;
          is_refused = true;
          sight.error = message_of(error);
          live_.clear();
        }
        sight.is_refused = is_refused;
        sight.values = copies_of(root_.shards());
        sight.gradients = copies_of(gradients_of(root_.shards()));
        record_.sights.push_back(std::move(sight));
      }
    }
  }

 private:
  void note_ranges() {
    for (size_t unit = 0; unit < root_.num_units(); ++unit) {
      for (size_t i = 0; i < root_.shards_of(unit).size(); ++i) {
        const std::string name = FuzzNet::name_of(unit, i);
        for (const auto& segment : root_.unit(unit).segments) {
          for (size_t k = 0; k < segment->parameters().size(); ++k) {
            if (segment->parameters()[k].name != name) continue;
            record_.ranges.push_back(
                segment->layout().range(k, segment->rank()));
          }
        }
      }
    }
  }

  const Branch& branch(size_t forward) const {
    return case_.forwards[forward][rank_];
  }

  std::vector<at::Tensor> run_forward(size_t forward, const at::Tensor& x,
                                      const Fault& fault = {}) {
    return root_.forward([&] {
      return run_branch(
          net_, branch(forward), x, fault,
          [&](size_t unit, const at::Tensor& in, const auto& run) {
            return root_.call(unit, in, run);
          });
    });
  }

  void run(const Operation& operation, Sight& sight) {
    switch (operation.kind) {
      case Kind::kForward: {
        const size_t forward = operation.forwards[0];
        Live live{.input = input_of(case_.net, branch(forward))};
        live.outputs = run_forward(forward, live.input);
        sight.outputs = copies_of(live.outputs);
        live_[forward] = std::move(live);
        break;
      }
      case Kind::kEvaluate: {
        const torch::NoGradGuard no_grad;
        const size_t forward = operation.forwards[0];
        sight.outputs = copies_of(
            run_forward(forward, input_of(case_.net, branch(forward))));
        break;
      }
      case Kind::kBackward: {
        root_.set_synchronizes(operation.flag);
        at::Tensor loss;
        for (const size_t i : operation.forwards) {
          const at::Tensor one = loss_of_branch(branch(i), live_[i].outputs);
          loss = loss.defined() ? loss + one : one;
        }
        loss.backward();
        root_.set_synchronizes(true);
        for (const size_t i : operation.forwards) {
          sight.outputs.push_back(live_[i].input.grad());
          live_.erase(i);
        }
        break;
      }
      case Kind::kDrop:
        live_.erase(operation.forwards[0]);
        break;
      case Kind::kZero: {
        const auto shards = root_.shards();
        for (size_t i = 0; i < shards.size(); ++i) {
          if (operation.index < shards.size() && i != operation.index) continue;
          if (operation.flag && shards[i].grad().defined()) {
            shards[i].grad().zero_();
          } else {
            shards[i].mutable_grad() = at::Tensor();
          }
        }
        break;
      }
      case Kind::kSgd: {
        const torch::NoGradGuard no_grad;
        for (at::Tensor shard : root_.shards()) {
          if (shard.grad().defined()) shard.sub_(shard.grad(), kRate);
        }
        break;
      }
      case Kind::kFailingForward:
      case Kind::kFailingBackward:
        run_failing(operation, sight);
        break;
      case Kind::kReadWhole:
        root_.unshard();
        sight.outputs = copies_of(net_.parameters());
        root_.reshard(/*writes=*/false);
        break;
      case Kind::kScale: {
        root_.unshard();
        {
          const torch::NoGradGuard no_grad;
          net_.parameters()[operation.index].mul_(0.75);
        }
        root_.reshard(/*writes=*/true);
        break;
      }
      case Kind::kClip:
        sight.norm = root_.clip_grad_norm(operation.max_norm, operation.p);
        break;
      case Kind::kSetReshards:
        root_.settings(operation.index).reshards_after_forward = operation.flag;
        root_.settings(operation.index).reshards_to = operation.reshards_to;
        break;
      case Kind::kMeet:
        root_.sum_over_ranks(torch::zeros({1}, torch::kDouble),
                             /*takes_largest=*/false);
        break;
    }
  }

  void run_failing(const Operation& operation, Sight& sight) {
    const size_t forward = operation.forwards[0];
    Fault fault;
    if (operation.rank == rank_) {
      (operation.kind == Kind::kFailingForward ? fault.forward
                                               : fault.backward) =
          operation.place;
    }
    try {
      const auto outputs =
          run_forward(forward, input_of(case_.net, branch(forward)), fault);
      loss_of_branch(branch(forward), outputs).backward();
    } catch (const std::exception& error) {
      sight.error = message_of(error);
    }
    if (!root_.can_continue()) sight.error += "; it cannot continue";
  }

  const Case& case_;
  const int rank_;
  Record& record_;
  FuzzNet net_;
  ShardedRoot root_;
  std::map<size_t, Live> live_;  // by forward
};

// ---- The model.

class Model {
 public:
  Model(const Case& c, const std::vector<Record>& records)
      : case_(c),
        records_(records),
        unit_of_(FuzzNet(c.net, 0).unit_of()),
        gradients_(c.world_size, std::vector<at::Tensor>(unit_of_.size())),
        pending_(gradients_) {
    for (int rank = 0; rank < c.world_size; ++rank) {
      nets_.emplace_back(c.net, rank);
      parameters_.push_back(nets_.back().parameters());
    }
  }

  void check() {
    size_t begin = 0;
    for (const Action& action : actions_of(case_)) {
      const size_t end = begin + action.operations.size();
      const size_t refused = first_refused(begin, end);
      for (size_t i = begin; i < end; ++i) {
        const Operation& operation = action.operations[i - begin];
        SCOPED_TRACE("operation " + std::to_string(i) + ": " +
                     describe(operation));
        if (i < refused) run(operation, i);
        if (refused < end && i + 1 < end) continue;
        for (int rank = 0; rank < case_.world_size; ++rank) {
          if (::testing::Test::HasFailure()) return;
          EXPECT_EQ(sight(rank, i).is_refused, refused < end)
              << "rank " << rank;
          expect_shards(rank, i);
        }
        if (::testing::Test::HasFailure()) return;
      }
      if (refused < end) live_.clear();
      begin = end;
    }
  }

 private:
  const Sight& sight(int rank, size_t operation) const {
    return records_[rank].sights[operation];
  }

  // By any rank; `end`: none is.
  size_t first_refused(size_t begin, size_t end) const {
    for (size_t i = begin; i < end; ++i) {
      for (int rank = 0; rank < case_.world_size; ++rank) {
        if (sight(rank, i).is_refused) return i;
      }
    }
    return end;
  }

  Live run_forward(size_t forward, int rank) const {
    const Branch& branch = case_.forwards[forward][rank];
    Live live{.input = input_of(case_.net, branch)};
    live.outputs = run_branch(
        nets_[rank], branch, live.input, {},
        [](size_t, const at::Tensor& in, const auto& run) { return run(in); });
    return live;
  }

  void run(const Operation& operation, size_t index) {
    switch (operation.kind) {
      case Kind::kForward:
      case Kind::kEvaluate: {
        const size_t forward = operation.forwards[0];
        for (int rank = 0; rank < case_.world_size; ++rank) {
          Live live = run_forward(forward, rank);
          expect_equal(sight(rank, index).outputs, live.outputs, rank,
                       "output");
          if (operation.kind == Kind::kForward) {
            live_[forward].push_back(std::move(live));
          }
        }
        break;
      }
      case Kind::kBackward:
        run_backward(operation, index);
        break;
      case Kind::kDrop:
        live_.erase(operation.forwards[0]);
        break;
      case Kind::kZero:
        for (std::vector<at::Tensor>& of_rank : gradients_) {
          for (size_t i = 0; i < of_rank.size(); ++i) {
            const bool is_meant =
                operation.index >= of_rank.size() || operation.index == i;
            if (!is_meant) continue;
            if (operation.flag && of_rank[i].defined()) {
              of_rank[i].zero_();
            } else {
              of_rank[i] = at::Tensor();
            }
          }
        }
        break;
      case Kind::kSgd: {
        const torch::NoGradGuard no_grad;
        for (int rank = 0; rank < case_.world_size; ++rank) {
          for (size_t i = 0; i < unit_of_.size(); ++i) {
            const at::Tensor& gradient = gradients_[rank][i];
            if (gradient.defined()) parameters_[rank][i].sub_(gradient, kRate);
          }
        }
        break;
      }
      case Kind::kFailingForward:
      case Kind::kFailingBackward:
        expect_errors(operation, index);
        // What has been added up on ranks is lost with it.
        for (auto& of_rank : pending_) {
          of_rank.assign(unit_of_.size(), at::Tensor());
        }
        break;
      case Kind::kReadWhole:
        for (int rank = 0; rank < case_.world_size; ++rank) {
          expect_equal(sight(rank, index).outputs, parameters_[rank], rank,
                       "parameter");
        }
        break;
      case Kind::kScale: {
        const torch::NoGradGuard no_grad;
        for (const auto& of_rank : parameters_) {
          of_rank[operation.index].mul_(0.75);
        }
        break;
      }
      case Kind::kClip:
        clip(operation, index);
        break;
      case Kind::kSetReshards:
      case Kind::kMeet:
        break;
    }
  }

  void run_backward(const Operation& operation, size_t index) {
    for (int rank = 0; rank < case_.world_size; ++rank) {
      at::Tensor loss;
      for (const size_t i : operation.forwards) {
        const at::Tensor one =
            loss_of_branch(case_.forwards[i][rank], live_[i][rank].outputs);
        loss = loss.defined() ? loss + one : one;
      }
      loss.backward();
      std::vector<at::Tensor> of_inputs;
      for (const size_t i : operation.forwards) {
        of_inputs.push_back(live_[i][rank].input.grad());
      }
      expect_equal(sight(rank, index).outputs, of_inputs, rank,
                   "gradient of input");
      for (size_t i = 0; i < unit_of_.size(); ++i) {
        const at::Tensor& parameter = parameters_[rank][i];
        add(pending_[rank][i], parameter.grad());
        parameter.mutable_grad() = at::Tensor();
      }
    }
    for (const size_t i : operation.forwards) live_.erase(i);
    if (operation.flag) synchronize();
  }

  // What is undefined adds nothing.
  static void add(at::Tensor& sum, const at::Tensor& gradient) {
    if (!gradient.defined()) return;
    sum = sum.defined() ? sum + gradient : gradient.clone();
  }

  // The ranks that hold the same as `rank` does of a parameter.
  UnitMesh mesh_of(size_t parameter, int rank) const {
    const auto& mesh = case_.net.units[unit_of_[parameter]].mesh;
    if (mesh) return mesh->of(rank);
    const MeshPlan of_root = {.world_size = case_.world_size,
                              .size = case_.world_size,
                              .is_strided = false,
                              .num_shards = *case_.options.num_shards};
    return of_root.of(rank);
  }

  void synchronize() {
    for (size_t i = 0; i < unit_of_.size(); ++i) {
      const auto& like = parameters_[0][i];
      const bool is_used = std::any_of(
          pending_.begin(), pending_.end(),
          [&](const auto& of_rank) { return of_rank[i].defined(); });
      for (int rank = 0; rank < case_.world_size && is_used; ++rank) {
        const at::Tensor sum = sum_over(mesh_of(i, rank), i);
        // Used on another mesh only, it gets zeros.
        add(gradients_[rank][i], sum.defined() ? sum : at::zeros_like(like));
      }
      for (auto& of_rank : pending_) of_rank[i] = at::Tensor();
    }
  }

  // The average. In the order of ranks: over rows, and then over their sums.
  at::Tensor sum_over(const UnitMesh& mesh, size_t parameter) const {
    at::Tensor sum;
    for (int row = 0; row < mesh.size(); row += mesh.row_length()) {
      at::Tensor of_row;
      for (int place = row; place < row + mesh.row_length(); ++place) {
        add(of_row, pending_[mesh.ranks[place]][parameter]);
      }
      add(sum, of_row);
    }
    return sum.defined() ? sum.mul(1.0 / mesh.size()) : sum;
  }

  void clip(const Operation& operation, size_t index) {
    const double norm = sight(0, index).norm;
    for (int rank = 1; rank < case_.world_size; ++rank) {
      EXPECT_EQ(sight(rank, index).norm, norm) << "rank " << rank;
    }
    std::vector<at::Tensor> flat = {torch::zeros({1}, torch::kDouble)};
    for (int rank = 0; rank < case_.world_size; ++rank) {
      for (size_t i = 0; i < unit_of_.size(); ++i) {
        const at::Tensor& gradient = gradients_[rank][i];
        const bool is_counted = mesh_of(i, rank).ranks.front() == rank;
        if (!is_counted || !gradient.defined()) continue;
        flat.push_back(gradient.flatten().to(torch::kDouble));
      }
    }
    const double expected =
        at::linalg_vector_norm(torch::cat(flat), operation.p).item<double>();
    EXPECT_NEAR(norm, expected, 1e-5 * expected);
    const double factor = operation.max_norm / (norm + 1e-6);
    if (!(factor < 1)) return;
    for (const auto& of_rank : gradients_) {
      for (const at::Tensor& gradient : of_rank) {
        if (gradient.defined()) gradient.mul_(factor);
      }
    }
  }

  void expect_errors(const Operation& operation, size_t index) const {
    const bool in_forward = operation.kind == Kind::kFailingForward;
    for (int rank = 0; rank < case_.world_size; ++rank) {
      const std::string expected =
          in_forward ? "bad input"
          : rank == operation.rank
              ? "bad gradient"
              : "rank " + std::to_string(operation.rank) + " failed";
      const std::string& error = sight(rank, index).error;
      EXPECT_NE(error.find(expected), std::string::npos)
          << "rank " << rank << ": '" << error << "', expected '" << expected
          << "'";
      EXPECT_EQ(error.find("cannot continue"), std::string::npos)
          << "rank " << rank;
    }
  }

  static void expect_equal(const std::vector<at::Tensor>& found,
                           const std::vector<at::Tensor>& expected, int rank,
                           const std::string& what) {
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      ASSERT_EQ(found[i].defined(), expected[i].defined())
          << "rank " << rank << ", " << what << " " << i;
      if (!found[i].defined()) continue;
      ASSERT_TRUE(at::equal(found[i], expected[i]))
          << "rank " << rank << ", " << what << " " << i << ":\n"
          << found[i] << "\nexpected:\n"
          << expected[i];
    }
  }

  // In the order of the parameter's memory.
  at::Tensor part_of(const at::Tensor& whole, size_t parameter,
                     const ShardRange& range) const {
    if (!whole.defined()) return whole;
    const at::Tensor flat = parameters_[0][parameter].is_contiguous()
                                ? whole.flatten()
                                : whole.t().flatten();
    return flat.narrow(0, range.in_parameter, range.numel);
  }

  void expect_shards(int rank, size_t index) const {
    const Sight& seen = sight(rank, index);
    const auto flat_of = [](std::vector<at::Tensor> tensors) {
      for (at::Tensor& tensor : tensors) {
        if (!tensor.defined()) continue;
        tensor =
            tensor.is_contiguous() ? tensor.flatten() : tensor.t().flatten();
      }
      return tensors;
    };
    std::vector<at::Tensor> values;
    std::vector<at::Tensor> gradients;
    for (size_t i = 0; i < unit_of_.size(); ++i) {
      const ShardRange range = records_[rank].ranges[i];
      values.push_back(part_of(parameters_[rank][i].detach(), i, range));
      gradients.push_back(part_of(gradients_[rank][i], i, range));
    }
    expect_equal(flat_of(seen.values), values, rank, "shard");
    expect_equal(flat_of(seen.gradients), gradients, rank, "gradient of shard");
  }

  const Case& case_;
  const std::vector<Record>& records_;
  const std::vector<size_t> unit_of_;  // by parameter
  std::vector<FuzzNet> nets_;          // by rank
  // By rank, by parameter.
  std::vector<std::vector<at::Tensor>> parameters_;
  std::vector<std::vector<at::Tensor>> gradients_;
  std::vector<std::vector<at::Tensor>> pending_;
  std::map<size_t, std::vector<Live>> live_;  // by forward, by rank
};

// ---- The test.

class ShardedFuzzTest : public ::testing::TestWithParam<int> {};

TEST_P(ShardedFuzzTest, ProgramsEqualOneProcess) {
  const int world_size = GetParam();
  std::vector<uint64_t> seeds;
  if (kOnlySeed.has_value()) {
    seeds.push_back(*kOnlySeed);
  } else {
    for (uint64_t seed = 1; seed <= kNumSeeds; ++seed) seeds.push_back(seed);
  }
  for (size_t begin = 0; begin < seeds.size(); begin += kSeedsPerGroup) {
    const size_t end = std::min(begin + kSeedsPerGroup, seeds.size());
    std::vector<Case> cases;
    for (size_t i = begin; i < end; ++i) {
      cases.push_back(CaseDraw(seeds[i], world_size).run());
    }
    // By case, by rank.
    std::vector<std::vector<Record>> records(cases.size(),
                                             std::vector<Record>(world_size));
    try {
      run_ranks(world_size, [&](const Group& group) {
        for (size_t i = 0; i < cases.size(); ++i) {
          Record& record = records[i][group->getRank()];
          try {
            RankRun(cases[i], group, record).run();
          } catch (const std::exception& error) {
            record.failure = message_of(error);
            throw;
          }
        }
      });
    } catch (const std::exception&) {
      // It is in the records.
    }
    for (size_t i = 0; i < cases.size(); ++i) {
      SCOPED_TRACE(describe(cases[i]));
      for (int rank = 0; rank < world_size; ++rank) {
        const Record& record = records[i][rank];
        EXPECT_TRUE(record.failure.empty())
            << "rank " << rank << ", operation " << record.sights.size() << ": "
            << record.failure;
      }
      if (HasFailure()) return;
      Model(cases[i], records[i]).check();
      if (HasFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, ShardedFuzzTest, ::testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace brigade
