#include "brigade/reducer/reducer.h"

#include <c10/util/Exception.h>

#include <exception>
#include <optional>
#include <string>
#include <typeinfo>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/agreement.h"
#include "brigade/comm/control_device.h"
#include "brigade/comm/peer_error.h"
#include "brigade/comm_hooks/all_reduce_hook.h"
#include "brigade/hooks/backward_end.h"
#include "brigade/hooks/output_watch.h"
#include "brigade/planning/plan_by_size.h"
#include "brigade/planning/plan_check.h"

namespace brigade {
namespace {

absl::StatusOr<BucketPlan> initial_plan(const ParameterTable& table,
                                        const ReducerOptions& options) {
  if (options.bucket_plan.empty()) {
    return plan_by_size(table.specs(), reverse_registration_order(table.size()),
                        options.bucket_caps_bytes);
  }
  absl::StatusOr<BucketPlan> plan =
      BucketPlan::create(options.bucket_plan, table.size());
  if (!plan.ok()) return plan;
  if (absl::Status status = check_bucket_kinds(*plan, table.specs());
      !status.ok()) {
    return status;
  }
  return plan;
}

absl::Status check_devices(const ParameterTable& table,
                           const c10d::ProcessGroup& group) {
  for (size_t i = 0; i < table.size(); ++i) {
    const at::Device device = table[i].device();
    if (!supports_device(group, device.type())) {
      return absl::InvalidArgumentError(absl::StrCat(
          table.name_of(i), " is on ", device.str(),
          ", but the process group has no backend for that device; make the "
          "group for it, or move the parameter"));
    }
  }
  return absl::OkStatus();
}

// What ranks must have set alike, one line each.
std::vector<std::string> describe(const ReducerOptions& options) {
  std::vector<std::string> buckets;
  for (const std::vector<size_t>& bucket : options.bucket_plan) {
    buckets.push_back(absl::StrCat("[", absl::StrJoin(bucket, ", "), "]"));
  }
  return {absl::StrCat("bucket_caps_bytes = [",
                       absl::StrJoin(options.bucket_caps_bytes, ", "), "]"),
          absl::StrCat("bucket_plan = [", absl::StrJoin(buckets, ", "), "]"),
          absl::StrCat("rebuild_buckets = ",
                       options.rebuild_buckets ? "true" : "false")};
}

// Checks this rank's arguments, and with the other ranks that theirs are equal.
// A rank with bad arguments takes part, so that all ranks fail alike.
ParameterTable checked_table(
    std::vector<at::Tensor> parameters,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const ReducerOptions& options) {
  TORCH_CHECK_VALUE(group,
                    "Reducer needs a process group, got null.\n"
                    "Make one with init_process_group(), or with "
                    "single_process_group() for a world of 1.");
  absl::StatusOr<ParameterTable> table =
      ParameterTable::create(std::move(parameters), options.parameter_names,
                             options.expect_sparse_gradients);
  absl::Status status = table.status();
  if (status.ok()) status = check_devices(*table, *group);
  if (status.ok()) status = initial_plan(*table, options).status();
  const at::Device device = control_device(*group);
  require_agreement(
      group, device, "parameter",
      status.ok() ? table->describe_all() : std::vector<std::string>{}, status);
  require_agreement(group, device, "reducer option", describe(options),
                    absl::OkStatus());
  return *std::move(table);
}

// A group in which a collective failed is dead. Peers that wait for this rank
// shall learn it now, not at their timeout.
void close_connections(c10d::ProcessGroup& group) {
  try {
    group.abort();
  } catch (const std::exception&) {
    // This backend can't: peers wait for their timeout.
  }
}

ReducerOptions with_hook(ReducerOptions options,
                         const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  if (!options.comm_hook && group) options.comm_hook = all_reduce_hook(group);
  return options;
}

}  // namespace

Reducer::Reducer(std::vector<at::Tensor> parameters,
                 c10::intrusive_ptr<c10d::ProcessGroup> group,
                 ReducerOptions options)
    : group_(std::move(group)),
      options_(with_hook(std::move(options), group_)),
      table_(checked_table(std::move(parameters), group_, options_)),
      reduced_(std::make_shared<ReducedIterations>()),
      bound_(bind(*initial_plan(table_, options_))),
      ready_order_(options_.rebuild_buckets && options_.bucket_plan.empty()),
      failure_channel_(group_),
      hooks_(table_.tensors(), *this) {}

Reducer::~Reducer() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (iteration_) abandon();
}

