#include "brigade/simulation/training_step.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/planning/planners.h"

namespace brigade {
namespace {

template <typename... Parts>
absl::Status bad_step(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

double largest_sum(std::vector<double> bytes, size_t count) {
  std::ranges::sort(bytes, std::greater<>());
  bytes.resize(std::min(count, bytes.size()));
  return std::accumulate(bytes.begin(), bytes.end(), 0.0);
}

// A layer.
struct Unit {
  // With compute_slowdown().
  double forward_s = 0;
  double backward_s = 0;
  double copy_parameters_s = 0;
  double copy_gradients_s = 0;
  // Unsharded, with padding.
  double parameter_bytes = 0;
  double gradient_bytes = 0;

  double gathered_s = 0;  // end of the all-gathers of its buckets
};

class Simulation {
 public:
  Simulation(const ModelShape& model, int64_t batch, const Cluster& cluster,
             const Strategy& strategy)
      : model_(model),
        batch_(static_cast<double>(batch)),
        cluster_(cluster),
        strategy_(strategy),
        kind_(strategy.kind),
        num_buffers_(
            kind_ == StrategyKind::kBrigade
                ? strategy.prefetch_depth + 1
                : std::min(strategy.buffers, strategy.prefetch_depth + 1)),
        num_gradient_buffers_(strategy.buffers),
        accumulates_(strategy.micro_batches > 1 &&
                     !strategy.sync_every_micro_batch) {}

  // Errors: those of simulate_step(), except overflow.
  absl::Status set_up() {
    const int shard_ranks = kind_ == StrategyKind::kDdp ? 1
                            : strategy_.shard_ranks == 0
                                ? cluster_.ranks()
                                : strategy_.shard_ranks;
    const auto shards = shard_group(cluster_, shard_ranks);
    if (!shards.ok()) return shards.status();
    shards_ = *shards;
    replicas_ = replica_group(cluster_, shard_ranks);
    absl::Status status = check_costs();
    status.Update(add_units());
    if (!status.ok()) return status;
    kept_ = strategy_.kept.value_or(std::vector<char>());
    kept_.resize(num_layers());
    checkpointed_ = strategy_.checkpointed.value_or(std::vector<char>());
    checkpointed_.resize(num_layers());
    if (has_buckets(kind_)) status = plan_buckets();
    if (!status.ok()) return status;
    add_up_memory();
    if (!strategy_.checkpointed) {
      status = choose_checkpoints();
      // Recomputing delays gradients.
      if (has_buckets(kind_)) status.Update(plan_buckets());
      if (!status.ok()) return status;
    }
    step_.memory.activations =
        peak_activation_bytes(model_, batch_, checkpointed_);
    if (!strategy_.kept) choose_kept_units();
    add_up_memory();
    return absl::OkStatus();
  }

  // REQUIRES: set_up().
  TrainingStep run() {
    const bool buckets = has_buckets(kind_);
    if (strategy_.next_forward_gather) gather_buckets();
    for (int m = 0; m < strategy_.micro_batches; ++m) {
      const bool syncs =
          strategy_.sync_every_micro_batch || m + 1 == strategy_.micro_batches;
      run_layers(/*is_forward=*/true, syncs);
      const double backward_s = free_s(Stream::kCompute);
      run_layers(/*is_forward=*/false, syncs);
      if (buckets && syncs) reduce_buckets(backward_s);
      // A backward ends with its reductions.
      free_s(Stream::kCompute) = end_s();
    }
    if (optimizer_s_ > 0) {
      compute("optimizer", optimizer_s_, 0, step_.optimizer_s);
    }
    const bool gathers = buckets && kind_ != StrategyKind::kDdp;
    if (gathers && !strategy_.next_forward_gather) gather_buckets();
    finish();
    return std::move(step_);
  }

 private:
  size_t num_layers() const { return model_.layers.size(); }
  bool is_sharded() const { return shards_.ranks() > 1; }
  bool has_units() const { return is_sharded() && !has_buckets(kind_); }
  // From forward to backward.
  bool stays_unsharded(size_t unit) const {
    return kept_[unit] != 0 || (kind_ == StrategyKind::kYaFsdp &&
                                unit + num_buffers_ >= num_layers());
  }

  // ---- Set-up.

  // Measured costs must have each collective that the strategy runs.
  absl::Status check_costs() const {
    const auto& measured = cluster_.measured;
    for (const auto& [collective, name, runs] :
         {std::tuple(Collective::kAllReduce, "all_reduce",
                     replicas_.ranks() > 1),
          std::tuple(Collective::kAllGather, "all_gather", is_sharded()),
          std::tuple(Collective::kReduceScatter, "reduce_scatter",
                     is_sharded())}) {
      if (!runs || measured.empty() || measured.contains(collective)) continue;
      return bad_step("cluster: expected ", name,
                      " in costs, which this strategy runs, found none.\n"
                      "Measure it, or leave out costs.");
    }
    return absl::OkStatus();
  }

  absl::Status add_units() {
    const double slowdown = compute_slowdown(cluster_);
    const Device& device = cluster_.device;
    const double flops_per_s = device.flops_per_s * device.utilization;
    const double memory_bytes_per_s = device.memory_bytes_per_s;
    // Reads and writes each byte.
    const auto copy_s = [&](bool copies, double bytes) {
      return copies && is_sharded() && memory_bytes_per_s > 0
                 ? 2 * bytes / memory_bytes_per_s
                 : 0;
    };
    const bool is_fsdp2 = kind_ == StrategyKind::kFsdp2;
    const bool by_tensor = is_fsdp2 || kind_ == StrategyKind::kZero3;
    for (const ModelLayer& layer : model_.layers) {
      if (!layer.forward_s && layer.forward_flops > 0 && flops_per_s == 0) {
        return bad_step(
            "cluster: expected flops_per_s of the device > 0, for layer '",
            layer.name, "' has no forward_s, found 0");
      }
      const double forward_s = layer.forward_s.value_or(
          layer.forward_flops == 0
              ? 0
              : layer.forward_flops * batch_ / flops_per_s);
      const auto shard = static_cast<double>(
          shard_elements(layer, shards_.ranks(), by_tensor));
      shard_elements_ += shard;
      Unit& unit = units_.emplace_back();
      unit.forward_s = slowdown * forward_s;
      unit.backward_s = slowdown * layer.backward_s.value_or(2 * forward_s);
      unit.parameter_bytes =
          shards_.ranks() * shard * strategy_.parameter_bytes;
      unit.gradient_bytes = shards_.ranks() * shard * strategy_.gradient_bytes;
      unit.copy_parameters_s = copy_s(is_fsdp2, unit.parameter_bytes);
      unit.copy_gradients_s = copy_s(
          is_fsdp2 || kind_ == StrategyKind::kBrigade, unit.gradient_bytes);
    }
    if (memory_bytes_per_s > 0) {
      // Reads gradients, reads and writes states, writes parameters.
      const int bytes = 2 * strategy_.optimizer_bytes +
                        strategy_.gradient_bytes + strategy_.parameter_bytes;
      optimizer_s_ = shard_elements_ * bytes / memory_bytes_per_s;
    }
    return absl::OkStatus();
  }

  // Sets backward times, the cost of a bucket, and buckets.
  absl::Status plan_buckets() {
    backward_ = {};
    for (const ModelLayer& layer : model_.layers) {
      for (const int64_t elements : layer.tensors) {
        backward_.parameters.push_back(
            {.size_bytes = elements * strategy_.gradient_bytes});
      }
    }
    backward_.order = reverse_registration_order(backward_.parameters.size());
    for (size_t i = num_layers(); i-- > 0;) {
      const ModelLayer& layer = model_.layers[i];
      if (checkpointed_[i] != 0) backward_.end_s += units_[i].forward_s;
      const auto all = static_cast<double>(layer.elements());
      int64_t ready = 0;
      for (size_t t = layer.tensors.size(); t-- > 0;) {
        ready += layer.tensors[t];
        backward_.ready_s.push_back(backward_.end_s +
                                    units_[i].backward_s *
                                        (static_cast<double>(ready) / all));
      }
      backward_.end_s += units_[i].backward_s;
    }
    const auto measured = cluster_.measured.find(
        is_sharded() ? Collective::kReduceScatter : Collective::kAllReduce);
    const bool is_hybrid = is_sharded() && replicas_.ranks() > 1;
    if (measured != cluster_.measured.end() && !is_hybrid) {
      reduce_cost_ = measured->second;
    } else {
      const auto cost = CollectiveCost::sample([&](int64_t bytes) {
        return run_reduction(static_cast<double>(bytes)).seconds;
      });
      if (!cost.ok()) return cost.status();
      reduce_cost_ = *cost;
    }
    auto plan = strategy_.has_exact_plan
                    ? plan_for_cost(backward_, reduce_cost_)
                    : plan_by_size(backward_.parameters, backward_.order,
                                   strategy_.bucket_caps_bytes);
    if (!plan.ok()) return plan.status();
    plan_ = *std::move(plan);
    bucket_elements_.clear();
    for (const auto& bucket : plan_->buckets()) {
      bucket_elements_.push_back(
          static_cast<double>(bytes_of(bucket, backward_.parameters)) /
          strategy_.gradient_bytes);
    }
    return absl::OkStatus();
  }

  // The reduction of a bucket: in the shard group, then in the replica group.
  CollectiveRun run_reduction(double bytes) const {
    CollectiveRun run =
        run_collective(Collective::kReduceScatter, bytes, shards_, cluster_);
    run += run_collective(Collective::kAllReduce, bytes / shards_.ranks(),
                          replicas_, cluster_);
    return run;
  }

  // A unit's all-gather or reduce-scatter; with ZeRO-3 one per tensor.
  CollectiveRun run_unit(Collective collective, size_t unit) const {
    const double bytes = collective == Collective::kAllGather
                             ? units_[unit].parameter_bytes
                             : units_[unit].gradient_bytes;
    if (bytes == 0) return {};
    if (kind_ != StrategyKind::kZero3) {
      return run_collective(collective, bytes, shards_, cluster_);
    }
    const ModelLayer& layer = model_.layers[unit];
    const auto all = static_cast<double>(layer.elements());
    CollectiveRun sum;
    for (const int64_t elements : layer.tensors) {
      const double share = static_cast<double>(elements) / all;
      sum += run_collective(collective, bytes * share, shards_, cluster_);
    }
    return sum;
  }

  // Sets all of the memory but activations.
  void add_up_memory() {
    const auto all = static_cast<double>(model_.elements());
    double gradients = kind_ < StrategyKind::kZero2 ? all : shard_elements_;
    if (accumulates_ && is_sharded() && kind_ >= StrategyKind::kZero2) {
      gradients += all;
    }
    MemoryPerRank& memory = step_.memory;
    memory.parameters = (has_buckets(kind_) ? all : shard_elements_) *
                        strategy_.parameter_bytes;
    memory.gradients = gradients * strategy_.gradient_bytes;
    memory.optimizer = shard_elements_ * strategy_.optimizer_bytes;
    memory.unsharded = 0;
    if (!is_sharded()) return;
    if (kind_ == StrategyKind::kZero2 && !accumulates_) {
      memory.unsharded =
          strategy_.gradient_bytes * largest_sum(bucket_elements_, 2);
    }
    if (has_buckets(kind_)) return;
    std::vector<double> in_buffers;
    std::vector<double> unit_gradients;
    for (size_t i = 0; i < num_layers(); ++i) {
      unit_gradients.push_back(units_[i].gradient_bytes);
      if (kept_[i] != 0) {
        memory.unsharded += units_[i].parameter_bytes;
      } else {
        in_buffers.push_back(units_[i].parameter_bytes);
      }
    }
    memory.unsharded += largest_sum(
        in_buffers, num_buffers_ + (kind_ == StrategyKind::kFsdp2 ? 1 : 0));
    if (!accumulates_) {
      memory.unsharded += largest_sum(unit_gradients, num_gradient_buffers_);
    }
  }

  absl::Status choose_checkpoints() {
    const double capacity = cluster_.device.memory_bytes;
    if (capacity == 0) return absl::OkStatus();
    const double others = step_.memory.total();
    std::vector<double> recompute_s;
    for (const Unit& unit : units_) recompute_s.push_back(unit.forward_s);
    double least = 0;
    auto chosen = checkpoints_to_fit(model_, batch_, recompute_s,
                                     capacity - others, &least);
    if (!chosen) {
      return bad_step(
          "strategy: expected checkpoints with which the model fits, found "
          "none: parameters, gradients, optimizer and unsharded units take ",
          others / 1e9, " GB, activations at least ", least / 1e9,
          ", the device has ", capacity / 1e9, "; ",
          (others + least - capacity) / 1e9,
          " GB are missing.\nShard over more ranks or lower the batch.");
    }
    checkpointed_ = *std::move(chosen);
    return absl::OkStatus();
  }

  void choose_kept_units() {
    std::vector<double> bytes;
    std::vector<double> gather_s;
    for (size_t i = 0; i < num_layers(); ++i) {
      bytes.push_back(units_[i].parameter_bytes);
      gather_s.push_back(run_unit(Collective::kAllGather, i).seconds);
    }
    const double capacity = cluster_.device.memory_bytes;
    kept_ =
        units_to_keep(bytes, gather_s,
                      capacity == 0 ? std::numeric_limits<double>::infinity()
                                    : capacity - step_.memory.total());
  }

  // ---- Streams, which run events in order of launch, and memory.

  double& free_s(Stream stream) { return free_s_[static_cast<size_t>(stream)]; }
  // The end of all streams.
  double end_s() const { return std::ranges::max(free_s_); }

  // Runs when the stream is free and `ready_s` has come.
  StepEvent launch(Stream stream, std::string name, double seconds,
                   double ready_s) {
    const double begin_s = std::max(free_s(stream), ready_s);
    return record({stream, std::move(name), begin_s, begin_s + seconds});
  }

  StepEvent record(StepEvent event) {
    free_s(event.stream) = std::max(free_s(event.stream), event.end_s);
    if (event.stream != Stream::kCompute) {
      step_.communication_s += event.end_s - event.begin_s;
    }
    step_.events.push_back(event);
    return event;
  }

  // Returns an event without duration if there is nothing to send.
  StepEvent communicate(Stream stream, std::string name,
                        const CollectiveRun& run, double ready_s) {
    if (run.traffic.sent_bytes == 0) {
      return {.begin_s = ready_s, .end_s = ready_s};
    }
    step_.traffic += run.traffic;
    return launch(stream, std::move(name), run.seconds, ready_s);
  }

  // `sum_s`: of the step's events of this kind.
  StepEvent compute(std::string name, double seconds, double ready_s,
                    double& sum_s) {
    sum_s += seconds;
    return launch(Stream::kCompute, std::move(name), seconds, ready_s);
  }

  void allocate(double time_s, double bytes) {
    if (bytes != 0) allocations_.push_back({time_s, bytes});
  }

  // ---- Compute.

  // Returns the end.
  double run_forward(size_t i, double copy_s, double ready_s) {
    const ModelLayer& layer = model_.layers[i];
    const StepEvent event =
        compute(absl::StrCat("forward ", layer.name),
                units_[i].forward_s + copy_s, ready_s, step_.forward_s);
    allocate(event.begin_s,
             batch_ * (checkpointed_[i] != 0 ? layer.checkpoint_bytes
                                             : layer.activation_bytes));
    return event.end_s;
  }

  // Recomputes before it, if checkpointed. Returns the backward.
  StepEvent run_backward(size_t i, double copy_s, double ready_s) {
    const ModelLayer& layer = model_.layers[i];
    double bytes = layer.activation_bytes;
    if (checkpointed_[i] != 0) {
      const StepEvent event =
          compute(absl::StrCat("recompute ", layer.name), units_[i].forward_s,
                  ready_s, step_.recompute_s);
      allocate(event.begin_s, batch_ * bytes);
      bytes += layer.checkpoint_bytes;
    }
    StepEvent event =
        compute(absl::StrCat("backward ", layer.name),
                units_[i].backward_s + copy_s, ready_s, step_.backward_s);
    allocate(event.end_s, -batch_ * bytes);
    return event;
  }

  // ---- Buckets.

  // Of a backward from `begin_s` on.
  void reduce_buckets(double begin_s) {
    if (cluster_.ranks() == 1) return;
    const StepPrediction prediction = *predict(*plan_, backward_, reduce_cost_);
    const bool overlaps = reduce_cost_.concurrency() > 1;
    const char* name = kind_ == StrategyKind::kDdp ? "all-reduce bucket "
                                                   : "reduce-scatter bucket ";
    double last_s = 0;
    for (size_t b = 0; b < prediction.buckets.size(); ++b) {
      const auto& [launched_s, complete_s] = prediction.buckets[b];
      const double start_s =
          overlaps ? launched_s : std::max(launched_s, last_s);
      last_s = complete_s;
      record({Stream::kCommunication, absl::StrCat(name, b), begin_s + start_s,
              begin_s + complete_s});
      step_.traffic +=
          run_reduction(bucket_elements_[b] * strategy_.gradient_bytes).traffic;
    }
  }

  // In order of the next forward.
  void gather_buckets() {
    const double ready_s = end_s();
    std::vector<double> gathered_s(plan_->num_buckets());
    for (size_t b = gathered_s.size(); b-- > 0;) {
      const CollectiveRun gather = run_collective(
          Collective::kAllGather,
          bucket_elements_[b] * strategy_.parameter_bytes, shards_, cluster_);
      gathered_s[b] =
          communicate(Stream::kCommunication,
                      absl::StrCat("all-gather bucket ", b), gather, ready_s)
              .end_s;
    }
    size_t parameter = 0;
    for (size_t i = 0; i < num_layers(); ++i) {
      for (size_t t = 0; t < model_.layers[i].tensors.size(); ++t) {
        const size_t bucket = plan_->locate(parameter++).bucket;
        units_[i].gathered_s =
            std::max(units_[i].gathered_s, gathered_s[bucket]);
      }
    }
  }

  // ---- Layers.

  // Runs a forward or a backward.
  void run_layers(bool is_forward, bool syncs) {
    const double begin_s = free_s(Stream::kCompute);
    const size_t ahead = num_buffers_ - 1;
    const size_t last = num_layers() - 1;
    const auto unit_at = [&](size_t position) {
      return is_forward ? position : last - position;
    };
    // Ends, in order of use.
    std::vector<double> gathered_s;
    std::vector<double> computed_s;
    std::vector<double> reduced_s;
    for (size_t p = 0; p <= last; ++p) {
      // One buffer is in use by this unit, the others take one unit each.
      for (size_t q = gathered_s.size(); q <= std::min(p + ahead, last); ++q) {
        const double ready_s = q > ahead ? computed_s[q - ahead - 1] : begin_s;
        const bool gathers = is_forward || !stays_unsharded(unit_at(q));
        gathered_s.push_back(gathers ? gather(unit_at(q), ready_s) : begin_s);
      }
      const size_t i = unit_at(p);
      const Unit& unit = units_[i];
      if (is_forward) {
        const double end_s =
            run_forward(i, unit.copy_parameters_s, gathered_s[p]);
        computed_s.push_back(end_s);
        if (!stays_unsharded(i)) reshard(i, end_s);
        continue;
      }
      double ready_s = gathered_s[p];
      if (reduced_s.size() >= num_gradient_buffers_) {
        ready_s = std::max(ready_s,
                           reduced_s[reduced_s.size() - num_gradient_buffers_]);
      }
      double copy_s = syncs ? unit.copy_gradients_s : 0;
      if (!stays_unsharded(i)) copy_s += unit.copy_parameters_s;
      const StepEvent backward = run_backward(i, copy_s, ready_s);
      computed_s.push_back(backward.end_s);
      reshard(i, backward.end_s);
      if (syncs && unit.gradient_bytes > 0 && !has_buckets(kind_)) {
        reduced_s.push_back(reduce(i, backward));
      }
    }
  }

  // Returns the end.
  double gather(size_t unit, double ready_s) {
    if (has_buckets(kind_)) return units_[unit].gathered_s;
    const StepEvent event =
        communicate(Stream::kCommunication,
                    absl::StrCat("all-gather ", model_.layers[unit].name),
                    run_unit(Collective::kAllGather, unit), ready_s);
    if (has_units()) allocate(event.begin_s, units_[unit].parameter_bytes);
    return event.end_s;
  }

  void reshard(size_t unit, double time_s) {
    if (has_units()) allocate(time_s, -units_[unit].parameter_bytes);
  }

  // Returns the end of the reduce-scatter.
  double reduce(size_t unit, const StepEvent& backward) {
    const std::string& name = model_.layers[unit].name;
    const double bytes = units_[unit].gradient_bytes;
    const StepEvent event = communicate(
        Stream::kCommunication, absl::StrCat("reduce-scatter ", name),
        run_unit(Collective::kReduceScatter, unit), backward.end_s);
    if (is_sharded() && !accumulates_) {
      allocate(backward.begin_s, bytes);
      allocate(event.end_s, -bytes);
    }
    communicate(Stream::kReplication, absl::StrCat("all-reduce ", name),
                run_collective(Collective::kAllReduce, bytes / shards_.ranks(),
                               replicas_, cluster_),
                event.end_s);
    return event.end_s;
  }

  // ---- Result.

  void finish() {
    step_.step_s = end_s();
    step_.exposed_s = step_.step_s - (step_.forward_s + step_.backward_s +
                                      step_.recompute_s + step_.optimizer_s);
    if (step_.exposed_s < 1e-9 * step_.step_s) step_.exposed_s = 0;  // rounding
    double flops = 0;
    for (const ModelLayer& layer : model_.layers) {
      flops += 3 * layer.forward_flops * batch_ * strategy_.micro_batches;
    }
    if (step_.step_s > 0) step_.tflops = flops / step_.step_s / 1e12;
    if (cluster_.device.flops_per_s > 0) {
      step_.mfu = step_.tflops * 1e12 / cluster_.device.flops_per_s;
    }
    const MemoryPerRank& memory = step_.memory;
    const double capacity = cluster_.device.memory_bytes;
    step_.fits = capacity == 0 || memory.total() <= capacity;
    for (size_t i = 0; i < num_layers(); ++i) {
      if (checkpointed_[i] != 0) step_.checkpointed_layers.push_back(i);
      if (!has_buckets(kind_) && stays_unsharded(i)) {
        step_.kept_units.push_back(i);
      }
    }
    // Memory is free before it is allocated again at the same time.
    std::ranges::sort(allocations_, {}, [](const MemoryPoint& point) {
      return std::pair(point.time_s, point.bytes);
    });
    auto& points = step_.memory_over_step;
    points.push_back(
        {0, memory.parameters + memory.gradients + memory.optimizer});
    for (const auto& [time_s, bytes] : allocations_) {
      if (time_s > points.back().time_s) {
        points.push_back({time_s, points.back().bytes});
      }
      points.back().bytes += bytes;
    }
    points.push_back({step_.step_s, points.back().bytes});
  }

  const ModelShape& model_;
  const double batch_;
  const Cluster& cluster_;
  const Strategy& strategy_;

  const StrategyKind kind_;
  const size_t num_buffers_;  // of the unit in use and those gathered ahead
  const size_t num_gradient_buffers_;
  const bool accumulates_;  // unsharded gradients, over micro-batches
  RankGroup shards_ = {};
  RankGroup replicas_ = {};
  std::vector<Unit> units_ = {};
  double shard_elements_ = 0;  // of all units, with padding
  double optimizer_s_ = 0;
  std::vector<char> checkpointed_ = {};
  std::vector<char> kept_ = {};  // outside the buffers

  // Of DDP, ZeRO-1 and ZeRO-2.
  Backward backward_ = {};
  CollectiveCost reduce_cost_ = *CollectiveCost::linear(0, 0);
  std::optional<BucketPlan> plan_ = std::nullopt;
  std::vector<double> bucket_elements_ = {};

  std::array<double, 3> free_s_ = {};          // by stream
  std::vector<MemoryPoint> allocations_ = {};  // bytes: a difference
  TrainingStep step_ = {};
};

}  // namespace

absl::StatusOr<TrainingStep> simulate_step(const ModelShape& model,
                                           int64_t batch,
                                           const Cluster& cluster,
                                           const Strategy& strategy) {
  Simulation simulation(model, batch, cluster, strategy);
  absl::Status status = simulation.set_up();
  if (!status.ok()) return status;
  TrainingStep step = simulation.run();
  if (!std::isfinite(step.step_s) || !std::isfinite(step.memory.total()) ||
      !std::isfinite(step.traffic.sent_bytes) || !std::isfinite(step.tflops)) {
    return bad_step(
        "simulation: expected a finite step, found an overflow.\nCheck the "
        "units of the request's numbers.");
  }
  return step;
}

}  // namespace brigade
