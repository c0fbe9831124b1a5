#include "brigade/simulation/training_step.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/planning/planners.h"
#include "brigade/simulation/step_set_up.h"

namespace brigade {
namespace {

// Streams that run events in order of launch, their traffic, and memory.
class Recorder {
 public:
  double free_s(Stream stream) const { return free_s_[index_of(stream)]; }
  // The end of all streams.
  double end_s() const { return std::ranges::max(free_s_); }
  // Delays the stream.
  void wait(Stream stream, double time_s) {
    double& free_s = free_s_[index_of(stream)];
    free_s = std::max(free_s, time_s);
  }

  // Runs when the stream is free and `ready_s` has come.
  StepEvent run(Stream stream, std::string name, double seconds,
                double ready_s) {
    const double begin_s = std::max(free_s(stream), ready_s);
    return add({stream, std::move(name), begin_s, begin_s + seconds});
  }

  // Returns an event without duration if there is nothing to send.
  StepEvent communicate(Stream stream, std::string name,
                        const CollectiveRun& collective, double ready_s) {
    if (collective.sent_bytes == 0) {
      return {.begin_s = ready_s, .end_s = ready_s};
    }
    send(collective);
    return run(stream, std::move(name), collective.seconds, ready_s);
  }

  StepEvent add(StepEvent event) {
    wait(event.stream, event.end_s);
    if (event.stream != Stream::kCompute) {
      step_.communication_s += event.end_s - event.begin_s;
    }
    step_.events.push_back(event);
    return event;
  }

  void send(const CollectiveRun& collective) { traffic_ += collective; }

  void allocate(double time_s, double bytes) {
    if (bytes != 0) changes_.push_back({time_s, bytes});
  }

  TrainingStep& step() { return step_; }

  // Ends the step, in which `resident_bytes` stay allocated.
  TrainingStep finish(double resident_bytes) {
    step_.step_s = end_s();
    step_.sent_bytes = traffic_.sent_bytes;
    step_.between_hosts_bytes = traffic_.between_hosts_bytes;
    step_.between_racks_bytes = traffic_.between_racks_bytes;
    // Memory is free before it is allocated again at the same time.
    std::ranges::sort(changes_, [](const MemoryPoint& a, const MemoryPoint& b) {
      return std::pair(a.time_s, a.bytes) < std::pair(b.time_s, b.bytes);
    });
    auto& points = step_.memory_over_step;
    points.push_back({0, resident_bytes});
    for (const MemoryPoint& change : changes_) {
      const double bytes = points.back().bytes + change.bytes;
      if (change.time_s > points.back().time_s) {
        points.push_back({change.time_s, bytes});
      } else {
        points.back().bytes = bytes;
      }
    }
    points.push_back({step_.step_s, points.back().bytes});
    return std::move(step_);
  }

 private:
  static size_t index_of(Stream stream) { return static_cast<size_t>(stream); }

  std::array<double, 3> free_s_ = {};
  CollectiveRun traffic_ = {};
  std::vector<MemoryPoint> changes_ = {};  // bytes: a difference
  TrainingStep step_ = {};
};

class StepSimulation {
 public:
  StepSimulation(const ModelShape& model, int64_t batch, const Cluster& cluster,
                 const Strategy& strategy, const StepSetUp& set_up)
      : model_(model),
        batch_(static_cast<double>(batch)),
        cluster_(cluster),
        strategy_(strategy),
        set_up_(set_up) {}

  TrainingStep run() {
    const bool buckets = has_buckets(strategy_.kind);
    if (buckets && strategy_.next_forward_gather) gather_buckets();
    for (int m = 0; m < strategy_.micro_batches; ++m) {
      const bool syncs =
          strategy_.sync_every_micro_batch || m + 1 == strategy_.micro_batches;
      if (buckets) {
        run_bucket_forward();
        run_bucket_backward(syncs);
      } else {
        run_unit_forward();
        run_unit_backward(syncs);
      }
      // A backward ends with its reductions.
      recorder_.wait(Stream::kCompute, recorder_.end_s());
    }
    if (set_up_.optimizer_s > 0) {
      recorder_.run(Stream::kCompute, "optimizer", set_up_.optimizer_s, 0);
      step().optimizer_s = set_up_.optimizer_s;
    }
    const bool gathers = buckets && strategy_.kind != StrategyKind::kDdp;
    if (gathers && !strategy_.next_forward_gather) gather_buckets();
    return finish();
  }

