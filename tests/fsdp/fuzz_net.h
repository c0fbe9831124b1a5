// Networks of random programs: blocks of any order on a stream of one width.

#ifndef BRIGADE_TESTS_FSDP_FUZZ_NET_H_
#define BRIGADE_TESTS_FSDP_FUZZ_NET_H_

#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/fsdp/sharded_root.h"
#include "brigade/tests/fsdp/sharded_net.h"

namespace brigade::testing {

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

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_FSDP_FUZZ_NET_H_
