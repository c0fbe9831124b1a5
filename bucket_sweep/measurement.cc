#include "brigade/bucket_sweep/measurement.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <limits>
#include <memory>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "brigade/comm/ordered/host_sums.h"
#include "brigade/planning/bucket_plan.h"
#include "brigade/reducer/reducer.h"

namespace brigade {
namespace {

constexpr double kBytesPerMib = 1024.0 * 1024.0;
constexpr double kLargestMib = 1e6;

using Clock = std::chrono::steady_clock;

// The reducer plans its buckets after the first step, with a static graph after
// the second.
constexpr int kStepsUntilRebuilt = 3;

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin)
      .count();
}

class Training {
 public:
  Training(const std::vector<at::Tensor>& parameters,
           const std::function<at::Tensor()>& loss,
           const c10::intrusive_ptr<c10d::ProcessGroup>& group,
           const ReducerOptions& options)
      : loss_(loss), group_(group), options_(options) {
    std::ranges::copy_if(parameters, std::back_inserter(parameters_),
                         &at::Tensor::requires_grad);
    TORCH_CHECK_VALUE(!parameters_.empty(),
                      "bucket sweep: expected a parameter with requires_grad, "
                      "found none.\nPass a model with trainable parameters.");
    host_sums_ = HostSums::get_or_make(group_, /*wants=*/true);
  }

  const std::vector<at::Tensor>& parameters() const { return parameters_; }

  // Plans the arm's buckets. Adds the plan, or the arm to an equal plan.
  void add_arm(std::vector<PlanSamples>& plans, const BucketArm& arm) {
    ReducerOptions options = options_;
    options.bucket_plan = {};
    options.bucket_cap_bytes = arm.caps_bytes;
    Reducer reducer(parameters_, group_, options);
    for (int step = 0; step < kStepsUntilRebuilt; ++step) timed_step(&reducer);
    const std::vector<std::vector<size_t>>& buckets = reducer.plan().buckets();
    const auto same = std::ranges::find(plans, buckets, &PlanSamples::buckets);
    if (same != plans.end()) {
      same->arms.push_back(arm);
    } else {
      plans.push_back({.arms = {arm},
                       .buckets = buckets,
                       .bucket_bytes = bytes_of(buckets)});
    }
    drop_gradients();
  }

  void run_turn(PlanSamples& plan, int64_t num_steps) {
    if (plan.buckets.empty()) return time_steps(plan, num_steps, nullptr);
    {
      ReducerOptions options = options_;
      options.bucket_plan = plan.buckets;
      Reducer reducer(parameters_, group_, options);
      time_steps(plan, num_steps, &reducer);
    }
    plan.alone_ms.push_back(all_reduce_alone(plan));
  }

  // Collective. Replaces each sample by its maximum over ranks.
  void take_slowest(std::vector<double>& samples) const {
    if (samples.empty()) return;
    std::vector<at::Tensor> slowest = {
        at::tensor(samples, at::kDouble).to(device())};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::MAX;
    group_->allreduce(slowest, options)->wait();
    const at::Tensor found = slowest[0].cpu();
    const double* const data = found.const_data_ptr<double>();
    samples.assign(data, data + samples.size());
  }

 private:
  at::Device device() const { return parameters_.front().device(); }

  void synchronize() const {
    if (device().is_cpu()) return;
    c10::impl::VirtualGuardImpl(device().type())
        .synchronizeDevice(device().index());
  }

  void barrier() const {
    std::vector<at::Tensor> token = {at::zeros({1}, device())};
    group_->allreduce(token)->wait();
    synchronize();
  }

  void drop_gradients() const {
    for (const at::Tensor& parameter : parameters_) {
      parameter.mutable_grad().reset();
    }
  }

  double timed_step(Reducer* reducer) const {
    drop_gradients();
    barrier();
    const Clock::time_point begin = Clock::now();
    const at::Tensor loss = loss_();
    TORCH_CHECK_VALUE(loss.numel() == 1,
                      "bucket sweep: expected a loss of one element, found "
                      "shape ",
                      loss.sizes(), ".\nReturn its mean or its sum.");
    if (reducer != nullptr) reducer->prepare_for_backward(loss);
    loss.backward();
    synchronize();
    return ms_since(begin);
  }

  void time_steps(PlanSamples& plan, int64_t num_steps, Reducer* reducer) {
    timed_step(reducer);  // warm-up
    std::vector<double>& times = plan.rounds_ms.emplace_back();
    for (int64_t step = 0; step < num_steps; ++step) {
      times.push_back(timed_step(reducer));
    }
    drop_gradients();
  }