 private:
  TrainingStep& step() { return recorder_.step(); }
  size_t num_layers() const { return model_.layers.size(); }

  // ---- Compute.

  // Returns the end.
  double run_forward(size_t i, double copy_s, double ready_s) {
    const ModelLayer& layer = model_.layers[i];
    const double seconds = set_up_.forward_s[i] + copy_s;
    const StepEvent event =
        recorder_.run(Stream::kCompute, absl::StrCat("forward ", layer.name),
                      seconds, ready_s);
    step().forward_s += seconds;
    recorder_.allocate(event.begin_s, batch_ * (set_up_.checkpointed[i] != 0
                                                    ? layer.checkpoint_bytes
                                                    : layer.activation_bytes));
    return event.end_s;
  }

  // Recomputes before it, if checkpointed. Returns the backward.
  StepEvent run_backward(size_t i, double copy_s, double ready_s) {
    const ModelLayer& layer = model_.layers[i];
    const bool recomputes = set_up_.checkpointed[i] != 0;
    if (recomputes) {
      const StepEvent event = recorder_.run(
          Stream::kCompute, absl::StrCat("recompute ", layer.name),
          set_up_.forward_s[i], ready_s);
      step().recompute_s += set_up_.forward_s[i];
      recorder_.allocate(event.begin_s, batch_ * layer.activation_bytes);
    }
    const double seconds = set_up_.backward_s[i] + copy_s;
    StepEvent event =
        recorder_.run(Stream::kCompute, absl::StrCat("backward ", layer.name),
                      seconds, ready_s);
    step().backward_s += seconds;
    recorder_.allocate(event.end_s,
                       -batch_ * (layer.activation_bytes +
                                  (recomputes ? layer.checkpoint_bytes : 0)));
    return event;
  }

  // ---- Buckets.

  void run_bucket_forward() {
    size_t parameter = 0;
    for (size_t i = 0; i < num_layers(); ++i) {
      double ready_s = 0;
      for (size_t t = 0; t < model_.layers[i].tensors.size(); ++t) {
        const size_t bucket = set_up_.plan->locate(parameter++).bucket;
        if (!gathered_s_.empty()) {
          ready_s = std::max(ready_s, gathered_s_[bucket]);
        }
      }
      run_forward(i, 0, ready_s);
    }
  }

  void run_bucket_backward(bool syncs) {
    const double begin_s = recorder_.free_s(Stream::kCompute);
    for (size_t i = num_layers(); i-- > 0;) run_backward(i, 0, 0);
    if (!syncs || cluster_.ranks() == 1) return;
    const StepPrediction prediction =
        *predict(*set_up_.plan, set_up_.backward, set_up_.reduce_cost);
    const bool overlaps = set_up_.reduce_cost.concurrency() > 1;
    const char* name = strategy_.kind == StrategyKind::kDdp
                           ? "all-reduce bucket "
                           : "reduce-scatter bucket ";
    double last_s = 0;
    for (size_t b = 0; b < prediction.buckets.size(); ++b) {
      const auto& [launched_s, complete_s] = prediction.buckets[b];
      const double start_s =
          overlaps ? launched_s : std::max(launched_s, last_s);
      last_s = complete_s;
      recorder_.add({Stream::kCommunication, absl::StrCat(name, b),
                     begin_s + start_s, begin_s + complete_s});
      recorder_.send(
          run_reduction(set_up_.bucket_elements[b] * strategy_.gradient_bytes,
                        set_up_, cluster_));
    }
  }

