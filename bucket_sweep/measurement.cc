#include "brigade/bucket_sweep/measurement.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <limits>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "brigade/planning/bucket_plan.h"
#include "brigade/reducer/reducer.h"

namespace brigade {
namespace {

// Of the dtype's resolution, per rank: sums of other orders differ by less.
constexpr double kTolerance = 4;

double resolution_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
    case at::kComplexDouble:
      return std::numeric_limits<double>::epsilon();
    case at::kHalf:
      return 0x1p-10;
    case at::kBFloat16:
      return 0x1p-7;
    default:
      return std::numeric_limits<float>::epsilon();
  }
}

at::Tensor dense(const at::Tensor& tensor) {
  return tensor.is_sparse() ? tensor.to_dense() : tensor;
}

constexpr double kBytesPerMib = 1024.0 * 1024.0;
constexpr double kLargestMib = 1e6;

using Clock = std::chrono::steady_clock;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// Buckets are planned from the order of the first step, on a static graph of
// the second.
constexpr int kStepsUntilRebuilt = 3;

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin)
      .count();
}

// What the ranks of a sweep do together, on the parameters' device.
class Ranks {
 public:
  Ranks(Group group, at::Device device)
      : group_(std::move(group)), device_(device) {}

  const Group& group() const { return group_; }

  void synchronize() const {
    if (device_.is_cpu()) return;
    c10::impl::VirtualGuardImpl(device_.type())
        .synchronizeDevice(device_.index());
  }

  void meet() const {
    std::vector<at::Tensor> token = {at::zeros({1}, device_)};
    group_->allreduce(token)->wait();
    synchronize();
  }

  // Every sample becomes that of the slowest rank.
  void take_slowest(std::vector<double>& samples) const {
    if (samples.empty()) return;
    std::vector<at::Tensor> slowest = {
        at::tensor(samples, at::kDouble).to(device_)};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::MAX;
    group_->allreduce(slowest, options)->wait();
    const at::Tensor found = slowest[0].cpu();
    const double* const data = found.const_data_ptr<double>();
    samples.assign(data, data + samples.size());
  }

  bool all_say(bool value) const {
    std::vector<double> is_false = {value ? 0.0 : 1.0};
    take_slowest(is_false);
    return is_false[0] == 0;
  }

 private:
  const Group group_;
  const at::Device device_;
};

double timed_step(SweepWorkload& workload, const Ranks& ranks,
                  Reducer* reducer) {
  workload.set_up_step();
  ranks.meet();
  const Clock::time_point begin = Clock::now();
  const at::Tensor loss = workload.forward();
  if (reducer != nullptr) reducer->prepare_for_backward(loss);
  loss.backward();
  ranks.synchronize();
  return ms_since(begin);
}

std::vector<int64_t> bytes_of(const std::vector<at::Tensor>& parameters,
                              const std::vector<std::vector<size_t>>& buckets) {
  std::vector<int64_t> bytes;
  for (const std::vector<size_t>& bucket : buckets) {
    bytes.push_back(0);
    for (const size_t i : bucket) {
      bytes.back() += static_cast<int64_t>(parameters[i].nbytes());
    }
  }
  return bytes;
}

double all_reduce_alone(const SweepTrack& track,
                        const std::vector<at::Tensor>& parameters,
                        const Ranks& ranks) {
  std::vector<at::Tensor> buffers;
  for (size_t b = 0; b < track.buckets.size(); ++b) {
    const at::Tensor& like = parameters[track.buckets[b].front()];
    buffers.push_back(at::zeros(
        {track.bucket_bytes[b] / static_cast<int64_t>(like.element_size())},
        like.options()));
  }
  ranks.meet();
  const Clock::time_point begin = Clock::now();
  for (const at::Tensor& buffer : buffers) {
    std::vector<at::Tensor> sum = {buffer};
    ranks.group()->allreduce(sum)->wait();
  }
  ranks.synchronize();
  return ms_since(begin);
}

