#include "brigade/reducer/reducer.h"

#include <c10/util/Exception.h>

#include <exception>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/peer_error.h"
#include "brigade/comm/status_bridge.h"
#include "brigade/hooks/backward_end.h"
#include "brigade/hooks/output_watch.h"
#include "brigade/planning/plan_by_size.h"

namespace brigade {
namespace {

// A group in which a collective failed is dead. Peers that wait for this rank
// shall learn it now, not at their timeout.
void close_connections(c10d::ProcessGroup& group) {
  try {
    group.abort();
  } catch (const std::exception&) {
    // This backend can't: peers wait for their timeout.
  }
}

}  // namespace

Reducer::Reducer(std::vector<at::Tensor> parameters,
                 c10::intrusive_ptr<c10d::ProcessGroup> group,
                 ReducerOptions options)
    : Reducer(checked_setup(std::move(parameters), std::move(group),
                            std::move(options))) {}

Reducer::Reducer(ReducerSetup setup)
    : group_(std::move(setup.group)),
      options_(std::move(setup.options)),
      table_(std::move(setup.table)),
      bound_(bind(std::move(setup.plan))),
      ready_order_(options_.rebuild_buckets && options_.bucket_plan.empty()),
      failure_channel_(group_),
      hooks_(std::make_shared<GradientHooks>(
          table_.tensors(), static_cast<GradientListener&>(*this))) {}

Reducer::~Reducer() {
  // A backward that failed may tell of it a little late, on another thread.
  const std::weak_ptr<GradientHooks> callbacks = hooks_;
  hooks_ = nullptr;
  while (!callbacks.expired()) std::this_thread::yield();

  // Collectives in flight go on; they keep their buckets and their hook.
  if (!iteration_) return;
  const auto kept = std::make_shared<
      std::pair<BoundPlan, std::shared_ptr<c10d::CommHookInterface>>>(
      std::move(bound_), options_.comm_hook);
  for (const Launch& launch : iteration_->launches) {
    if (!launch.future) continue;
    launch.future->addCallback([kept](c10::ivalue::Future&) {},
                               /*uses_future=*/false);
  }
}

BucketPlan Reducer::plan() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return bound_.plan;
}

ReducerStatistics Reducer::statistics() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return statistics_;
}

void Reducer::cancel_preparation() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (iteration_ && iteration_->phase == Phase::kPrepared) iteration_ = nullptr;
}

void Reducer::recover() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (iteration_ && iteration_->phase == Phase::kFailed) give_up();
  if (failure_channel_.needs_realignment()) realign();
}

void Reducer::prepare(const std::vector<at::Tensor>& outputs) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (iteration_ && iteration_->phase == Phase::kReducing) {
    const std::string text = describe_missing_gradients(
        table_, iteration_->order.missing(), occasion(iteration_->iteration));
    give_up();
    TORCH_CHECK(false, text);
  }
  if (iteration_ && iteration_->phase == Phase::kFailed) give_up();
  iteration_ = nullptr;
  check_parameters();
  if (failure_channel_.needs_realignment()) realign();
  if (ready_order_.is_pending()) rebuild();

  const int64_t iteration = ++statistics_.prepared;
  iteration_ = std::make_shared<IterationState>(iteration, bound_.plan);
  for (const Bucket& bucket : bound_.buckets) {
    iteration_->streams.emplace_back(bucket.device());
  }
  watch_outputs(outputs, hooks_,
                [this, iteration] { on_output_reached(iteration); });
}

void Reducer::check_parameters() const {
  if (const auto detached = hooks_->first_detached(table_.tensors())) {
    TORCH_CHECK(false,
                "Reducer::prepare_for_backward: ", table_.name_of(*detached),
                " was moved or cast after the reducer was made, so that its "
                "gradient is not seen.\nMove the module first, then make the "
                "reducer.");
  }
  if (!options_.gradients_as_bucket_views) return;
  // A gradient that the user put where it is must not lie in the place of
  // another one, which travels while this one is still accumulated.
  for (size_t i = 0; i < table_.size(); ++i) {
    at::Tensor& gradient = table_[i].mutable_grad();
    if (!gradient.defined()) continue;
    const auto [bucket, slot] = bound_.plan.locate(i);
    if (bound_.buckets[bucket].is_view_in(slot, gradient)) continue;
    for (const Bucket& other : bound_.buckets) {
      if (!other.owns_memory_of(gradient)) continue;
      gradient = gradient.clone();
      break;
    }
  }
}

void Reducer::on_output_reached(int64_t iteration) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int backward_id = running_backward_id();
  finished_.output_reached(iteration, backward_id);
  if (iteration_ && iteration_->iteration == iteration) {
    watch_backward(backward_id);
  }
}