  std::vector<int64_t> bytes_of(
      const std::vector<std::vector<size_t>>& buckets) const {
    std::vector<int64_t> bytes;
    for (const std::vector<size_t>& bucket : buckets) {
      bytes.push_back(0);
      for (const size_t i : bucket) {
        bytes.back() += static_cast<int64_t>(parameters_[i].nbytes());
      }
    }
    return bytes;
  }

  double all_reduce_alone(const PlanSamples& plan) const {
    std::vector<at::Tensor> buffers;
    for (size_t b = 0; b < plan.buckets.size(); ++b) {
      const at::Tensor& like = parameters_[plan.buckets[b].front()];
      buffers.push_back(at::zeros(
          {plan.bucket_bytes[b] / static_cast<int64_t>(like.element_size())},
          like.options()));
    }
    barrier();
    const Clock::time_point begin = Clock::now();
    for (const at::Tensor& buffer : buffers) {
      if (host_sums_ && HostSums::can_reduce(buffer)) {
        host_sums_->all_reduce(buffer)->waitAndThrow();
        continue;
      }
      std::vector<at::Tensor> sum = {buffer};
      group_->allreduce(sum)->wait();
    }
    synchronize();
    return ms_since(begin);
  }

  std::vector<at::Tensor> parameters_;
  const std::function<at::Tensor()>& loss_;
  const c10::intrusive_ptr<c10d::ProcessGroup>& group_;
  std::shared_ptr<HostSums>
      host_sums_;  // as the reducer: null if there are none
  const ReducerOptions& options_;
};

}  // namespace

BucketArm default_arm() {
  return {.label = "default",
          .caps_bytes = {kDefaultBucketCapsBytes.begin(),
                         kDefaultBucketCapsBytes.end()}};
}

BucketArm arm_of(std::string_view size) {
  if (size == "each") return {.label = "one per parameter", .caps_bytes = {1}};
  if (size == "one") {
    return {.label = "one",
            .caps_bytes = {std::numeric_limits<int64_t>::max()}};
  }
  double mib = 0;
  const bool is_number =
      absl::SimpleAtod(absl::string_view(size.data(), size.size()), &mib);
  TORCH_CHECK_VALUE(
      is_number && mib > 0 && mib <= kLargestMib,
      "bucket sweep: expected a size of more than 0 MiB, 'one' or 'each', "
      "found '",
      std::string(size), "'.\nPass a number, for example 25.");
  const auto bytes = static_cast<int64_t>(mib * kBytesPerMib);
  return {.label = absl::StrCat(mib, " MiB"),
          .caps_bytes = {std::max<int64_t>(1, bytes)}};
}

SweepSamples measure(const std::vector<at::Tensor>& parameters,
                     const std::function<at::Tensor()>& loss,
                     const std::vector<std::string>& sizes,
                     const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                     int64_t num_rounds, int64_t num_steps,
                     const ReducerOptions& options) {
  TORCH_CHECK_VALUE(num_rounds > 0 && num_steps > 0,
                    "bucket sweep: expected at least 1 round and 1 step, found "
                    "rounds = ",
                    num_rounds, " and steps = ", num_steps,
                    ".\nOmit them to use the defaults.");
  std::vector<BucketArm> arms = {default_arm()};
  for (const std::string& size : sizes) arms.push_back(arm_of(size));
  TORCH_CHECK_VALUE(
      group->getSize() > 1,
      "bucket sweep: expected at least 2 ranks, found 1: nothing is "
      "communicated.\nStart more, for example with torchrun --standalone "
      "--nproc-per-node 2 -m brigade.bench ...");
  Training training(parameters, loss, group, options);

  SweepSamples samples;
  samples.num_parameters = static_cast<int64_t>(training.parameters().size());
  for (const at::Tensor& parameter : training.parameters()) {
    samples.gradient_bytes += static_cast<int64_t>(parameter.nbytes());
  }
  for (const BucketArm& arm : arms) {
    training.add_arm(samples.plans, arm);
  }

  PlanSamples local;
  std::vector<PlanSamples*> order = {&local};
  for (PlanSamples& plan : samples.plans) order.push_back(&plan);
  for (int64_t round = 0; round < num_rounds; ++round) {
    for (PlanSamples* const plan : order) {
      training.run_turn(*plan, num_steps);
    }
    std::ranges::reverse(order);
  }

  for (PlanSamples* const plan : order) {
    for (std::vector<double>& times : plan->rounds_ms) {
      training.take_slowest(times);
    }
    training.take_slowest(plan->alone_ms);
  }
  samples.local_ms = std::move(local.rounds_ms);
  return samples;
}

}  // namespace brigade