// Looks at the buckets that the arm gives, and at what arrives in `.grad`.
void add_arm(std::vector<SweepTrack>& tracks, const BucketArm& arm,
             SweepWorkload& workload, const Ranks& ranks,
             const SweepOptions& options) {
  ReducerOptions reducer_options = options.reducer;
  reducer_options.bucket_plan = {};
  reducer_options.bucket_caps_bytes = arm.caps_bytes;
  Reducer reducer(workload.parameters(), ranks.group(), reducer_options);
  for (int step = 0; step < kStepsUntilRebuilt; ++step) {
    timed_step(workload, ranks, &reducer);
  }
  std::vector<std::vector<size_t>> buckets = reducer.plan().buckets();
  const auto same = std::find_if(
      tracks.begin(), tracks.end(),
      [&](const SweepTrack& track) { return track.buckets == buckets; });
  if (same != tracks.end()) {
    same->arms.push_back(arm);
  } else {
    workload.begin_check();
    timed_step(workload, ranks, &reducer);
    const bool right = workload.gradients_are_averages();
    workload.end_check();
    std::vector<int64_t> bytes = bytes_of(workload.parameters(), buckets);
    tracks.push_back({.arms = {arm},
                      .buckets = std::move(buckets),
                      .bucket_bytes = std::move(bytes),
                      .sums_verified = ranks.all_say(right)});
  }
  workload.set_up_step();  // lets go of the buckets
}

void time_steps(SweepTrack& track, SweepWorkload& workload, const Ranks& ranks,
                int64_t num_steps, Reducer* reducer) {
  timed_step(workload, ranks, reducer);  // touches the memory
  std::vector<double>& times = track.rounds_ms.emplace_back();
  for (int64_t step = 0; step < num_steps; ++step) {
    times.push_back(timed_step(workload, ranks, reducer));
  }
  workload.set_up_step();  // lets go of the buckets
}

void visit(SweepTrack& track, SweepWorkload& workload, const Ranks& ranks,
           const SweepOptions& options) {
  if (track.buckets.empty()) {
    time_steps(track, workload, ranks, options.steps, nullptr);
    return;
  }
  {
    ReducerOptions reducer_options = options.reducer;
    reducer_options.bucket_plan = track.buckets;
    reducer_options.rebuild_buckets = false;
    Reducer reducer(workload.parameters(), ranks.group(), reducer_options);
    time_steps(track, workload, ranks, options.steps, &reducer);
  }
  track.alone_ms.push_back(
      all_reduce_alone(track, workload.parameters(), ranks));
}

}  // namespace

ModuleWorkload::ModuleWorkload(const std::vector<at::Tensor>& parameters,
                               std::function<at::Tensor()> loss,
                               c10::intrusive_ptr<c10d::ProcessGroup> group)
    : loss_(std::move(loss)), group_(std::move(group)) {
  std::ranges::copy_if(parameters, std::back_inserter(parameters_),
                       &at::Tensor::requires_grad);
}

void ModuleWorkload::set_up_step() {
  for (const at::Tensor& parameter : parameters_) {
    parameter.mutable_grad().reset();
  }
}

void ModuleWorkload::begin_check() {
  local_.resize(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    hooks_.push_back(
        parameters_[i].register_hook([this, i](const at::Tensor& gradient) {
          const at::NoGradGuard no_grad;
          at::Tensor copy = dense(gradient.detach()).clone();
          if (local_[i].defined()) copy += local_[i];
          local_[i] = std::move(copy);
        }));
  }
}

void ModuleWorkload::end_check() {
  for (size_t i = 0; i < hooks_.size(); ++i) {
    parameters_[i].remove_hook(hooks_[i]);
  }
  hooks_.clear();
  local_.clear();
}

bool ModuleWorkload::gradients_are_averages() {
  const at::NoGradGuard no_grad;
  bool right = true;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    right = is_average(i) && right;
  }
  return right;
}

