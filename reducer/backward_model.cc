#include "brigade/reducer/backward_model.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/ordered/host_sums.h"

namespace brigade {
namespace {

constexpr int kRepeats = 3;
constexpr int64_t kSmallestBytes = 1024;
constexpr int64_t kLargestBytes = int64_t{64} << 20;  // larger: extrapolated
constexpr int kMostAtOnce = 8;

// Less is noise, more is not plausible.
constexpr double kLeastSlowdown = 0.05;
constexpr double kMostSlowdown = 0.9;
constexpr double kMostStretch = 10;

// Returns 0 if `end_ns` is earlier.
double seconds_between(int64_t begin_ns, int64_t end_ns) {
  return 1e-9 * static_cast<double>(std::max<int64_t>(0, end_ns - begin_ns));
}

// Returns the end of the last packing. Backward ends after the launch that
// follows, which may copy the bucket: that time is the collective's.
int64_t packed_ns(const Timeline& timeline) {
  int64_t end_ns = timeline.backward_begin_ns;
  for (const UnitTimes& unit : timeline.units) {
    end_ns = std::max(end_ns, unit.pack_end_ns);
  }
  return end_ns;
}

// REQUIRES: not empty.
double median_of(std::vector<double> samples) {
  const auto middle = samples.begin() + samples.size() / 2;
  std::ranges::nth_element(samples, middle);
  return *middle;
}

}  // namespace

BackwardProfiler::BackwardProfiler(std::vector<at::Tensor> parameters,
                                   std::vector<bool> sparse,
                                   c10::intrusive_ptr<c10d::ProcessGroup> group)
    : parameters_(std::move(parameters)),
      sparse_(std::move(sparse)),
      group_(std::move(group)),
      ready_s_(parameters_.size()) {}

std::vector<std::vector<size_t>> BackwardProfiler::buckets() const {
  const Backward backward =
      backward_of(std::vector<double>(parameters_.size() + 1, 0), 0);
  const absl::StatusOr<BucketPlan> plan =
      device().is_cpu() ? plan_one(backward) : plan_each(backward);
  return value_or_throw(plan).buckets();
}

void BackwardProfiler::add(const Timeline& timeline) {
  if (timeline.iteration == 0) return;
  int64_t end_ns = 0;
  const auto seconds = [&](int64_t ns) {
    end_ns = std::max(end_ns, ns);
    return seconds_between(timeline.backward_begin_ns, ns);
  };
  if (device().is_cpu()) {
    for (const GradientTime& gradient : timeline.gradients) {
      if (gradient.variable.replica > 0) continue;
      ready_s_[gradient.variable.parameter].push_back(
          seconds(gradient.ready_ns));
    }
    end_ns = std::max(end_ns, packed_ns(timeline));
  } else {
    const std::vector<std::vector<size_t>> each = buckets();
    for (size_t b = 0; b < timeline.units.size(); ++b) {
      const int64_t packed_ns = timeline.units[b].pack_begin_ns;
      if (packed_ns == 0) continue;
      ready_s_[each[b].front()].push_back(seconds(packed_ns));
    }
  }
  end_s_.push_back(seconds(end_ns));
  int64_t reduced_ns = timeline.backward_end_ns;
  double packing_s = 0;
  for (const UnitTimes& unit : timeline.units) {
    reduced_ns = std::max(reduced_ns, unit.complete_ns);
    packing_s += seconds_between(unit.pack_begin_ns, unit.pack_end_ns);
  }
  // On devices the host's packing takes no time of the stream.
  packing_s_.push_back(device().is_cpu() ? packing_s : 0);
  // On devices the host does not wait for it.
  delivery_s_.push_back(
      device().is_cpu() ? seconds_between(reduced_ns, timeline.finalize_end_ns)
                        : 0);
}

void BackwardProfiler::add_overlapped(const Timeline& timeline,
                                      const BucketPlan& plan) {
  if (timeline.iteration == 0 || !device().is_cpu()) return;
  const int64_t end_ns = packed_ns(timeline);
  Overlap overlap = {.end_s =
                         seconds_between(timeline.backward_begin_ns, end_ns)};
  int64_t free_ns = 0;
  for (size_t b = 0; b < timeline.units.size(); ++b) {
    const UnitTimes& unit = timeline.units[b];
    if (unit.launch_ns == 0) continue;
    const int64_t begin_ns = std::max(unit.launch_ns, free_ns);
    free_ns = std::max(begin_ns, unit.complete_ns);
    const double whole_s = seconds_between(begin_ns, free_ns);
    const double inside_s =
        seconds_between(begin_ns, std::min(free_ns, end_ns));
    if (inside_s == 0) continue;
    int64_t bytes = 0;
    for (const size_t parameter : plan.buckets()[b]) {
      bytes += static_cast<int64_t>(parameters_[parameter].nbytes());
    }
    overlap.busy_s += inside_s;
    overlap.parts.emplace_back(bytes, inside_s / whole_s);
  }
  overlaps_.push_back(std::move(overlap));
}

void BackwardProfiler::clear() {
  for (std::vector<double>& steps : ready_s_) steps.clear();
  end_s_.clear();
  packing_s_.clear();
  delivery_s_.clear();
  overlaps_.clear();
}

void BackwardProfiler::connect() {
  host_sums_ = HostSums::get_or_make(group_, /*wants=*/true);
}

BackwardModel BackwardProfiler::model() {
  connect();
  std::vector<double> times;
  for (const std::vector<double>& steps : ready_s_) {
    // An unused parameter is ready at the end.
    const std::vector<double>& samples = steps.empty() ? end_s_ : steps;
    times.push_back(samples.empty() ? 0 : median_of(samples));
  }
  times.push_back(end_s_.empty() ? 0 : median_of(end_s_));
  times.push_back(packing_s_.empty() ? 0 : median_of(packing_s_));
  times.push_back(delivery_s_.empty() ? 0 : median_of(delivery_s_));
  take_slowest(times);
  const double delivery_s = times.back();
  times.pop_back();
  const double packing_s = times.back();
  times.pop_back();
  BackwardModel model;
  model.backward = backward_of(times, packing_s);
  model.delivery_s = delivery_s;
  model.points = time_all_reduces();
  model.cost = value_or_throw(CollectiveCost::fit(model.points));
  model.backward.contention = contention(model.backward.end_s, model.cost);
  return model;
}

// `end_s`: of a backward that runs alone.
Contention BackwardProfiler::contention(double end_s,
                                        const CollectiveCost& cost) const {
  std::vector<double> ends_s;
  std::vector<double> busy_s;
  std::vector<double> alone_s;
  for (const Overlap& overlap : overlaps_) {
    ends_s.push_back(overlap.end_s);
    busy_s.push_back(overlap.busy_s);
    alone_s.push_back(0);
    for (const auto& [bytes, share] : overlap.parts) {
      alone_s.back() += share * cost.seconds(bytes);
    }
  }
  // A rank that waits for others is busy for longer: take the least.
  std::vector<double> found = {0, 0, 0};
  if (!overlaps_.empty()) {
    found = {median_of(ends_s), -median_of(busy_s), -median_of(alone_s)};
  }
  take_slowest(found);
  const double delay_s = found[0] - end_s;
  const double overlap_s = -found[1];
  if (!(overlap_s > 0) || delay_s < kLeastSlowdown * overlap_s) return {};
  return {.backward_slowdown = std::min(kMostSlowdown, delay_s / overlap_s),
          .collective_stretch =
              std::clamp(overlap_s / -found[2], 1.0, kMostStretch)};
}

void BackwardProfiler::take_slowest(std::vector<double>& seconds) const {
  if (seconds.empty()) return;
  std::vector<at::Tensor> slowest = {
      at::tensor(seconds, at::kDouble).to(device())};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  group_->allreduce(slowest, options)->wait();
  const at::Tensor found = slowest[0].cpu();
  const double* const data = found.const_data_ptr<double>();
  seconds.assign(data, data + seconds.size());
}

void BackwardProfiler::synchronize() const {
  if (device().is_cpu()) return;
  c10::impl::VirtualGuardImpl(device().type())
      .synchronizeDevice(device().index());
}

void BackwardProfiler::barrier() const {
  std::vector<at::Tensor> token = {at::zeros({1}, device())};
  group_->allreduce(token)->wait();
  synchronize();
}

double BackwardProfiler::all_reduce(const std::vector<at::Tensor>& buffers,
                                    bool at_once) const {
  barrier();
  const auto begin = std::chrono::steady_clock::now();
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (const at::Tensor& buffer : buffers) {
    if (host_sums_ && HostSums::can_reduce(buffer)) {
      host_sums_->all_reduce(buffer)->waitAndThrow();
      continue;
    }
    std::vector<at::Tensor> sum = {buffer};
    works.push_back(group_->allreduce(sum));
    if (!at_once) works.back()->wait();
  }
  for (const auto& work : works) {
    if (at_once) work->wait();
  }
  synchronize();
  const auto now = std::chrono::steady_clock::now();
  return std::chrono::duration<double>(now - begin).count();
}

// `times`: of each parameter's gradient, and of the end of backward.
// `packing_s`: of all buckets, after the last gradient.
Backward BackwardProfiler::backward_of(const std::vector<double>& times,
                                       double packing_s) const {
  Backward backward;
  std::vector<at::TensorOptions> kinds;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::TensorOptions kind = parameters_[i].options();
    const auto known = std::ranges::find_if(kinds, [&](const auto& other) {
      return other.dtype() == kind.dtype() && other.device() == kind.device();
    });
    const auto number = known - kinds.begin();
    if (known == kinds.end()) kinds.push_back(kind);
    backward.parameters.push_back(
        {.size_bytes = static_cast<int64_t>(parameters_[i].nbytes()),
         .kind = static_cast<int>(number),
         .sparse = i < sparse_.size() && sparse_[i]});
  }
  backward.order.resize(parameters_.size());
  std::iota(backward.order.rbegin(), backward.order.rend(), size_t{0});
  std::ranges::stable_sort(backward.order, {},
                           [&](size_t i) { return times[i]; });
  double bytes = 0;
  for (const ParameterSpec& spec : backward.parameters) {
    bytes += static_cast<double>(spec.size_bytes);
  }
  // Whichever the buckets are: when one is launched after the j-th gradient,
  // all bytes up to there have been packed.
  double packed_bytes = 0;
  for (const size_t i : backward.order) {
    packed_bytes += static_cast<double>(backward.parameters[i].size_bytes);
    backward.ready_s.push_back(
        times[i] + (bytes > 0 ? packing_s * packed_bytes / bytes : 0));
  }
  backward.end_s = std::max(times.back(), backward.ready_s.back());
  return backward;
}