  // In order of the next forward.
  void gather_buckets() {
    const double ready_s = recorder_.end_s();
    gathered_s_.resize(set_up_.plan->num_buckets());
    for (size_t b = gathered_s_.size(); b-- > 0;) {
      const CollectiveRun gather =
          run_collective(Collective::kAllGather,
                         set_up_.bucket_elements[b] * strategy_.parameter_bytes,
                         set_up_.shards, cluster_);
      gathered_s_[b] = recorder_
                           .communicate(Stream::kCommunication,
                                        absl::StrCat("all-gather bucket ", b),
                                        gather, ready_s)
                           .end_s;
    }
  }

  // ---- Units.

  // A forward or a backward.
  struct Segment {
    std::vector<size_t> units = {};  // in order of use
    double begin_s = 0;
    std::vector<double> gathered_s = {};  // by position in `units`
    std::vector<double> computed_s = {};
  };

  // Issues all-gathers ahead of the unit at `position`: one buffer is in use by
  // that unit, the others take one unit each.
  void gather_ahead(Segment& segment, size_t position, bool is_forward) {
    const size_t ahead = set_up_.num_buffers - 1;
    const size_t last = std::min(position + ahead, segment.units.size() - 1);
    for (size_t q = segment.gathered_s.size(); q <= last; ++q) {
      const size_t unit = segment.units[q];
      const double ready_s =
          q > ahead ? segment.computed_s[q - ahead - 1] : segment.begin_s;
      segment.gathered_s.push_back(is_forward ||
                                           !is_unsharded_after_forward(unit)
                                       ? gather(unit, ready_s)
                                       : segment.begin_s);
    }
  }

  // Returns the end.
  double gather(size_t unit, double ready_s) {
    const StepEvent event =
        run_for_each_message("all-gather", Collective::kAllGather, unit,
                             set_up_.unit_bytes[unit], ready_s);
    if (set_up_.shards.ranks() > 1) {
      recorder_.allocate(event.begin_s, set_up_.unit_bytes[unit]);
    }
    return event.end_s;
  }

  // One collective, or with ZeRO-3 one per tensor, which are one event.
  StepEvent run_for_each_message(const char* name, Collective collective,
                                 size_t unit, double unit_bytes,
                                 double ready_s) {
    const ModelLayer& layer = model_.layers[unit];
    CollectiveRun sum;
    const auto add = [&](double bytes) {
      sum += run_collective(collective, bytes, set_up_.shards, cluster_);
    };
    if (strategy_.kind == StrategyKind::kZero3) {
      const auto all = static_cast<double>(layer.elements());
      for (const int64_t elements : layer.tensors) {
        add(unit_bytes * (static_cast<double>(elements) / all));
      }
    } else if (unit_bytes > 0) {
      add(unit_bytes);
    }
    return recorder_.communicate(Stream::kCommunication,
                                 absl::StrCat(name, " ", layer.name), sum,
                                 ready_s);
  }

  void run_unit_forward() {
    Segment segment = {.begin_s = recorder_.free_s(Stream::kCompute)};
    for (size_t i = 0; i < num_layers(); ++i) segment.units.push_back(i);
    for (size_t i = 0; i < num_layers(); ++i) {
      gather_ahead(segment, i, /*is_forward=*/true);
      const double end_s =
          run_forward(i, set_up_.copy_parameters_s[i], segment.gathered_s[i]);
      segment.computed_s.push_back(end_s);
      if (!is_unsharded_after_forward(i)) reshard(i, end_s);
    }
  }

  bool is_unsharded_after_forward(size_t unit) const {
    return set_up_.kept[unit] != 0 || set_up_.stays[unit] != 0;
  }

  void reshard(size_t unit, double time_s) {
    if (set_up_.shards.ranks() > 1) {
      recorder_.allocate(time_s, -set_up_.unit_bytes[unit]);
    }
  }

