#include "brigade/simulation/step_set_up.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/simulation/checks.h"

namespace brigade {
namespace {

template <typename... Parts>
absl::Status bad_strategy(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat("strategy: ", parts...));
}

absl::Status check_choice(const char* name, const LayerChoice& choice,
                          size_t num_layers) {
  absl::Status status;
  for (const size_t layer : choice.layers) {
    status.Update(check_range("strategy", absl::StrCat("layers of ", name),
                              static_cast<double>(layer), 0,
                              static_cast<double>(num_layers) - 1));
  }
  return status;
}

absl::Status check_strategy(const ModelShape& model, int64_t batch,
                            const Cluster& cluster, const Strategy& strategy) {
  const auto check = [](const char* name, double value, double least,
                        double most) {
    return check_range("strategy", name, value, least, most);
  };
  const size_t num_layers = model.layers.size();
  auto num_parts = static_cast<double>(num_layers);
  for (const ModelLayer& layer : model.layers) {
    num_parts += static_cast<double>(layer.tensors.size());
  }
  if (absl::Status status = first_error({
          check_model(model),
          check_cluster(cluster),
          check("batch", static_cast<double>(batch), 1, 1 << 30),
          check("shard_ranks", strategy.shard_ranks, 0, 1 << 20),
          check("prefetch_depth", strategy.prefetch_depth, 0, 1 << 20),
          check("buffers", strategy.buffers, 1, 1 << 20),
          check("micro_batches", strategy.micro_batches, 1, 100'000),
          check("(layers + tensors) * micro_batches",
                num_parts * strategy.micro_batches, 1, 1e6),
          check("parameter_bytes", strategy.parameter_bytes, 1, 8),
          check("gradient_bytes", strategy.gradient_bytes, 1, 8),
          check("optimizer_bytes", strategy.optimizer_bytes, 0, 64),
          check_bucket_caps(strategy.bucket_caps_bytes),
          check_choice("reshard_after_forward", strategy.kept, num_layers),
          check_choice("checkpoint", strategy.checkpointed, num_layers),
      });
      !status.ok()) {
    return status;
  }
  const bool is_ddp = strategy.kind == StrategyKind::kDdp;
  if (is_ddp && strategy.shard_ranks > 1) {
    return bad_strategy("expected no shard_ranks with ddp, found ",
                        strategy.shard_ranks,
                        "; for hybrid sharding choose another kind");
  }
  if (strategy.next_forward_gather && (is_ddp || !has_buckets(strategy.kind))) {
    return bad_strategy(
        "expected next_forward_gather with zero1 or zero2 only; other "
        "strategies gather no parameters, or always in forward");
  }
  if (strategy.kept.how != LayerChoice::How::kNone &&
      has_buckets(strategy.kind)) {
    return bad_strategy(
        "expected no reshard_after_forward with ddp, zero1 and zero2, whose "
        "parameters are not sharded");
  }
  return absl::OkStatus();
}

// Measured costs must have each collective that the strategy runs.
absl::Status check_costs(const MeasuredCosts& measured, bool is_ddp,
                         const StepSetUp& set_up) {
  if (measured.empty()) return absl::OkStatus();
  const bool shards = set_up.shards.ranks() > 1;
  const auto missing = [](const char* name) {
    return absl::InvalidArgumentError(absl::StrCat(
        "cluster: expected ", name,
        " in costs, which this strategy runs, found none.\nMeasure it, or "
        "leave out costs."));
  };
  if (set_up.replicas.ranks() > 1 && !measured.all_reduce) {
    return missing("all_reduce");
  }
  if (shards && !is_ddp && !measured.all_gather) return missing("all_gather");
  if (shards && !is_ddp && !measured.reduce_scatter) {
    return missing("reduce_scatter");
  }
  return absl::OkStatus();
}

absl::Status set_times(const ModelShape& model, double batch,
                       const Cluster& cluster, StepSetUp& set_up) {
  const double slowdown = compute_slowdown(cluster);
  const Device& device = cluster.device;
  const double flops_per_s = device.flops_per_s * device.utilization;
  for (const ModelLayer& layer : model.layers) {
    if (!layer.forward_s && layer.forward_flops > 0 && flops_per_s == 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "cluster: expected flops_per_s of the device > 0, for layer '",
          layer.name, "' has no forward_s, found 0"));
    }
    const double forward_s = layer.forward_s.value_or(
        layer.forward_flops == 0 ? 0
                                 : layer.forward_flops * batch / flops_per_s);
    set_up.forward_s.push_back(slowdown * forward_s);
    set_up.backward_s.push_back(slowdown *
                                layer.backward_s.value_or(2 * forward_s));
  }
  return absl::OkStatus();
}

