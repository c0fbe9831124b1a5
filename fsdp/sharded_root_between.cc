// Between passes: whole units, and what is asked of all shards.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/fsdp/sharded_root.h"

namespace brigade {
namespace {

// Of a shard among those of its unit.
size_t place_of(const Unit& unit, const at::Tensor& shard) {
  const auto found = std::ranges::find_if(
      unit.shards,
      [&](const at::Tensor& other) { return other.is_same(shard); });
  return static_cast<size_t>(found - unit.shards.begin());
}

// In float64, also of complex elements.
at::Tensor norm_of(const at::Tensor& tensor, double p) {
  return at::linalg_vector_norm(tensor.is_complex() ? tensor.abs() : tensor, p,
                                at::OptionalIntArrayRef(), /*keepdim=*/false,
                                at::kDouble);
}

std::span<const double> numbers_of(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<double>(), static_cast<size_t>(tensor.numel())};
}

}  // namespace

void ShardedRoot::unshard() {
  await_backward();
  TORCH_CHECK(pass_ == Pass::kNone,
              "fully_shard: unshard() inside of a forward or backward, or of "
              "another unshard().\nCall it between them.");
  claim_kept();
  release_outdated();
  std::vector<size_t> expected;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (!gathers_->is_current(unit)) expected.push_back(unit);
  }
  ask({.words = "gathers all units", .said = expected});
  gathers_->shards_are_written();
  gathers_->begin(expected);
  pass_ = Pass::kApart;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (at::GradMode::is_enabled()) live_calls_.may_be_unseen(unit);
  }
  policy_->refuse_gradients(true);
  for (const Unit& unit : units_) {
    for (const auto& segment : unit.segments) segment->expect_other_memory();
  }
  for (size_t unit = 0; unit < units_.size(); ++unit) need(unit);
}

void ShardedRoot::reshard(bool writes) {
  if (pass_ != Pass::kApart) return;
  std::string unfit;
  for (const Unit& unit : units_) {
    for (const auto& segment : unit.segments) {
      if (writes && unfit.empty()) unfit = segment->describe_unfit_memory();
    }
  }
  pass_ = Pass::kNone;
  policy_->refuse_gradients(false);
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    for (const auto& segment : units_[unit].segments) {
      if (!unfit.empty()) {
        segment->drop_other_memory();
      } else if (writes && segment->is_bound()) {
        segment->read_own_slice();
      }
    }
    release_if_unused(unit);
  }
  TORCH_CHECK_VALUE(unfit.empty(), unfit);
}

void ShardedRoot::unshard(size_t unit) {
  const std::string& name = units_.at(unit).name;
  await_backward();
  if (pass_ == Pass::kApart) return;
  if (policy_->is_out_of_turn(unit)) ask_out_of_turn(unit);
  live_calls_.may_be_unseen(unit);
  is_held_[unit] = 1;
  for (const auto& segment : units_[unit].segments) {
    segment->expect_other_memory();
  }
  if (pass_ == Pass::kNone) {
    claim_kept();
    release_if_outdated(unit);
    const bool is_whole = gathers_->is_claimed(unit);
    ask({.words = absl::StrCat("unshards unit '", name, "'"),
         .words_of_all = "unshards a unit",
         .said = {unit, is_whole ? size_t{1} : size_t{0}}});
    if (is_whole) return;
    gathers_->shards_are_written();
    gathers_->begin({unit});
  }
  pass_over_for(unit);
  gathers_->request(unit, ahead_of(unit), [this, unit] { ask_for(unit); });
}

bool ShardedRoot::await_unit(size_t unit, std::function<void()> on_released) {
  if (!gathers_->is_claimed(unit)) return false;
  try {
    need(unit);
  } catch (...) {
    release_if_unused(unit);
    throw;
  }
  on_released_[unit] = std::move(on_released);
  return true;
}

void ShardedRoot::reshard(size_t unit, bool writes) {
  await_backward();
  if (pass_ == Pass::kApart || num_running_.at(unit) > 0 ||
      num_open_[unit] > 0 || !gathers_->is_claimed(unit)) {
    return;
  }
  std::string unfit;
  if (writes) {
    need(unit);
    for (const auto& segment : units_[unit].segments) {
      if (unfit.empty()) unfit = segment->describe_unfit_memory();
    }
    for (const auto& segment : units_[unit].segments) {
      unfit.empty() ? segment->read_own_slice() : segment->drop_other_memory();
    }
  }
  release_if_unused(unit);
  TORCH_CHECK_VALUE(unfit.empty(), unfit);
}

