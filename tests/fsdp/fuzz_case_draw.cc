#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <utility>

#include "brigade/tests/fsdp/fuzz_case.h"

namespace brigade::testing {
namespace {

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

class CaseDraw {
 public:
  CaseDraw(uint64_t seed, int world_size) : draw_(1000 * seed + world_size) {
    case_.seed = seed;
    case_.world_size = world_size;
    case_.is_wild = world_size == 1 || draw_.percent(50);
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
    // Before shards change: a unit that a rank still needs again in a forward
    // without backward, say, must be what it was.
    if (case_.is_wild && !operations.back().forwards.empty()) {
      operations.push_back({.kind = Kind::kMeet});
    }
    case_.actions.push_back({.operations = std::move(operations)});
  }

  static std::vector<int> divisors_of(int number) {
    std::vector<int> divisors;
    for (int i = 1; i <= number; ++i) {
      if (number % i == 0) divisors.push_back(i);
    }
    return divisors;
  }

  void draw_options() {
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
                  .takes_input_gradient = draw_.percent(15),
                  .rows = draw_.between(1, 4),
                  .seed = draw_.seed()};
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
    if (draw_.percent(30)) {
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

  size_t draw_forward() {
    const size_t manner = draw_.below(10);
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
    if (draw_.percent(15)) action.push_back(unshard());
    action.push_back(
        {.kind = Kind::kBackward, .forwards = {forward}, .flag = synchronizes});
    if (synchronizes && draw_.percent(25)) {  // never the outermost alone
      action.back().adding_up =
          static_cast<uint32_t>(draw_.below(size_t{1} << num_blocks())) << 1;
    }
    return action;
  }

  Operation unshard() {
    return {.kind = Kind::kUnshard,
            .flag = draw_.percent(50),
            .index = draw_.below(num_blocks() + 1)};
  }

  Operations two_forwards() {
    const size_t first = draw_forward();
    const size_t second = draw_forward();
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
    const size_t forward = draw_forward();
    const int rank = static_cast<int>(draw_.below(case_.world_size));
    const size_t num_calls = case_.forwards[forward][rank].calls.size();
    return {{.kind = Kind::kFailingForward,
             .forwards = {forward},
             .rank = rank,
             .place = draw_.below(num_calls + 1)}};
  }

  Operations failing_backward() {
    const size_t forward = draw_forward();
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
    if (choice < 83) return {unshard()};
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
};

}  // namespace

std::vector<Action> actions_of(const Case& c) {
  std::vector<Action> chosen;
  for (size_t i = 0; i < c.actions.size(); ++i) {
    if ((kOnlyActions >> i & 1) != 0) chosen.push_back(c.actions[i]);
  }
  return chosen;
}

Case draw_case(uint64_t seed, int world_size) {
  return CaseDraw(seed, world_size).run();
}

}  // namespace brigade::testing