std::vector<char> choose(const LayerChoice& choice, size_t num_layers) {
  std::vector<char> chosen(num_layers,
                           choice.how == LayerChoice::How::kAll ? 1 : 0);
  for (const size_t layer : choice.layers) chosen[layer] = 1;
  return chosen;
}

// Backward times, the cost of a bucket, and buckets.
absl::Status plan_buckets(const ModelShape& model, const Cluster& cluster,
                          const Strategy& strategy, StepSetUp& set_up) {
  Backward& backward = set_up.backward;
  for (const ModelLayer& layer : model.layers) {
    for (const int64_t elements : layer.tensors) {
      backward.parameters.push_back(
          {.size_bytes = elements * strategy.gradient_bytes});
    }
  }
  backward.order = reverse_registration_order(backward.parameters.size());
  for (size_t i = model.layers.size(); i-- > 0;) {
    const ModelLayer& layer = model.layers[i];
    if (set_up.checkpointed[i] != 0) backward.end_s += set_up.forward_s[i];
    const auto all = static_cast<double>(layer.elements());
    int64_t ready = 0;
    for (size_t t = layer.tensors.size(); t-- > 0;) {
      ready += layer.tensors[t];
      backward.ready_s.push_back(backward.end_s +
                                 set_up.backward_s[i] *
                                     (static_cast<double>(ready) / all));
    }
    backward.end_s += set_up.backward_s[i];
  }
  const MeasuredCosts& measured = cluster.measured;
  if (set_up.shards.ranks() == 1 && measured.all_reduce) {
    set_up.reduce_cost = *measured.all_reduce;
  } else if (set_up.replicas.ranks() == 1 && measured.reduce_scatter) {
    set_up.reduce_cost = *measured.reduce_scatter;
  } else {
    const auto cost = CollectiveCost::sample([&](int64_t bytes) {
      return run_reduction(static_cast<double>(bytes), set_up, cluster).seconds;
    });
    if (!cost.ok()) return cost.status();
    set_up.reduce_cost = *cost;
  }
  auto plan = strategy.has_exact_plan
                  ? plan_for_cost(backward, set_up.reduce_cost)
                  : plan_by_size(backward.parameters, backward.order,
                                 strategy.bucket_caps_bytes);
  if (!plan.ok()) return plan.status();
  set_up.plan = *std::move(plan);
  set_up.bucket_elements.clear();
  for (const auto& bucket : set_up.plan->buckets()) {
    int64_t bytes = 0;
    for (const size_t parameter : bucket) {
      bytes += backward.parameters[parameter].size_bytes;
    }
    set_up.bucket_elements.push_back(static_cast<double>(bytes) /
                                     strategy.gradient_bytes);
  }
  return absl::OkStatus();
}

