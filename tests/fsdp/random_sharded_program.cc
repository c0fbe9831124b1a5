#include "brigade/tests/fsdp/random_sharded_program.h"

#include <algorithm>
#include <initializer_list>
#include <random>
#include <sstream>
#include <utility>
#include <variant>

namespace brigade {
namespace sharded_programs_test {
namespace {

class Draw {
 public:
  explicit Draw(uint64_t seed) : random_(seed) {}
  // 0 to n - 1.
  size_t below(size_t n) { return random_() % n; }
  bool chance(double p) {
    return static_cast<double>(random_() % 1000) < p * 1000;
  }
  template <typename T>
  T one_of(std::initializer_list<T> values) {
    return *(values.begin() + below(values.size()));
  }

 private:
  std::mt19937_64 random_;
};

const char* name_of(Kind kind) {
  constexpr const char* kNames[] = {
      "forward",     "backward",        "input gradient",   "drop forwards",
      "evaluate",    "zero grad",       "optimizer step",   "clip",
      "synchronize", "reduce",          "uneven step",      "unshard",
      "reshard",     "failing forward", "failing backward", "freeze",
      "settings"};
  return kNames[static_cast<size_t>(kind)];
}

class PlanMaker {
 public:
  explicit PlanMaker(uint64_t seed) : draw_(seed * 7919 + 1) {
    plan_.seed = seed;
    plan_.world_size = static_cast<int>(1 + seed % 4);
  }

  Plan make() {
    draw_model();
    draw_options();
    do_ranks_differ_ = draw_.chance(0.5);
    const double change = draw_.one_of({0.0, 0.2, 1.0});  // of paths, per step
    for (int i = 0; i < 3; ++i) paths_.push_back(draw_paths());
    const size_t favourite = draw_.below(kNumTemplates);
    for (int step = 0; step < 7; ++step) {
      for (Paths& paths : paths_) {
        if (draw_.chance(change)) paths = draw_paths();
      }
      add_between();
      add_step(draw_.chance(0.5) ? favourite : draw_.below(kNumTemplates));
    }
    return std::move(plan_);
  }

 private:
  static constexpr size_t kNumTemplates = 14;

  void draw_model() {
    const size_t dtypes = draw_.below(4);  // 0: float32, 1: mixed
    plan_.dtype = dtypes == 0 ? at::kFloat : at::kDouble;
    plan_.is_exact = dtypes > 1;
    const auto dtype = [&] {
      return dtypes == 1 && draw_.chance(0.3) ? at::kFloat : plan_.dtype;
    };
    const bool has_units = draw_.chance(0.9);
    for (size_t i = 0; i < 2 + draw_.below(3); ++i) {
      BlockPlan block = {};
      block.is_unit = has_units && draw_.chance(0.8);
      block.is_inner_unit = has_units && draw_.chance(0.4);
      block.is_tied = !block.is_inner_unit && draw_.chance(0.3);
      block.is_bias_frozen = draw_.chance(0.2);
      block.dtype = dtype();
      block.bias_dtype = dtype();
      plan_.blocks.push_back(block);
    }
    plan_.has_joint_norms = draw_.chance(0.4);
    plan_.is_adamw = draw_.chance(0.5);
    plan_.is_optimizer_first = draw_.chance(0.5);
  }

  void draw_options() {
    FullyShardOptions& options = plan_.options;
    options.reshard_after_forward = draw_.chance(0.7);
    options.prefetch_depth = draw_.below(4);
    plan_.max_reducing = 1 + draw_.below(3);
    options.reproducible = draw_.chance(0.2);
    if (plan_.world_size == 4) {
      if (draw_.chance(0.3)) options.num_shards = draw_.one_of({1, 2});
      if (!options.num_shards && draw_.chance(0.4))
        options.reshard_after_forward = 2;
    } else if (draw_.chance(0.1)) {
      options.num_shards = 1;
    }
  }