void Reducer::on_gradient_ready(size_t parameter) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int backward_id = running_backward_id();
  if (!iteration_) {
    if (const auto finished = finished_.passed_by(backward_id)) {
      TORCH_CHECK(false, describe_late_gradient(table_, parameter,
                                                occasion(*finished)));
    }
    return;  // accumulates locally
  }
  if (iteration_->phase == Phase::kFailed) return;
  iteration_->phase = Phase::kReducing;
  try {
    watch_backward(backward_id);
    accept_gradient(parameter);
  } catch (...) {
    iteration_->phase = Phase::kFailed;
    throw;
  }
}

// Autograd tells of a backward's end only to those who ask during it.
void Reducer::watch_backward(int backward_id) {
  if (backward_id == iteration_->watched_backward) return;
  iteration_->watched_backward = backward_id;
  const int64_t iteration = iteration_->iteration;
  watch_backward_end(
      hooks_, [this, iteration] { on_backward_end(iteration); },
      [this, iteration] { on_backward_abandoned(iteration); });
}

void Reducer::accept_gradient(size_t parameter) {
  LaunchOrder& order = iteration_->order;
  TORCH_CHECK(!order.is_ready(parameter),
              describe_second_gradient(table_, parameter,
                                       occasion(iteration_->iteration)));
  const size_t bucket = bound_.plan.locate(parameter).bucket;
  StreamJoin& streams = iteration_->streams[bucket];
  streams.gradient_produced();
  if (!order.mark_ready(parameter)) return;

  const at::ThreadLocalStateGuard as_preparer(iteration_->preparer);
  statistics_.bytes_packed += bound_.buckets[bucket].pack(streams);
  launch_full_buckets();
}

void Reducer::launch_full_buckets() {
  while (const std::optional<size_t> next = iteration_->order.take_next()) {
    Bucket& bucket = bound_.buckets[*next];
    Launch launch = {.record = {.sequence = static_cast<uint64_t>(
                                    statistics_.buckets_launched),
                                .bucket = *next,
                                .numel = bucket.numel()},
                     .future = nullptr};
    if (!bucket.is_empty()) {
      try {
        launch.future = bucket.launch();
      } catch (...) {
        rethrow(std::current_exception(), ErrorSource::kHook, *next,
                iteration_->iteration);
      }
      ++statistics_.buckets_launched;
    }
    iteration_->launches.push_back(std::move(launch));
  }
}

// True if peers wait for nothing that this rank has yet to launch.
bool Reducer::all_sent(const IterationState& iteration) const {
  for (size_t b = iteration.launches.size(); b < bound_.buckets.size(); ++b) {
    if (!bound_.buckets[b].is_empty()) return false;
  }
  return true;
}

void Reducer::on_backward_end(int64_t iteration) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!iteration_ || iteration_->iteration != iteration) return;
  switch (iteration_->phase) {
    case Phase::kPrepared:
      return;  // gradients were computed, but not of parameters
    case Phase::kFailed:
      return give_up();
    case Phase::kReducing:
      if (iteration_->order.all_launched()) return finalize();
      // Another backward may bring the rest. Until then nothing writes behind
      // the user's back.
      return wait_quietly(*iteration_);
  }
}

void Reducer::on_backward_abandoned(int64_t iteration) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!iteration_ || iteration_->iteration != iteration) return;
  if (iteration_->phase == Phase::kFailed ||
      !iteration_->order.all_launched()) {
    return give_up();
  }
  // This rank launched what its peers wait for: the reduction itself is sound.
  // Peers that did give up may now launch what this rank waits for.
  failure_channel_.announce(iteration, bound_.buckets.size());
  try {
    finalize();
  } catch (const std::exception& error) {
    TORCH_WARN("Reducer: while another error ended backward: ", error.what());
  } catch (...) {
    TORCH_WARN("Reducer: an unknown error while another ended backward");
  }
}

// Waits for every future, also after an error: nothing may write into a bucket
// behind the user's back.
void Reducer::finalize() {
  const std::shared_ptr<IterationState> iteration =
      std::exchange(iteration_, nullptr);
  finished_.mark_finished(iteration->iteration);
  ready_order_.observe(iteration->order.ready_order());
  const at::ThreadLocalStateGuard as_preparer(iteration->preparer);

  std::exception_ptr first_error;
  size_t failed_bucket = 0;
  for (const Launch& launch : iteration->launches) {
    try {
      if (!launch.future) continue;
      launch.future->waitAndThrow();
      if (first_error) continue;
      statistics_.bytes_delivered +=
          bound_.buckets[launch.record.bucket].deliver(launch.future->value());
    } catch (...) {
      if (first_error) continue;
      first_error = std::current_exception();
      failed_bucket = launch.record.bucket;
    }
  }
  if (first_error) {
    ++statistics_.given_up;
    rethrow(first_error, ErrorSource::kFuture, failed_bucket,
            iteration->iteration);
  }
  ++statistics_.reduced;
}

