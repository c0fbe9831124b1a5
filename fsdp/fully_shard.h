// Sharded training of a LibTorch module: each rank holds a part of every
// parameter, gathers a unit's while it runs, and gets its part of the average
// gradient.
//
//   struct NetImpl : torch::nn::Module {
//     at::Tensor forward(at::Tensor x) { return out(second(first(x))); }
//     Sharded<Block> first =
//         register_module("first", Sharded<Block>(Block(64)));
//     Sharded<Block> second =
//         register_module("second", Sharded<Block>(Block(64)));
//     torch::nn::Linear out = register_module("out", torch::nn::Linear(64, 1));
//   };
//   TORCH_MODULE(Net);
//
//   FullySharded model(Net(), scope.group());
//   torch::optim::AdamW optimizer(model.parameters(), 1e-3);
//   for (...) {
//     optimizer.zero_grad();
//     loss(model(x)).backward();
//     optimizer.step();
//   }
//
// A LibTorch module tells nobody that it runs. So what is to be a unit of its
// own is held by Sharded, or is a child, or are some, of a
// torch::nn::Sequential that is itself sharded (unit_choice.h); all other
// parameters are the outermost unit's.
//
// Thread safety: as ShardedRoot.

#ifndef BRIGADE_FSDP_FULLY_SHARD_H_
#define BRIGADE_FSDP_FULLY_SHARD_H_

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "brigade/comm/rank_mesh.h"
#include "brigade/fsdp/forward_dtypes.h"
#include "brigade/fsdp/sharded_root.h"
#include "brigade/fsdp/unit_choice.h"

namespace brigade {

// A module that is a unit of the root that is made of a module above it.
// Registered in between, as "unit", so that a parameter of Sharded<Linear> lin
// is "lin.unit.weight" to LibTorch; without_unit_levels() leaves that out.
class UnitModule : public torch::nn::Module {
 public:
  // `joint_unit`: modules of one name here are one unit; empty: a unit alone.
  explicit UnitModule(std::string joint_unit = "")
      : Module("Sharded"), joint_unit_(std::move(joint_unit)) {}

  const std::string& joint_unit() const { return joint_unit_; }

 private:
  template <typename Holder>
  friend class FullySharded;

  const std::string joint_unit_;

 protected:
  ShardedRoot* root_ = nullptr;  // null: not sharded, or without parameters
  size_t unit_ = 0;
};

template <typename Holder>
class ShardedImpl : public UnitModule {
 public:
  explicit ShardedImpl(Holder module, std::string joint_unit = "")
      : UnitModule(std::move(joint_unit)),
        module_(register_module("unit", module)) {}

  // As the module's. The first argument is a tensor; gradients of the others
  // flow, but don't tell when the unit's backward is over. Inputs and outputs
  // are cast as the unit's settings say (schedule/unit_settings.h); where it is
  // not sharded, nothing is.
  template <typename... Others>
  auto forward(at::Tensor first, Others&&... others) {
    if (root_ == nullptr) {
      return module_->forward(std::move(first),
                              std::forward<Others>(others)...);
    }
    return forward_in(
        root_->forward_dtypes(unit_),
        [this](at::Tensor cast, auto&&... rest) {
          return root_->call(unit_, std::move(cast), [&](at::Tensor input) {
            return module_->forward(std::move(input),
                                    std::forward<decltype(rest)>(rest)...);
          });
        },
        std::move(first), std::forward<Others>(others)...);
  }

  Holder& module() { return module_; }

 private:
  Holder module_;
};

// Holds a module that is a unit. Constructed from the module's holder, and
// perhaps the name of a unit that it is to be in with others. That is for
// modules here and there in a forward, such as the norms of all blocks:
//
//   norm = register_module("norm",
//                          Sharded<LayerNorm>(LayerNorm(options), "norms"));
//
// They are gathered once, with the first of them, stay whole from forward to
// backward, and are reduced once, with the last gradient.
template <typename Holder>
class Sharded : public torch::nn::ModuleHolder<ShardedImpl<Holder>> {
 public:
  using torch::nn::ModuleHolder<ShardedImpl<Holder>>::ModuleHolder;
  using Impl = ShardedImpl<Holder>;