  void run_unit_backward(bool syncs) {
    Segment segment = {.begin_s = recorder_.free_s(Stream::kCompute)};
    for (size_t i = num_layers(); i-- > 0;) segment.units.push_back(i);
    std::vector<double> reduced_s;  // ends of reduce-scatters
    for (size_t p = 0; p < segment.units.size(); ++p) {
      const size_t i = segment.units[p];
      gather_ahead(segment, p, /*is_forward=*/false);
      double ready_s = segment.gathered_s[p];
      if (reduced_s.size() >= set_up_.num_gradient_buffers) {
        ready_s = std::max(
            ready_s,
            reduced_s[reduced_s.size() - set_up_.num_gradient_buffers]);
      }
      double copy_s = syncs ? set_up_.copy_gradients_s[i] : 0;
      if (!is_unsharded_after_forward(i)) {
        copy_s += set_up_.copy_parameters_s[i];
      }
      const StepEvent backward = run_backward(i, copy_s, ready_s);
      segment.computed_s.push_back(backward.end_s);
      reshard(i, backward.end_s);
      if (syncs && set_up_.unit_bytes[i] > 0) {
        reduced_s.push_back(reduce(i, backward));
      }
    }
  }

  // Returns the end of the reduce-scatter.
  double reduce(size_t unit, const StepEvent& backward) {
    const double bytes = set_up_.gradient_bytes[unit];
    const StepEvent event =
        run_for_each_message("reduce-scatter", Collective::kReduceScatter, unit,
                             bytes, backward.end_s);
    if (set_up_.shards.ranks() > 1 && !set_up_.accumulates) {
      recorder_.allocate(backward.begin_s, bytes);
      recorder_.allocate(event.end_s, -bytes);
    }
    recorder_.communicate(
        Stream::kReplication,
        absl::StrCat("all-reduce ", model_.layers[unit].name),
        run_collective(Collective::kAllReduce, bytes / set_up_.shards.ranks(),
                       set_up_.replicas, cluster_),
        event.end_s);
    return event.end_s;
  }

  // ---- Result.

  TrainingStep finish() {
    const MemoryPerRank& memory = set_up_.memory;
    TrainingStep step = recorder_.finish(memory.parameters + memory.gradients +
                                         memory.optimizer);
    step.exposed_s = step.step_s - (step.forward_s + step.backward_s +
                                    step.recompute_s + step.optimizer_s);
    step.exposed_s = std::max(step.exposed_s, 0.0);  // rounding
    double flops = 0;
    for (const ModelLayer& layer : model_.layers) {
      flops += 3 * layer.forward_flops * batch_ * strategy_.micro_batches;
    }
    if (step.step_s > 0) step.tflops = flops / step.step_s / 1e12;
    if (cluster_.device.flops_per_s > 0) {
      step.mfu = step.tflops * 1e12 / cluster_.device.flops_per_s;
    }
    step.memory = memory;
    const double capacity = cluster_.device.memory_bytes;
    step.fits = capacity == 0 || memory.total() <= capacity;
    for (size_t i = 0; i < num_layers(); ++i) {
      if (set_up_.checkpointed[i] != 0) step.checkpointed_layers.push_back(i);
      if (!has_buckets(strategy_.kind) && is_unsharded_after_forward(i)) {
        step.kept_units.push_back(i);
      }
    }
    return step;
  }

  const ModelShape& model_;
  const double batch_;
  const Cluster& cluster_;
  const Strategy& strategy_;
  const StepSetUp& set_up_;
  Recorder recorder_;
  std::vector<double> gathered_s_ = {};  // by bucket
};

}  // namespace

absl::StatusOr<TrainingStep> simulate_step(const ModelShape& model,
                                           int64_t batch,
                                           const Cluster& cluster,
                                           const Strategy& strategy) {
  const auto set_up = set_up_step(model, batch, cluster, strategy);
  if (!set_up.ok()) return set_up.status();
  TrainingStep step =
      StepSimulation(model, batch, cluster, strategy, *set_up).run();
  if (!std::isfinite(step.step_s) || !std::isfinite(step.memory.total()) ||
      !std::isfinite(step.sent_bytes) || !std::isfinite(step.tflops)) {
    return absl::InvalidArgumentError(
        "simulation: expected a finite step, found an overflow.\nCheck the "
        "units of the request's numbers.");
  }
  return step;
}

}  // namespace brigade