// Does not throw: destructors of autograd's call it.
void Reducer::give_up() {
  const std::shared_ptr<IterationState> iteration =
      std::exchange(iteration_, nullptr);
  finished_.mark_finished(iteration->iteration);
  ++statistics_.given_up;
  // Announced before anything is waited for: peers that gave up earlier than
  // this rank have yet to launch what it waits for, and do so when they read
  // it.
  if (all_sent(*iteration)) {
    failure_channel_.announce(iteration->iteration, bound_.buckets.size());
  } else {
    failure_channel_.require_realignment(iteration->iteration,
                                         iteration->launches.size());
  }
  wait_quietly(*iteration);
}

void Reducer::wait_quietly(const IterationState& iteration) const {
  for (const Launch& launch : iteration.launches) {
    if (!launch.future) continue;
    try {
      launch.future->wait();
      const c10::Device device = bound_.buckets[launch.record.bucket].device();
      // Waiting orders streams only, and not the ones that the user works on.
      if (!device.is_cpu()) current_stream(device).synchronize();
    } catch (const std::exception& error) {
      TORCH_WARN(
          "Reducer: while waiting for ",
          describe_bucket(table_, bound_.plan.buckets()[launch.record.bucket],
                          launch.record.bucket, bound_.plan.num_buckets(),
                          occasion(iteration.iteration)),
          ": ", error.what());
    }
  }
}

// Launches what the other ranks have launched of an iteration that all gave up,
// and discards the results.
void Reducer::realign() {
  const auto [begin, end] = failure_channel_.agree_on_launches();
  for (size_t b = begin; b < end; ++b) {
    Bucket& bucket = bound_.buckets[b];
    try {
      if (!bucket.is_empty()) {
        const auto future = bucket.launch_zeros();
        ++statistics_.buckets_launched;
        failure_channel_.advance();
        future->waitAndThrow();
      } else {
        failure_channel_.advance();
      }
    } catch (...) {
      rethrow(std::current_exception(), ErrorSource::kFuture, b,
              statistics_.prepared);
    }
  }
  failure_channel_.realigned();
}

void Reducer::rebuild() {
  const std::vector<size_t>* order = nullptr;
  try {
    order = &ready_order_.agree(group_);
  } catch (...) {
    throw_peer_error(
        absl::StrCat("Reducer: agreeing on the order of gradients on rank ",
                     group_->getRank()),
        std::current_exception());
  }
  BucketPlan plan = value_or_throw(
      plan_by_size(table_.specs(), *order, options_.bucket_caps_bytes));
  if (plan != bound_.plan) {
    BoundPlan rebuilt = bind(std::move(plan));
    for (Bucket& bucket : rebuilt.buckets) bucket.adopt_gradients();
    bound_ = std::move(rebuilt);
  }
  ++statistics_.rebuilds;
  ready_order_.settle();
}

Reducer::BoundPlan Reducer::bind(BucketPlan plan) const {
  std::vector<Bucket> buckets;
  buckets.reserve(plan.num_buckets());
  for (size_t b = 0; b < plan.num_buckets(); ++b) {
    buckets.emplace_back(table_, plan, b, *options_.comm_hook,
                         options_.gradients_as_bucket_views);
  }
  return {.plan = std::move(plan), .buckets = std::move(buckets)};
}

void Reducer::rethrow(const std::exception_ptr& error, ErrorSource source,
                      size_t bucket, int64_t iteration) {
  const std::string where = absl::StrCat(
      "Reducer: ",
      describe_bucket(table_, bound_.plan.buckets()[bucket], bucket,
                      bound_.plan.num_buckets(), occasion(iteration)));
  if (!is_peer_failure(error, source, *options_.comm_hook)) {
    rethrow_hook_error(error, where);
  }
  // A user's hook may use other groups, and be mistaken about the network.
  if (dynamic_cast<DeclaresWireFormat*>(options_.comm_hook.get())) {
    close_connections(*group_);
  }
  const std::optional<RollCall> roll =
      failure_channel_.call_survivors(absl::StrCat(iteration, "/", bucket));
  throw_peer_error(where, error, roll.has_value() ? &*roll : nullptr);
}

Occasion Reducer::occasion(int64_t iteration) const {
  return {.iteration = iteration, .rank = group_->getRank()};
}

}  // namespace brigade