double BackwardProfiler::time_all_reduces_of(int64_t bytes, int count) const {
  const at::Tensor& like = parameters_.front();
  const int64_t numel =
      std::max<int64_t>(1, bytes / static_cast<int64_t>(like.element_size()));
  std::vector<at::Tensor> buffers;
  for (int i = 0; i < count; ++i) {
    buffers.push_back(at::zeros({numel}, like.options().requires_grad(false)));
  }
  std::vector<double> seconds;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    seconds.push_back(all_reduce(buffers, /*at_once=*/true));
  }
  take_slowest(seconds);
  return median_of(std::move(seconds));
}

std::vector<CostPoint> BackwardProfiler::time_all_reduces() const {
  int64_t largest = 2 * kSmallestBytes;
  for (const at::Tensor& parameter : parameters_) {
    largest += static_cast<int64_t>(parameter.nbytes());
  }
  largest = std::min(largest, kLargestBytes);
  std::vector<CostPoint> points;
  const auto time = [&](int64_t bytes) {
    // Several at once, as in a backward: latencies overlap, and a single one
    // may fit into the buffers of the network.
    const auto count =
        static_cast<int>(std::clamp<int64_t>(largest / bytes, 1, kMostAtOnce));
    points.push_back(
        {.bytes = bytes, .seconds = time_all_reduces_of(bytes, count) / count});
  };
  for (int64_t bytes = kSmallestBytes; bytes < largest; bytes *= 4) time(bytes);
  time(largest);
  return points;
}

}  // namespace brigade