// Sets all of `memory` but activations.
void add_up_memory(const ModelShape& model, const Strategy& strategy,
                   StepSetUp& set_up) {
  const double shard = set_up.shard_elements;
  const auto all = static_cast<double>(model.elements());
  const StrategyKind kind = strategy.kind;
  const double parameters = has_buckets(kind) ? all : shard;
  const bool is_sharded = set_up.shards.ranks() > 1;
  double gradients = kind < StrategyKind::kZero2 ? all : shard;
  if (set_up.accumulates && is_sharded && kind >= StrategyKind::kZero2) {
    gradients += all;
  }
  MemoryPerRank& memory = set_up.memory;
  memory.parameters = parameters * strategy.parameter_bytes;
  memory.gradients = gradients * strategy.gradient_bytes;
  memory.optimizer = shard * strategy.optimizer_bytes;
  memory.unsharded = 0;
  if (!is_sharded) return;
  if (kind == StrategyKind::kZero2 && !set_up.accumulates) {
    memory.unsharded =
        strategy.gradient_bytes * largest_sum(set_up.bucket_elements, 2);
  }
  if (has_buckets(kind)) return;
  std::vector<double> resharded = set_up.unit_bytes;
  for (size_t i = 0; i < resharded.size(); ++i) {
    if (set_up.kept[i] == 0) continue;
    memory.unsharded += resharded[i];
    resharded[i] = 0;
  }
  memory.unsharded += largest_sum(
      resharded, set_up.num_buffers + (kind == StrategyKind::kFsdp2 ? 1 : 0));
  if (!set_up.accumulates) {
    memory.unsharded +=
        largest_sum(set_up.gradient_bytes, set_up.num_gradient_buffers);
  }
}

void set_units(const ModelShape& model, const Cluster& cluster,
               const Strategy& strategy, StepSetUp& set_up) {
  const StrategyKind kind = strategy.kind;
  const int ranks = set_up.shards.ranks();
  const double memory_bytes_per_s = cluster.device.memory_bytes_per_s;
  // Reads and writes each byte.
  const auto copy_s = [&](bool copies, double bytes) {
    return copies && ranks > 1 && memory_bytes_per_s > 0
               ? 2 * bytes / memory_bytes_per_s
               : 0;
  };
  const bool by_tensor =
      kind == StrategyKind::kZero3 || kind == StrategyKind::kFsdp2;
  const bool copies_gradients =
      kind == StrategyKind::kFsdp2 || kind == StrategyKind::kBrigade;
  for (const ModelLayer& layer : model.layers) {
    const auto shard =
        static_cast<double>(shard_elements(layer, ranks, by_tensor));
    const double elements = ranks * shard;
    set_up.shard_elements += shard;
    set_up.unit_bytes.push_back(elements * strategy.parameter_bytes);
    set_up.gradient_bytes.push_back(elements * strategy.gradient_bytes);
    set_up.copy_parameters_s.push_back(
        copy_s(kind == StrategyKind::kFsdp2, set_up.unit_bytes.back()));
    set_up.copy_gradients_s.push_back(
        copy_s(copies_gradients, set_up.gradient_bytes.back()));
  }
  if (memory_bytes_per_s > 0) {
    // Reads gradients, reads and writes states, writes parameters.
    const int bytes = 2 * strategy.optimizer_bytes + strategy.gradient_bytes +
                      strategy.parameter_bytes;
    set_up.optimizer_s = set_up.shard_elements * bytes / memory_bytes_per_s;
  }
  const auto depth = static_cast<size_t>(strategy.prefetch_depth);
  const auto buffers = static_cast<size_t>(strategy.buffers);
  set_up.num_buffers = std::min(buffers, depth + 1);
  set_up.num_gradient_buffers =
      buffers + (kind == StrategyKind::kBrigade ? 1 : 0);
  const size_t n = model.layers.size();
  set_up.kept = choose(strategy.kept, n);
  set_up.stays.assign(n, 0);
  if (kind != StrategyKind::kYaFsdp) return;
  for (size_t i = n - std::min(n, set_up.num_buffers); i < n; ++i) {
    set_up.stays[i] = set_up.kept[i] == 0 ? 1 : 0;
  }
}