const Unit& ShardedRoot::unit_of(const Segment& segment) const {
  const auto has_it = [&](const Unit& unit) {
    return std::ranges::any_of(
        unit.segments, [&](const auto& one) { return one.get() == &segment; });
  };
  return *std::ranges::find_if(units_, has_it);
}

at::Tensor ShardedRoot::gather(const Segment& segment,
                               const at::Tensor& shard) {
  const at::NoGradGuard no_grad;
  ask({.words = "gathers shards",
       .said = {static_cast<size_t>(shard.numel())}});
  at::Tensor whole =
      at::empty({segment.layout().whole_numel()}, shard.options());
  whole.narrow(0, segment.rank() * shard.numel(), shard.numel()).copy_(shard);
  transports_.of(unit_of(segment)).all_gather(whole)->waitAndThrow();
  return whole;
}

std::vector<at::Tensor> ShardedRoot::gather_unit(size_t unit) {
  const at::NoGradGuard no_grad;
  const Unit& gathered = units_.at(unit);
  std::vector<at::Tensor> wholes(gathered.shards.size());
  for (const auto& segment : gathered.segments) {
    const at::Tensor whole = gather(*segment, segment->shard());
    for (size_t i = 0; i < segment->shards().size(); ++i) {
      wholes[place_of(gathered, segment->shards()[i])] =
          segment->whole_of(whole, i).clone();
    }
  }
  return wholes;
}

void ShardedRoot::assign_unit(size_t unit, std::span<const at::Tensor> wholes) {
  const Unit& assigned = units_.at(unit);
  for (const auto& segment : assigned.segments) {
    for (size_t i = 0; i < segment->shards().size(); ++i) {
      segment->assign(i, wholes[place_of(assigned, segment->shards()[i])]);
    }
  }
}

bool ShardedRoot::has_own_meshes() const {
  return std::ranges::any_of(
      units_, [](const Unit& unit) { return unit.mesh.has_value(); });
}

bool ShardedRoot::has_other_units_elsewhere() const {
  return std::ranges::any_of(units_, [this](const Unit& unit) {
    return unit.mesh && unit.mesh->size() < group_->getSize();
  });
}

bool ShardedRoot::is_first_replica(size_t unit) const {
  const Unit& asked = units_.at(unit);
  const int rank = group_->getRank();
  return (asked.mesh ? asked.mesh->place_of(rank) : rank) <
         transports_.of(asked).num_shards();
}

// One place for each rank, so that all add up, or compare, in one order.
void ShardedRoot::sum_over_ranks(const at::Tensor& values, bool takes_largest) {
  const at::NoGradGuard no_grad;
  ask({.words = "sums over ranks",
       .said = {static_cast<size_t>(values.numel())}});
  const int num_ranks = group_->getSize();
  at::Tensor by_rank = at::zeros({num_ranks, values.numel()}, values.options());
  by_rank[group_->getRank()].copy_(values);
  transports_.root().all_reduce(by_rank)->waitAndThrow();
  values.copy_(by_rank[0]);
  for (int rank = 1; rank < num_ranks; ++rank) {
    if (takes_largest) {
      at::Tensor largest = values;
      at::maximum_out(largest, values, by_rank[rank]);
    } else {
      values.add_(by_rank[rank]);
    }
  }
}

double ShardedRoot::clip_grad_norm(double max_norm, double p) {
  TORCH_CHECK_VALUE(p > 0, "clip_grad_norm: expected p > 0, found ", p,
                    ".\nGive 2 for the Euclidean norm, or infinity.");
  const at::NoGradGuard no_grad;
  const bool is_max = std::isinf(p);
  std::vector<at::Tensor> norms;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (!is_first_replica(unit)) continue;
    for (const at::Tensor& shard : units_[unit].shards) {
      if (!shard.grad().defined() || shard.numel() == 0) continue;
      norms.push_back(norm_of(shard.grad(), p));
    }
  }
  double total = 0;
  if (!norms.empty()) {
    const at::Tensor on_host = at::stack(norms).cpu();  // a device waits once
    for (const double norm : numbers_of(on_host)) {
      if (!is_max) {
        total += std::pow(norm, p);
      } else if (norm > total || std::isnan(norm)) {
        total = norm;
      }
    }
  }
  const at::Tensor sum = at::full({1}, total, at::kDouble);
  sum_over_ranks(sum, is_max);
  total = sum.item<double>();
  const double norm = is_max ? total : std::pow(total, 1 / p);
  const double factor = max_norm / (norm + 1e-6);
  if (!(factor >= 1)) {  // not a number is handed on
    for (const Unit& unit : units_) {
      for (const at::Tensor& shard : unit.shards) {
        if (shard.grad().defined()) shard.grad().mul_(factor);
      }
    }
  }
  return norm;
}

}  // namespace brigade