  Path draw_path() {
    Path path = {};
    const size_t num_groups = 1 + draw_.below(3);
    for (size_t i = 0; i < num_groups; ++i) {
      CallGroup group = {};
      for (size_t j = 0; j < 1 + draw_.below(3); ++j) {
        group.calls.push_back({.block = draw_.below(plan_.blocks.size()),
                               .uses_norm = draw_.chance(0.7),
                               .uses_inner = draw_.chance(0.7)});
      }
      group.is_checkpointed = draw_.chance(0.3);
      path.groups.push_back(std::move(group));
    }
    path.uses_rare = draw_.chance(0.3);
    path.keeps_view = draw_.chance(0.3);
    return path;
  }

  Paths draw_paths() {
    const bool is_straight = draw_.chance(0.4);  // all blocks, once each
    Path first = draw_path();
    if (is_straight) {
      first.groups = {{}};
      for (size_t i = 0; i < plan_.blocks.size(); ++i) {
        first.groups[0].calls.push_back(
            {.block = i, .uses_norm = true, .uses_inner = true});
      }
    }
    Paths paths;
    for (int rank = 0; rank < plan_.world_size; ++rank) {
      Path path = first;
      if (do_ranks_differ_ && rank > 0) {
        switch (draw_.below(5)) {
          case 0:
            path.groups.clear();
            break;
          case 1:
            path.groups.pop_back();
            break;
          case 2:
            std::ranges::reverse(path.groups[0].calls);
            break;
          case 3:
            path = draw_path();
            break;
          default:
            break;
        }
      }
      paths.push_back(std::move(path));
    }
    return paths;
  }

  Operation& add(Kind kind) {
    plan_.operations.push_back({.kind = kind,
                                .rank = static_cast<int>(draw_.below(
                                    static_cast<size_t>(plan_.world_size))),
                                .index = draw_.below(1000),
                                .seed = ++num_seeds_});
    return plan_.operations.back();
  }

  void add_forward() {
    Operation& op = add(Kind::kForward);
    op.paths = paths_[num_open_++ % paths_.size()];
    op.is_on_thread = draw_.chance(0.1);
  }

  // `loss`: 0, 1; 2: both. `retains`: the graph.
  void add_backward(std::vector<size_t> forwards, size_t loss = 0,
                    bool retains = false) {
    Operation& op = add(Kind::kBackward);
    op.forwards = std::move(forwards);
    op.loss = loss;
    op.flag = retains;
    op.is_on_thread = draw_.chance(0.1);
  }

  void add_between() {
    if (draw_.chance(0.3)) add(Kind::kEvaluate).paths = paths_[draw_.below(3)];
    if (draw_.chance(0.15)) add(Kind::kFreeze).flag = draw_.chance(0.5);
    if (draw_.chance(0.2)) add(Kind::kChangeSettings).flag = draw_.chance(0.5);
    if (draw_.chance(0.15)) {
      add(Kind::kUnshard).flag = draw_.chance(0.5);
      add(Kind::kReshard);
    }
    num_open_ = 0;
    if (draw_.chance(0.15)) {
      add(Kind::kFailForward).paths = paths_[0];
    }
    if (draw_.chance(0.15)) {
      add_forward();
      add(Kind::kFailBackward).forwards = {0};
      num_open_ = 0;
    }
  }

  void add_synchronize(bool value) { add(Kind::kSynchronize).flag = value; }