absl::Status choose_checkpoints(const ModelShape& model, double batch,
                                const Cluster& cluster,
                                const Strategy& strategy, StepSetUp& set_up) {
  const double capacity = cluster.device.memory_bytes;
  if (strategy.checkpointed.how == LayerChoice::How::kFit && capacity > 0) {
    const double others = set_up.memory.total();
    double least = 0;
    auto chosen = checkpoints_to_fit(model, batch, set_up.forward_s,
                                     capacity - others, &least);
    if (!chosen) {
      return bad_strategy(
          "expected checkpoints with which the model fits, found none: "
          "parameters, gradients, optimizer and unsharded units take ",
          number_text(others), " bytes, activations at least ",
          number_text(least), ", the device has ", number_text(capacity), "; ",
          number_text(std::ceil(others + least - capacity)),
          " bytes are missing.\nShard over more ranks or lower the batch.");
    }
    set_up.checkpointed = *std::move(chosen);
  }
  set_up.memory.activations =
      peak_activation_bytes(model, batch, set_up.checkpointed);
  return absl::OkStatus();
}

}  // namespace

CollectiveRun run_reduction(double bytes, const StepSetUp& set_up,
                            const Cluster& cluster) {
  CollectiveRun run =
      run_collective(Collective::kReduceScatter, bytes, set_up.shards, cluster);
  run += run_collective(Collective::kAllReduce, bytes / set_up.shards.ranks(),
                        set_up.replicas, cluster);
  return run;
}

absl::StatusOr<StepSetUp> set_up_step(const ModelShape& model, int64_t batch,
                                      const Cluster& cluster,
                                      const Strategy& strategy) {
  if (absl::Status status = check_strategy(model, batch, cluster, strategy);
      !status.ok()) {
    return status;
  }
  StepSetUp set_up;
  const bool is_ddp = strategy.kind == StrategyKind::kDdp;
  const int shard_ranks = is_ddp                      ? 1
                          : strategy.shard_ranks == 0 ? cluster.ranks()
                                                      : strategy.shard_ranks;
  auto shards = shard_group(cluster, shard_ranks);
  if (!shards.ok()) return shards.status();
  set_up.shards = *shards;
  set_up.replicas = replica_group(cluster, shard_ranks);
  set_up.accumulates =
      strategy.micro_batches > 1 && !strategy.sync_every_micro_batch;
  if (absl::Status status = check_costs(cluster.measured, is_ddp, set_up);
      !status.ok()) {
    return status;
  }
  const auto samples = static_cast<double>(batch);
  if (absl::Status status = set_times(model, samples, cluster, set_up);
      !status.ok()) {
    return status;
  }
  set_units(model, cluster, strategy, set_up);
  set_up.checkpointed = choose(strategy.checkpointed, model.layers.size());
  // Without checkpoints, for the buckets' memory. Their plan is made again.
  const auto update = [&]() -> absl::Status {
    if (has_buckets(strategy.kind)) {
      set_up.backward = {};
      absl::Status status = plan_buckets(model, cluster, strategy, set_up);
      if (!status.ok()) return status;
    }
    add_up_memory(model, strategy, set_up);
    return absl::OkStatus();
  };
  if (absl::Status status = update(); !status.ok()) return status;
  if (absl::Status status =
          choose_checkpoints(model, samples, cluster, strategy, set_up);
      !status.ok()) {
    return status;
  }
  if (strategy.kept.how == LayerChoice::How::kFit) {
    const double capacity = cluster.device.memory_bytes;
    std::vector<double> gather_s;
    for (const double bytes : set_up.unit_bytes) {
      gather_s.push_back(
          run_collective(Collective::kAllGather, bytes, set_up.shards, cluster)
              .seconds);
    }
    set_up.kept =
        units_to_keep(set_up.unit_bytes, gather_s,
                      capacity == 0 ? std::numeric_limits<double>::infinity()
                                    : capacity - set_up.memory.total());
    for (size_t i = 0; i < set_up.kept.size(); ++i) {
      if (set_up.kept[i] != 0) set_up.stays[i] = 0;
    }
  }
  if (absl::Status status = update(); !status.ok()) return status;
  return set_up;
}

}  // namespace brigade