BucketPlan Reducer::plan() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return bound_.plan;
}

ReducerStatistics Reducer::statistics() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return statistics_;
}

void Reducer::prepare(const std::vector<at::Tensor>& outputs) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (iteration_ && iteration_->phase == Phase::kReducing) {
    const std::string text = describe_missing_gradients(
        table_, iteration_->order.missing(), occasion(iteration_->iteration));
    abandon();
    TORCH_CHECK(false, text);
  }
  iteration_ = nullptr;
  if (failure_channel_.needs_realignment()) realign();
  if (ready_order_.is_pending()) rebuild();

  const int64_t iteration =
      1 + statistics_.iterations + statistics_.abandoned_iterations;
  iteration_ = std::make_shared<IterationState>(iteration, bound_.plan);
  for (const Bucket& bucket : bound_.buckets) {
    iteration_->streams.emplace_back(bucket.device());
  }
  ReducedIterations* reduced = reduced_.get();
  watch_outputs(outputs, reduced_, [reduced, iteration] {
    reduced->output_reached(iteration, running_backward_id());
  });
}

void Reducer::on_gradient_ready(size_t parameter) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int backward_id = running_backward_id();
  if (!iteration_) {
    TORCH_CHECK(
        !reduced_->is_stale(backward_id),
        describe_reduced_again(table_, parameter, occasion(reduced_->last())));
    return;  // accumulates locally
  }
  watch_backward(backward_id);
  iteration_->phase = Phase::kReducing;
  TORCH_CHECK(!iteration_->order.is_ready(parameter),
              describe_second_gradient(table_, parameter,
                                       occasion(iteration_->iteration)));
  const size_t bucket = bound_.plan.locate(parameter).bucket;
  StreamJoin& streams = iteration_->streams[bucket];
  streams.gradient_produced();
  if (!iteration_->order.mark_ready(parameter)) return;

  const at::ThreadLocalStateGuard as_preparer(iteration_->preparer);
  statistics_.bytes_packed += bound_.buckets[bucket].pack(streams);
  launch_full_buckets();
}

// Autograd tells of a backward's end only to those who ask during it.
void Reducer::watch_backward(int backward_id) {
  if (backward_id == iteration_->watched_backward) return;
  iteration_->watched_backward = backward_id;
  const int64_t iteration = iteration_->iteration;
  watch_backward_end(
      iteration_, [this, iteration] { on_backward_end(iteration); },
      [this, iteration] { on_backward_abandoned(iteration); });
}

void Reducer::launch_full_buckets() {
  while (std::optional<size_t> next = iteration_->order.take_next()) {
    Bucket& bucket = bound_.buckets[*next];
    Launch& launch = iteration_->launches.emplace_back(Launch{
        .record = {.sequence =
                       static_cast<uint64_t>(statistics_.buckets_launched),
                   .bucket = *next,
                   .numel = bucket.numel()},
        .future = nullptr});
    if (bucket.is_empty()) continue;
    try {
      launch.future = bucket.launch();
    } catch (...) {
      iteration_->launches.pop_back();
      rethrow(std::current_exception(), Source::kHook, *next,
              iteration_->iteration);
    }
    ++statistics_.buckets_launched;
  }
}

void Reducer::on_backward_end(int64_t iteration) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!iteration_ || iteration_->iteration != iteration) return;
  if (iteration_->all_launched()) finalize();
}

void Reducer::on_backward_abandoned(int64_t iteration) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!iteration_ || iteration_->iteration != iteration) return;
  if (!iteration_->all_launched()) return abandon();
  // This rank launched what its peers wait for: the reduction itself is sound.
  try {
    finalize();
  } catch (const std::exception& error) {
    TORCH_WARN("Reducer: while another error ended backward: ", error.what());
  }
}