  // ModuleHolder's own does not know forwards that are templates.
  template <typename... Others>
  auto operator()(at::Tensor first, Others&&... others) {
    return this->get()->forward(std::move(first),
                                std::forward<Others>(others)...);
  }
};

// A name as the module without Sharded would have it.
std::string without_unit_levels(std::string name);

struct ModuleUnits {
  std::vector<UnitSpec> specs;
  bool has_outermost = false;  // it is the first
  // And those of Sharded; none: all its parameters are the outermost unit's.
  std::vector<std::pair<UnitModule*, std::optional<size_t>>> modules;
};

// The outermost unit has what no unit below it has, and what several have that
// is tied. Then come units of several UnitModules, which span passes
// (schedule/unit_settings.h), and those of one each, in the order of
// registration. Errors: ValueError if `choice` makes a unit of a module that no
// Sharded holds.
ModuleUnits units_of_module(torch::nn::Module& module,
                            const UnitChoice& choice = {});

// Children of a Sequential, one behind the other, that run in one call.
struct ChildRun {
  std::optional<size_t> unit;  // none: without parameters
  size_t num_children;
};

struct SequentialUnits {
  std::vector<UnitSpec> specs;
  std::vector<ChildRun> runs;
};

// Errors: ValueError if a child has a Sharded inside, or `choice` makes a unit
// of a module that is inside of a child.
SequentialUnits units_of_sequential(const torch::nn::SequentialImpl& sequential,
                                    const UnitChoice& choice = {});

// Collective. Errors: ValueError on all ranks if, on one, what stays as it is,
// a parameter that is ignored or a buffer, shares its memory with one that is
// sharded: they would no longer be tied.
void require_untied(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                    const torch::nn::Module& module,
                    const std::vector<UnitSpec>& sharded);

// What a module has registered when it is sharded.
class RegisteredParameters {
 public:
  RegisteredParameters(const torch::nn::Module& module,
                       const std::vector<UnitSpec>& sharded);

  // Errors: RuntimeError if one that was sharded is gone, or if there is
  // another one that requires a gradient, which would stay on this rank.
  void require(const torch::nn::Module& module) const;

 private:
  std::unordered_set<const c10::TensorImpl*> known_;
  std::unordered_set<const c10::TensorImpl*> sharded_;  // of those
};

template <typename Holder>
class FullySharded {
  static constexpr bool kIsSequential =
      std::is_same_v<Holder, torch::nn::Sequential>;

 public:
  // Collective. Errors: as ShardedRoot's; ValueError if the module has no
  // parameters, or not the units that are chosen.
  FullySharded(Holder module, c10::intrusive_ptr<c10d::ProcessGroup> group,
               ShardingOptions options = {}, const UnitChoice& choice = {})
      : module_(std::move(module)) {
    if constexpr (kIsSequential) {
      SequentialUnits units = units_of_sequential(*module_, choice);
      runs_ = std::move(units.runs);
      make_root(std::move(units.specs), std::move(group), options);
      return;
    }
    ModuleUnits units = units_of_module(*module_, choice);
    has_outermost_unit_ = units.has_outermost;
    make_root(std::move(units.specs), std::move(group), options);
    for (const auto& [module_of_unit, unit] : units.modules) {
      if (!unit) continue;
      module_of_unit->root_ = root_.get();
      module_of_unit->unit_ = *unit;
    }
  }

  // The same over the rows of a mesh (comm/rank_mesh.h). REQUIRES: it outlives
  // this object.
  FullySharded(Holder module, const RankMesh& mesh,
               ShardingOptions options = {}, const UnitChoice& choice = {})
      : FullySharded(std::move(module), mesh.group(),
                     shard_rows_of(mesh, std::move(options)), choice) {}
  FullySharded(Holder module, RankMesh&& mesh, ShardingOptions options = {},
               const UnitChoice& choice = {}) = delete;

  ~FullySharded() {
    if (kIsSequential) return;
    for (const auto& child : module_->modules(/*include_self=*/true)) {
      if (auto* unit = dynamic_cast<UnitModule*>(child.get())) {
        unit->root_ = nullptr;
      }
    }
  }
  FullySharded(const FullySharded&) = delete;
  FullySharded& operator=(const FullySharded&) = delete;