bool ModuleWorkload::is_average(size_t parameter) const {
  const at::Tensor& own = local_[parameter];
  const at::Tensor local =
      own.defined() ? own : at::zeros_like(parameters_[parameter]);
  const at::Tensor mean = average(local);
  const at::Tensor size = average(local.abs());
  const at::Tensor& gradient = parameters_[parameter].grad();
  if (!gradient.defined()) return !size.any().item<bool>();
  const at::Tensor bound = size * (kTolerance * group_->getSize() *
                                   resolution_of(mean.scalar_type()));
  return (dense(gradient) - mean).abs().le(bound).all().item<bool>();
}

// Divides first, as the reducer does.
at::Tensor ModuleWorkload::average(const at::Tensor& tensor) const {
  std::vector<at::Tensor> sum = {tensor.contiguous().div(group_->getSize())};
  group_->allreduce(sum)->wait();
  return sum[0];
}

BucketArm default_arm() {
  return {.label = "default",
          .caps_bytes = {kDefaultBucketCapsBytes.begin(),
                         kDefaultBucketCapsBytes.end()}};
}

BucketArm arm_of(std::string_view cap) {
  if (cap == "each") return {.label = "one per parameter", .caps_bytes = {1}};
  if (cap == "one") {
    return {.label = "one",
            .caps_bytes = {std::numeric_limits<int64_t>::max()}};
  }
  double mib = 0;
  const bool is_number =
      absl::SimpleAtod(absl::string_view(cap.data(), cap.size()), &mib);
  TORCH_CHECK_VALUE(
      is_number && mib > 0 && mib <= kLargestMib,
      "arm_of: expected a size in MiB above 0, 'one' or 'each', got '",
      std::string(cap), "'.\nGive a number such as 1 or 25.");
  const auto bytes = static_cast<int64_t>(mib * kBytesPerMib);
  return {.label = absl::StrCat(mib, " MiB"),
          .caps_bytes = {std::max<int64_t>(1, bytes)}};
}

std::vector<BucketArm> arms_of(const std::vector<std::string>& caps) {
  std::vector<BucketArm> arms;
  for (const std::string& cap : caps) arms.push_back(arm_of(cap));
  return arms;
}

std::vector<BucketArm> usual_arms() {
  return arms_of({"each", "0.25", "1", "4", "10", "25", "100", "one"});
}

SweepSamples measure(
    SweepWorkload& workload, const std::vector<BucketArm>& arms,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const SweepOptions& options,
    const std::function<void(const std::string&)>& after_visit) {
  TORCH_CHECK_VALUE(options.rounds > 0 && options.steps > 0,
                    "measure: rounds and steps must be 1 or more, got ",
                    options.rounds, " and ", options.steps,
                    ".\nLeave them out.");
  const std::vector<at::Tensor>& parameters = workload.parameters();
  TORCH_CHECK_VALUE(!parameters.empty(),
                    "measure: the workload has no parameter that requires a "
                    "gradient.\nGive a model that is trained.");
  const Ranks ranks(group, parameters.front().device());
  const auto tell = [&](const std::string& label) {
    if (after_visit) after_visit(label);
  };

  SweepSamples samples;
  samples.num_parameters = static_cast<int64_t>(parameters.size());
  for (const at::Tensor& parameter : parameters) {
    samples.gradient_bytes += static_cast<int64_t>(parameter.nbytes());
  }
  std::vector<BucketArm> all = {default_arm()};
  all.insert(all.end(), arms.begin(), arms.end());
  for (const BucketArm& arm : all) {
    add_arm(samples.tracks, arm, workload, ranks, options);
    tell(arm.label);
  }

  SweepTrack local;
  std::vector<SweepTrack*> order = {&local};
  for (SweepTrack& track : samples.tracks) order.push_back(&track);
  for (int64_t round = 0; round < options.rounds; ++round) {
    for (SweepTrack* const track : order) {
      visit(*track, workload, ranks, options);
      tell(track->arms.empty() ? "no reducer" : track->arms.front().label);
    }
    std::reverse(order.begin(), order.end());
  }

  for (SweepTrack* const track : order) {
    for (std::vector<double>& times : track->rounds_ms) {
      ranks.take_slowest(times);
    }
    ranks.take_slowest(track->alone_ms);
  }
  samples.local_ms = std::move(local.rounds_ms);
  return samples;
}

}  // namespace brigade
