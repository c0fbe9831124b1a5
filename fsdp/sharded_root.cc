#include "brigade/fsdp/sharded_root.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "brigade/fsdp/layout/digest.h"

namespace brigade {
namespace {

// Errors: ValueError for what has no memory.
c10::Device device_of(const std::vector<Unit>& units) {
  for (const Unit& unit : units) {
    TORCH_CHECK_VALUE(
        !unit.segments.front()->device().is_meta(), "fully_shard: unit '",
        unit.name,
        "' is on meta: it has no values.\nMake it anew, of parameters "
        "with memory and values.");
  }
  return units.empty() ? at::kCPU : units.front().segments.front()->device();
}

// The one of all ranks first.
std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups_of(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const MeshTransports& transports) {
  std::vector groups = {group};
  for (auto& own : transports.own_groups()) groups.push_back(std::move(own));
  TORCH_CHECK_VALUE(
      groups.size() <= kMaxGroups, "fully_shard: expected meshes of ",
      kMaxGroups, " process groups at most on a device, found ", groups.size(),
      ".\nShard the units that differ over one mesh.");
  return groups;
}

uint64_t digest_of(std::string_view words, const std::vector<size_t>& said) {
  return Digest()
      .add(std::hash<std::string_view>{}(words))
      .add_all(said)
      .value();
}

// A frozen parameter has an accumulator for gradients, too, as long as this
// lives: whoever gets hold of it then has it when the parameter is thawed.
class AllTrained {
 public:
  explicit AllTrained(std::vector<at::Tensor> parameters)
      : parameters_(std::move(parameters)) {
    for (at::Tensor& parameter : parameters_) {
      was_trained_.push_back(parameter.requires_grad() ? 1 : 0);
      parameter.set_requires_grad(true);
    }
  }
  ~AllTrained() {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      parameters_[i].set_requires_grad(was_trained_[i] != 0);
    }
  }
  AllTrained(const AllTrained&) = delete;
  AllTrained& operator=(const AllTrained&) = delete;

 private:
  std::vector<at::Tensor> parameters_;
  std::vector<char> was_trained_;
};

// Alike on all ranks: units on meshes of their own may have other names there.
std::vector<size_t> first_backward_order(const std::vector<Unit>& units,
                                         const CallDepths& depths) {
  const bool may_differ = std::ranges::any_of(
      units, [](const Unit& unit) { return unit.mesh.has_value(); });
  std::vector<size_t> order(units.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (!may_differ) return backward_order_of(depths.calls(order));
  std::ranges::reverse(order);
  return order;
}

std::vector<std::string> names_of(const std::vector<Unit>& units) {
  std::vector<std::string> names;
  for (const Unit& unit : units) names.push_back(unit.name);
  return names;
}

}  // namespace

ShardedRoot::ShardedRoot(const std::vector<UnitSpec>& units,
                         c10::intrusive_ptr<c10d::ProcessGroup> group,
                         ShardingOptions options)
    : ShardedRoot(make_units(units, group, options), group, options) {}

ShardedRoot::ShardedRoot(std::vector<Unit> units,
                         c10::intrusive_ptr<c10d::ProcessGroup> group,
                         ShardingOptions options)
    : group_(std::move(group)),
      options_(options),
      transports_(group_, options_.num_shards.value_or(group_->getSize()),
                  device_of(units), units, options_.reproducible),
      pool_(streams().device()),
      gradient_memory_(pool_, streams(),
                       std::max<size_t>(options.max_reducing, 1)),
      units_(std::move(units)),
      call_depths_(names_of(units_)),
      live_calls_(units_.size()),
      backward_streams_(streams().device()) {
  Digest fingerprint;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    auto& segments = units_[unit].segments;
    for (size_t i = 0; i < segments.size(); ++i) {
      segments[i]->set_place(unit, i);
    }
  }
  for (const Unit& unit : units_) {
    fingerprint.add(unit.settings.reshards_after_forward ? 1 : 0)
        .add(unit.settings.reshards_to.value_or(0))
        .add(unit.segments.size());
    for (const auto& segment : unit.segments) {
      const int num_shards = transports_.of(unit).num_shards();
      TORCH_CHECK_VALUE(segment->layout().num_ranks() == num_shards,
                        "fully_shard: unit '", unit.name, "' has ",
                        segment->layout().num_ranks(),
                        " shards, its mesh has rows of ", num_shards,
                        " ranks.\nMake it by the same options.");
      fingerprint.add(segment->layout().fingerprint());
    }
  }
  num_running_.assign(units_.size(), 0);
  num_open_.assign(units_.size(), 0);
  is_kept_.assign(units_.size(), 0);
  is_held_.assign(units_.size(), 0);
  on_released_.resize(units_.size());
  gathers_ = std::make_unique<UnitGathers>(units_, transports_, pool_,
                                           options_.prefetch_depth);
  policy_ = std::make_unique<UnitPolicy>(
      units_, transports_, *gathers_, gradient_memory_,
      static_cast<UnitPolicy::Listener&>(*this), fingerprint.value(),
      first_backward_order(units_, call_depths_));
  const AllTrained all_trained(policy_->variables());
  const std::vector<std::vector<at::Tensor>> variables = {policy_->variables()};
  engine_ = std::make_unique<Engine>(
      groups_of(group_, transports_), variables, *policy_,
      EngineOptions{
          .name = "fully_shard",
          .max_unconfirmed_iterations = 0,
          .failure_patience = options_.failure_patience,
          .owns_groups = true,
          .one_backward_per_forward = false,
          .make_hooks = [this](std::span<const std::vector<at::Tensor>> taken,
                               const EngineListener& listener) {
            return std::make_shared<GradientHooks>(taken, listener, *policy_);
          }});
  engine_->connect();
  gathers_->note_waits_in(engine_->progress());
}