  void add_step(size_t form) {
    if (draw_.chance(0.8)) add(Kind::kZeroGrad).flag = draw_.chance(0.7);
    switch (form) {
      case 0:
      case 1:
      case 2:
        add_forward();
        add_backward({0});
        break;
      case 3:  // several forwards, one backward
        add_forward();
        add_forward();
        add_backward({0, 1}, 2);
        break;
      case 4:  // several micro-batches, one reduction
        add_synchronize(false);
        add_forward();
        add_backward({0});
        if (draw_.chance(0.3)) add(Kind::kEvaluate).paths = paths_[1];
        if (draw_.chance(0.2)) {
          add_forward();
          add(Kind::kFailBackward).forwards = {1};
          num_open_ = 0;
          add_forward();
          add_backward({0});
          num_open_ = 1;
        }
        add_forward();
        add_synchronize(true);
        add_backward({1});
        break;
      case 5:
        add_synchronize(false);
        add_forward();
        add_forward();
        add_backward({0});
        add_backward({1}, 1);
        add_synchronize(true);
        add(Kind::kReduce);
        break;
      case 6:  // twice through one graph
        add_forward();
        add_backward({0}, 0, /*retains=*/true);
        add_backward({0}, 0);
        break;
      case 7:  // two losses
        add_forward();
        add_backward({0}, 0, /*retains=*/true);
        add_backward({0}, 1);
        break;
      case 8:
        add_forward();
        add(Kind::kInputGradient).forwards = {0};
        add_backward({0});
        break;
      case 9:
        add_forward();
        add(Kind::kDropForwards);
        num_open_ = 0;
        add_forward();
        add_backward({0});
        break;
      case 10:
        add_forward();
        add(Kind::kEvaluate).paths = paths_[1];
        add_backward({0});
        break;
      case 11: {
        Operation& op = add(Kind::kUnevenStep);
        op.paths = paths_[0];
        op.flag = draw_.chance(0.3);  // two forwards
        for (int rank = 0; rank < plan_.world_size; ++rank) {
          op.has_data.push_back(draw_.chance(0.6));
        }
        break;
      }
      case 12:
        add(Kind::kUnshard);
        add_forward();
        add_backward({0});
        add(Kind::kReshard);
        break;
      case 13: {  // backwards in the forwards' order or not
        add_forward();
        add_forward();
        const size_t first = draw_.below(2);
        add_backward({first}, 2);
        add_backward({1 - first}, 2);
        break;
      }
      default:
        break;
    }
    num_open_ = 0;
    add(Kind::kDropForwards);
    if (draw_.chance(0.3)) add(Kind::kClip);
    add(Kind::kOptimizerStep);
  }

  Draw draw_;
  Plan plan_ = {};
  bool do_ranks_differ_ = false;
  std::vector<Paths> paths_;
  size_t num_open_ = 0;
  uint64_t num_seeds_ = 0;
};

}  // namespace

Plan make_plan(uint64_t seed) { return PlanMaker(seed).make(); }

std::string describe(const Plan& plan) {
  std::ostringstream text;
  text << "seed " << plan.seed << ", " << plan.world_size << " ranks, "
       << (plan.is_exact ? "float64" : "mixed or float32") << ", shards "
       << plan.options.num_shards.value_or(plan.world_size) << ", reshard "
       << std::visit([](auto value) { return int(value); },
                     plan.options.reshard_after_forward)
       << ", prefetch " << plan.options.prefetch_depth << ", max_reducing "
       << plan.max_reducing << ", joint norms " << plan.has_joint_norms
       << ", units";
  for (const BlockPlan& block : plan.blocks) {
    text << " " << block.is_unit << block.is_inner_unit << block.is_tied
         << block.is_bias_frozen;
  }
  return text.str();
}

std::string describe(const Operation& op) {
  std::ostringstream text;
  text << name_of(op.kind);
  for (const size_t forward : op.forwards) text << " f" << forward;
  text << " loss " << op.loss << (op.flag ? " flag" : "")
       << (op.is_on_thread ? " thread" : "") << " rank " << op.rank << " index "
       << op.index;
  for (size_t rank = 0; rank < op.paths.size(); ++rank) {
    text << " |";
    for (const CallGroup& group : op.paths[rank].groups) {
      text << " ";
      if (group.is_checkpointed) text << "C";
      for (const Call& call : group.calls) {
        text << call.block << (call.uses_norm ? "n" : "")
             << (call.uses_inner ? "i" : "");
      }
    }
    if (op.paths[rank].uses_rare) text << " rare";
    if (op.paths[rank].keeps_view) text << " view";
  }
  return text.str();
}

}  // namespace sharded_programs_test
}  // namespace brigade