  // The module's forward; its first argument is a tensor. Inputs and outputs
  // are cast as the options say, or, once they have been changed, the settings
  // of the outermost unit. Errors: the module's;
  // ShardedRoot::begin_forward()'s; cast_tensors()' (hooks/tensor_casts.h).
  template <typename... Others>
  auto operator()(at::Tensor first, Others&&... others) {
    return root_->forward([&] {
      registered_->require(*module_);
      return forward_in(
          has_outermost_unit_ ? root_->forward_dtypes(0)
                              : root_->forward_dtypes(),
          [this](at::Tensor cast, auto&&... rest) {
            return run(std::move(cast), std::forward<decltype(rest)>(rest)...);
          },
          std::move(first), std::forward<Others>(others)...);
    });
  }

  // What an optimizer is given: this rank's parts, whose `.grad` is the average
  // over ranks.
  std::vector<at::Tensor> parameters() const { return root_->shards(); }

  // The same with the names of the whole parameters, in the order of units, and
  // their sizes, for groups of an optimizer:
  //
  //   for (const NamedShard& named : model.named_shards()) {
  //     auto& group = named.whole_sizes.size() > 1 ? decayed : others;
  //     group.push_back(named.shard);
  //   }
  std::vector<NamedShard> named_shards() const { return root_->named_shards(); }

  ShardedRoot& root() { return *root_; }
  const Holder& module() const { return module_; }

  // Whole parameters until it ends. Collective, at both ends.
  class Unsharded {
   public:
    Unsharded(ShardedRoot& root, bool writes) : root_(root), writes_(writes) {
      root_.unshard();
    }
    // Errors: as ShardedRoot::reshard(), unless another one is on its way.
    ~Unsharded() noexcept(false) {
      const bool is_unwinding = std::uncaught_exceptions() > num_exceptions_;
      try {
        root_.reshard(writes_);
      } catch (...) {
        if (!is_unwinding) throw;
      }
    }
    Unsharded(const Unsharded&) = delete;
    Unsharded& operator=(const Unsharded&) = delete;

   private:
    ShardedRoot& root_;
    const bool writes_;
    const int num_exceptions_ = std::uncaught_exceptions();
  };
  // `writes`: what is changed inside becomes the parameters' value; alike on
  // all ranks.
  [[nodiscard]] Unsharded unsharded(bool writes = false) {
    return Unsharded(*root_, writes);
  }

 private:
  void make_root(std::vector<UnitSpec> specs,
                 c10::intrusive_ptr<c10d::ProcessGroup> group,
                 ShardingOptions options) {
    TORCH_CHECK_VALUE(!specs.empty(),
                      "fully_shard: the module has no parameters.\nShard one "
                      "that has some.");
    // What ends forward begins backward: it stays whole in between.
    UnitSpec& kept = kIsSequential ? specs.back() : specs.front();
    if (!kept.reshards_after_forward) kept.reshards_after_forward = false;
    require_untied(group, *module_, specs);
    root_ = std::make_unique<ShardedRoot>(specs, std::move(group), options);
    registered_.emplace(*module_, specs);
    if (has_outermost_unit_) {
      root_->settings(0).output_dtype = options.output_dtype;
    }
  }

  template <typename... Others>
  auto run(at::Tensor first, Others&&... others) {
    if constexpr (kIsSequential) {
      return run_children(std::move(first));
    } else {
      const auto run_module = [&](at::Tensor input) {
        return module_->forward(std::move(input),
                                std::forward<Others>(others)...);
      };
      return has_outermost_unit_ ? root_->call(0, std::move(first), run_module)
                                 : run_module(std::move(first));
    }
  }

  at::Tensor run_children(at::Tensor x) {
    auto child = module_->begin();
    for (const ChildRun& run : runs_) {
      const auto end = child + static_cast<ptrdiff_t>(run.num_children);
      const auto run_all = [&](at::Tensor value) {
        for (; child != end; ++child) {
          value = child->template forward<at::Tensor>(std::move(value));
        }
        return value;
      };
      x = run.unit
              ? forward_in(
                    root_->forward_dtypes(*run.unit),
                    [&](at::Tensor cast) {
                      return root_->call(*run.unit, std::move(cast), run_all);
                    },
                    std::move(x))
              : run_all(std::move(x));
    }
    return x;
  }

  Holder module_;
  std::vector<ChildRun> runs_;  // of a Sequential
  std::optional<RegisteredParameters> registered_;
  bool has_outermost_unit_ = false;
  std::unique_ptr<ShardedRoot> root_;
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_FULLY_SHARD_H_
