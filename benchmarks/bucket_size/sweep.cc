#include "brigade/benchmarks/bucket_size/sweep.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "brigade/planning/plan_by_size.h"
#include "brigade/reducer/reducer.h"

namespace brigade::benchmarks {
namespace {

using Clock = std::chrono::steady_clock;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin)
      .count();
}

// An arm, and what was seen of it.
struct Track {
  std::string label;
  std::vector<std::vector<size_t>> buckets = {};  // empty: without a reducer
  std::vector<double> steps_ms = {};              // by round, then by step
  std::vector<double> alone_ms = {};              // by round
  bool sums_verified = false;
};

void barrier(const Group& group) {
  std::vector<at::Tensor> token = {at::zeros({1})};
  group->allreduce(token)->wait();
}

double timed_step(Workload& workload, const Group& group, Reducer* reducer) {
  workload.set_up_step();
  barrier(group);
  const Clock::time_point begin = Clock::now();
  const at::Tensor loss = workload.forward();
  if (reducer != nullptr) reducer->prepare_for_backward(loss);
  loss.backward();
  return ms_since(begin);
}

int64_t bytes_of(const std::vector<at::Tensor>& parameters,
                 const std::vector<size_t>& bucket) {
  int64_t bytes = 0;
  for (const size_t i : bucket) bytes += parameters[i].nbytes();
  return bytes;
}

std::vector<at::Tensor> empty_buffers(
    const std::vector<at::Tensor>& parameters,
    const std::vector<std::vector<size_t>>& buckets) {
  std::vector<at::Tensor> buffers;
  for (const std::vector<size_t>& bucket : buckets) {
    const int64_t bytes = bytes_of(parameters, bucket);
    buffers.push_back(at::zeros(bytes / static_cast<int64_t>(sizeof(float))));
  }
  return buffers;
}

double all_reduce_alone(const Group& group,
                        const std::vector<at::Tensor>& buffers) {
  double total_ms = 0;
  for (const at::Tensor& buffer : buffers) {
    std::vector<at::Tensor> sum = {buffer};
    const Clock::time_point begin = Clock::now();
    group->allreduce(sum)->wait();
    total_ms += ms_since(begin);
  }
  return total_ms;
}

void visit(Track& track, Workload& workload, const Group& group,
           int64_t num_steps, bool first_visit) {
  {
    std::optional<Reducer> reducer;
    if (!track.buckets.empty()) {
      ReducerOptions options;
      options.bucket_plan = track.buckets;
      reducer.emplace(workload.parameters(), group, options);
    }
    Reducer* const used = reducer ? &*reducer : nullptr;
    if (first_visit && used) {
      workload.begin_check();
      timed_step(workload, group, used);
      track.sums_verified = workload.gradients_are_averages();
      workload.end_check();
    }
    timed_step(workload, group, used);  // touches the memory
    for (int64_t step = 0; step < num_steps; ++step) {
      track.steps_ms.push_back(timed_step(workload, group, used));
    }
    workload.set_up_step();  // lets go of the buckets
  }
  if (track.buckets.empty()) return;
  barrier(group);
  track.alone_ms.push_back(all_reduce_alone(
      group, empty_buffers(workload.parameters(), track.buckets)));
}

std::vector<std::vector<size_t>> plan(const std::vector<at::Tensor>& parameters,
                                      int64_t cap_bytes) {
  std::vector<ParameterSpec> specs;
  for (const at::Tensor& parameter : parameters) {
    specs.push_back({.size_bytes = static_cast<int64_t>(parameter.nbytes())});
  }
  const std::vector<int64_t> caps = {cap_bytes};
  const absl::StatusOr<BucketPlan> planned =
      plan_by_size(specs, reverse_registration_order(specs.size()), caps);
  TORCH_CHECK_VALUE(planned.ok(), std::string(planned.status().message()));
  return planned->buckets();
}

// The loop without a reducer, then the arms; equal plans once.
std::vector<Track> make_tracks(const std::vector<at::Tensor>& parameters,
                               const std::vector<Arm>& arms) {
  std::vector<Track> tracks = {{.label = "no reducer"}};
  for (const Arm& arm : arms) {
    std::vector<std::vector<size_t>> buckets = plan(parameters, arm.cap_bytes);
    const auto same = std::find_if(
        tracks.begin(), tracks.end(),
        [&](const Track& track) { return track.buckets == buckets; });
    if (same != tracks.end()) {
      same->label += ", " + arm.label;
    } else {
      tracks.push_back({.label = arm.label, .buckets = std::move(buckets)});
    }
  }
  return tracks;
}

// Every sample becomes that of the slowest rank.
void take_slowest(const Group& group, std::vector<double>& samples) {
  if (samples.empty()) return;
  std::vector<at::Tensor> slowest = {at::tensor(samples, at::kDouble)};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  group->allreduce(slowest, options)->wait();
  const double* const data = slowest[0].const_data_ptr<double>();
  samples.assign(data, data + samples.size());
}

bool on_all_ranks(const Group& group, bool value) {
  std::vector<double> is_false = {value ? 0.0 : 1.0};
  take_slowest(group, is_false);
  return is_false[0] == 0;
}

// The steps of `track` less the median of the steps of `local` in their round.
std::vector<double> exposed(const Track& track, const Track& local,
                            int64_t steps_per_round) {
  std::vector<double> differences;
  for (size_t i = 0; i < track.steps_ms.size(); ++i) {
    const auto round = static_cast<int64_t>(i) / steps_per_round;
    const auto begin = local.steps_ms.begin() + round * steps_per_round;
    differences.push_back(track.steps_ms[i] -
                          quantile({begin, begin + steps_per_round}, 0.5));
  }
  return differences;
}

}  // namespace

SweepResult sweep(Workload& workload,
                  const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                  const std::vector<Arm>& arms, const SweepOptions& options,
                  const std::function<void(const std::string&)>& after_visit) {
  std::vector<Track> tracks = make_tracks(workload.parameters(), arms);
  for (int64_t round = 0; round < options.rounds; ++round) {
    for (size_t i = 0; i < tracks.size(); ++i) {
      Track& track = round % 2 == 0 ? tracks[i] : tracks[tracks.size() - 1 - i];
      visit(track, workload, group, options.steps, round == 0);
      after_visit(track.label);
    }
  }

  const Track& local = tracks.front();
  SweepResult result;
  for (Track& track : tracks) {
    take_slowest(group, track.steps_ms);
    if (track.buckets.empty()) {
      result.local_ms = quartiles(track.steps_ms);
      continue;
    }
    take_slowest(group, track.alone_ms);
    std::vector<double> bytes;
    for (const std::vector<size_t>& bucket : track.buckets) {
      bytes.push_back(
          static_cast<double>(bytes_of(workload.parameters(), bucket)));
    }
    result.arms.push_back({
        .label = track.label,
        .num_buckets = static_cast<int64_t>(track.buckets.size()),
        .bucket_bytes = quartiles(bytes),
        .min_bucket_bytes = static_cast<int64_t>(quantile(bytes, 0)),
        .max_bucket_bytes = static_cast<int64_t>(quantile(bytes, 1)),
        .step_ms = quartiles(track.steps_ms),
        .exposed_ms = quartiles(exposed(track, local, options.steps)),
        .alone_ms = quantile(track.alone_ms, 0.5),
        .sums_verified = on_all_ranks(group, track.sums_verified),
    });
  }
  return result;
}

}  // namespace brigade::benchmarks