// Waits for every future, also after an error: nothing may write into a bucket
// behind the user's back.
void Reducer::finalize() {
  const std::shared_ptr<IterationState> iteration = std::move(iteration_);
  iteration_ = nullptr;
  const at::ThreadLocalStateGuard as_preparer(iteration->preparer);
  ready_order_.observe(iteration->order.ready_order());

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
    ++statistics_.abandoned_iterations;
    rethrow(first_error, Source::kFuture, failed_bucket, iteration->iteration);
  }
  ++statistics_.iterations;
  reduced_->mark_reduced(iteration->iteration);
}

void Reducer::abandon() {
  const std::shared_ptr<IterationState> iteration = std::move(iteration_);
  iteration_ = nullptr;
  if (iteration->phase == Phase::kPrepared) return;
  ++statistics_.abandoned_iterations;
  // Announced before anything is waited for: peers that gave up earlier than
  // this rank have yet to launch what it waits for, and do so when they read
  // it.
  if (!iteration->all_launched()) {
    failure_channel_.announce_abandoned(iteration->iteration,
                                        iteration->launches.size());
  }
  for (const Launch& launch : iteration->launches) {
    if (launch.future) launch.future->wait();  // does not throw
  }
}

// Launches what the other ranks have launched of an iteration that all gave up,
// and discards the results.
void Reducer::realign() {
  const auto [begin, end] = failure_channel_.agree_on_launches();
  for (size_t b = begin; b < end; ++b) {
    Bucket& bucket = bound_.buckets[b];
    if (bucket.is_empty()) continue;
    try {
      bucket.clear();
      bucket.launch()->waitAndThrow();
    } catch (...) {
      rethrow(std::current_exception(), Source::kFuture, b,
              statistics_.iterations + statistics_.abandoned_iterations);
    }
  }
  failure_channel_.realigned();
}

void Reducer::rebuild() {
  std::vector<size_t> order;
  try {
    order = ready_order_.agree(group_);
  } catch (...) {
    throw_peer_error(
        absl::StrCat("Reducer: agreeing on the order of gradients on rank ",
                     group_->getRank()),
        std::current_exception());
  }
  BucketPlan plan =
      *plan_by_size(table_.specs(), order, options_.bucket_caps_bytes);
  ++statistics_.rebuilds;
  if (plan == bound_.plan) return;
  BoundPlan rebuilt = bind(std::move(plan));
  for (Bucket& bucket : rebuilt.buckets) bucket.adopt_gradients();
  bound_ = std::move(rebuilt);
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

// An error of c10's keeps its type: a wrong value, size or state, which a
// user's hook as a rule has brought about. Others come from the network, unless
// a user's hook itself threw them.
void Reducer::rethrow(std::exception_ptr error, Source source, size_t bucket,
                      int64_t iteration) {
  const std::string where = absl::StrCat(
      "Reducer: ",
      describe_bucket(table_, bound_.plan.buckets()[bucket], bucket,
                      bound_.plan.num_buckets(), occasion(iteration)));
  const bool built_in =
      dynamic_cast<DeclaresWireFormat*>(options_.comm_hook.get()) != nullptr;
  bool peer_failed = false;
  std::string hook_error;
  try {
    std::rethrow_exception(error);
  } catch (const c10::DistBackendError&) {
    peer_failed = true;
  } catch (c10::Error& known) {
    peer_failed = built_in && typeid(known) == typeid(c10::Error);
    if (!peer_failed) {
      known.add_context(where);
      throw;
    }
  } catch (const std::exception& unknown) {
    peer_failed = built_in || source == Source::kFuture;
    hook_error = unknown.what();
  }
  TORCH_CHECK(peer_failed, where, ": the comm hook threw: ", hook_error);
  if (built_in) close_connections(*group_);
  const std::optional<RollCall> roll =
      failure_channel_.call_survivors(iteration);
  throw_peer_error(where, error, roll.has_value() ? &*roll : nullptr);
}

Occasion Reducer::occasion(int64_t iteration) const {
  return {.iteration = iteration, .rank = group_->getRank()};
}

}  // namespace brigade
