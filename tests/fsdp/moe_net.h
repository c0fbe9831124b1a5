// A network for tests of which ranks hold different parts, of whole numbers:
// all its sums are exact, and have no order.
//
// Unit 0, the outermost, and unit 1 are on all ranks. Of each unit from 2 on
// there are several, each on some ranks.

#ifndef BRIGADE_TESTS_FSDP_MOE_NET_H_
#define BRIGADE_TESTS_FSDP_MOE_NET_H_

#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/fsdp/sharded_root.h"

namespace brigade::testing {

// Which of a unit's modules a rank has.
struct ExpertMesh {
  std::function<int(int rank)> group_of;
  std::optional<int> num_shards = std::nullopt;

  UnitMesh of(int rank, int num_ranks) const {
    UnitMesh mesh = {.num_shards = num_shards};
    for (int other = 0; other < num_ranks; ++other) {
      if (group_of(other) == group_of(rank)) mesh.ranks.push_back(other);
    }
    return mesh;
  }
};

struct MoeLayout {
  int num_ranks = 4;
  std::optional<int> num_shards = std::nullopt;  // of the root
  std::vector<ExpertMesh> experts = {};
};

// Whole, by name.
using Tensors = std::map<std::string, at::Tensor>;

class MoeNet {
 public:
  // Of one rank. Makes those of its parameters that `tensors` lacks.
  MoeNet(const MoeLayout& layout, int rank, Tensors& tensors)
      : layout_(layout), rank_(rank) {
    for (size_t unit = 0; unit < num_units(); ++unit) {
      auto& own = parameters_.emplace_back();
      for (const char* kind : {"weight", "bias"}) {
        const std::string name = absl::StrCat(name_of(unit), ".", kind);
        at::Tensor& tensor = tensors[name];
        if (!tensor.defined()) tensor = values_of(name).requires_grad_();
        own.emplace_back(name, tensor);
      }
    }
  }

  size_t num_units() const { return 2 + layout_.experts.size(); }

  std::string name_of(size_t unit) const {
    if (unit < 2) return unit == 0 ? "head" : "dense";
    return absl::StrCat("experts", unit - 2, ".",
                        layout_.experts[unit - 2].group_of(rank_));
  }

  std::vector<UnitSpec> units() const {
    std::vector<UnitSpec> specs;
    for (size_t unit = 0; unit < num_units(); ++unit) {
      UnitSpec& spec = specs.emplace_back(UnitSpec{.name = name_of(unit)});
      for (const auto& [name, tensor] : parameters_[unit]) {
        spec.parameters.push_back({.name = name, .tensor = tensor});
      }
      if (unit == 0) spec.reshards_after_forward = false;
      if (unit >= 2) spec.mesh = mesh_of(unit);
    }
    return specs;
  }

  UnitMesh mesh_of(size_t unit) const {
    return layout_.experts[unit - 2].of(rank_, layout_.num_ranks);
  }
  // Ranks whose sums a unit's gradients are divided by.
  int num_averaged(size_t unit) const {
    return unit < 2 ? layout_.num_ranks : mesh_of(unit).size();
  }
  const std::vector<std::pair<std::string, at::Tensor>>& parameters(
      size_t unit) const {
    return parameters_[unit];
  }

  at::Tensor input(int step) const {
    return (torch::arange(7, torch::kDouble) + rank_ + 2 * step).remainder(4) -
           1;
  }

  // A loss, by whatever calls the units: `call(unit, input, run)`.
  template <typename Call>
  at::Tensor loss(int step, const std::set<size_t>& left_out,
                  const Call& call) const {
    const auto run = [this](size_t unit, const at::Tensor& in) {
      return in * parameters_[unit][0].second + parameters_[unit][1].second;
    };
    return call(0, input(step),
                [&](at::Tensor h) {
                  for (size_t unit = 1; unit < num_units(); ++unit) {
                    if (left_out.contains(unit)) continue;
                    h = call(unit, h, [&](const at::Tensor& in) {
                      return run(unit, in);
                    });
                  }
                  return run(0, h);
                })
        .sum();
  }
  at::Tensor plain_loss(int step, const std::set<size_t>& left_out = {}) const {
    return loss(
        step, left_out,
        [](size_t, const at::Tensor& in, const auto& run) { return run(in); });
  }
  at::Tensor sharded_loss(ShardedRoot& root, int step,
                          const std::set<size_t>& left_out = {}) const {
    return root.forward([&] {
      return loss(step, left_out,
                  [&](size_t unit, const at::Tensor& in, const auto& run) {
                    return root.call(unit, in, run);
                  });
    });
  }

 private:
  static at::Tensor values_of(const std::string& name) {
    int64_t seed = 0;
    for (const char letter : name) seed = 3 * seed + letter;
    return (torch::arange(7, torch::kDouble) * 3 + seed % 100).remainder(5) - 2;
  }

  const MoeLayout layout_;
  const int rank_;
  std::vector<std::vector<std::pair<std::string, at::Tensor>>> parameters_;
};

// All ranks in one thread.
class MoeReference {
 public:
  explicit MoeReference(const MoeLayout& layout) : layout_(layout) {
    for (int rank = 0; rank < layout_.num_ranks; ++rank) {
      nets_.push_back(std::make_unique<MoeNet>(layout_, rank, tensors_));
    }
  }

  const MoeNet& net(int rank) const { return *nets_[rank]; }
  const Tensors& tensors() const { return tensors_; }

  // Adds a backward of each rank to gradients.
  void backward(int step,
                const std::function<std::set<size_t>(int)>& left_out = {}) {
    for (int rank = 0; rank < layout_.num_ranks; ++rank) {
      nets_[rank]
          ->plain_loss(step, left_out ? left_out(rank) : std::set<size_t>())
          .backward();
    }
  }

  // What the gradient of a rank's parameter is to be.
  at::Tensor gradient(int rank, size_t unit, size_t parameter) const {
    const MoeNet& net = *nets_[rank];
    const at::Tensor& sum = net.parameters(unit)[parameter].second.grad();
    return (sum.defined() ? sum : torch::zeros({7}, torch::kDouble)) *
           (1.0 / net.num_averaged(unit));
  }

  // Whole numbers stay such.
  void step() {
    const torch::NoGradGuard no_grad;
    for (auto& [name, tensor] : tensors_) {
      if (tensor.grad().defined()) tensor.sub_(tensor.grad().sign());
      tensor.mutable_grad() = at::Tensor();
    }
  }

 private:
  const MoeLayout layout_;
  Tensors tensors_;
  std::vector<std::unique_ptr<MoeNet>> nets_;
};

inline void step_shards(const ShardedRoot& root) {
  const torch::NoGradGuard no_grad;
  for (at::Tensor shard : root.shards()) {
    if (shard.grad().defined()) shard.sub_(shard.grad().sign());
    shard.mutable_grad() = at::Tensor();
  }
}

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_FSDP_MOE_NET_H_