ShardedRoot::~ShardedRoot() { alive_ = nullptr; }

std::vector<at::Tensor> ShardedRoot::shards() const {
  std::vector<at::Tensor> all;
  for (const Unit& unit : units_) {
    all.insert(all.end(), unit.shards.begin(), unit.shards.end());
  }
  return all;
}

void ShardedRoot::ask_for(size_t unit) {
  ask({.words = absl::StrCat("needed unit '", units_[unit].name, "' again"),
       .words_of_all = "needed a unit again",
       .said = {unit},
       .wanted = unit});
}

ToldAlike ShardedRoot::ask(const Question& question) {
  try {
    return engine_->ask(question.words,
                        digest_of(question.words_of_all, question.said),
                        question.wanted);
  } catch (...) {
    peers_know_ = true;
    drop_pass();
    throw;
  }
}

void ShardedRoot::set_max_reducing(size_t value) {
  TORCH_CHECK_VALUE(value > 0,
                    "fully_shard: expected room for at least 1 reduction, "
                    "found 0.\nGive 2, for instance.");
  gradient_memory_.set_max_reducing(value);
}

ForwardDtypes ShardedRoot::forward_dtypes(size_t unit) const {
  const UnitSettings& settings = units_.at(unit).settings;
  return {.inputs = settings.cast_forward_inputs ? options_.param_dtype
                                                 : std::nullopt,
          .outputs = settings.output_dtype};
}

ForwardDtypes ShardedRoot::forward_dtypes() const {
  return {.inputs = options_.cast_forward_inputs ? options_.param_dtype
                                                 : std::nullopt,
          .outputs = options_.output_dtype};
}

bool ShardedRoot::holds_gradients() const {
  return std::ranges::any_of(units_, [](const Unit& unit) {
    return std::ranges::any_of(unit.segments, [](const auto& segment) {
      return segment->holds_gradients();
    });
  });
}

std::vector<NamedShard> ShardedRoot::named_shards() const {
  std::vector<NamedShard> all;
  for (const Unit& unit : units_) {
    for (const auto& segment : unit.segments) {
      for (size_t i = 0; i < segment->shards().size(); ++i) {
        const NamedParameter& parameter = segment->parameters()[i];
        all.push_back({.name = parameter.name,
                       .shard = segment->shards()[i],
                       .whole_sizes = parameter.tensor.sizes().vec()});
      }
    }
  }
  return all;
}

void ShardedRoot::shards_changed() {
  for (const Unit& unit : units_) {
    for (const auto& segment : unit.segments) {
      segment->shard().unsafeGetTensorImpl()->bump_version();
    }
  }
}

}  // namespace brigade
