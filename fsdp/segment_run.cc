#include "brigade/fsdp/segment_run.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/streams/streams.h"

namespace brigade {
namespace {

// Returns views of a unit's buffer as its unsharded flat parameters.
std::vector<at::Tensor> unsharded_views(const ShardedUnit& unit,
                                        const at::Tensor& bytes) {
  std::vector<at::Tensor> views;
  int64_t offset = 0;
  for (const auto& flat : unit.flats) {
    const int64_t size = flat->whole_bytes();
    views.push_back(
        flat->whole_in(size == 0 ? bytes : bytes.narrow(0, offset, size)));
    offset += size;
  }
  return views;
}

}  // namespace

SegmentRun::SegmentRun(Model model, Plan plan)
    : model_(model),
      plan_(std::move(plan)),
      cursor_(plan_.rules, plan_.schedule, plan_.unsharded, plan_.expected) {}

void SegmentRun::begin() {
  shards_written_ = StreamPoint::now(device());
  CursorActions actions = cursor_.begin();
  perform_all(actions);
  throw_recorded_error();
}

void SegmentRun::use(std::span<const size_t> units) {
  throw_recorded_error();
  CursorActions actions;
  while (const std::optional<size_t> unit = cursor_.need(units, actions)) {
    perform_all(actions);
    throw_recorded_error();
    round(unit, actions);
    perform_all(actions);
    throw_recorded_error();
  }
  perform_all(actions);
  throw_recorded_error();
  for (const size_t unit : units) wait_for(unit);
}

// ---- All-gathers.

void SegmentRun::perform_all(CursorActions& actions) {
  for (const auto& [kind, unit] : std::exchange(actions, {})) {
    if (is_broken_) return;
    switch (kind) {
      case CursorAction::Kind::kAllGather:
        all_gather(unit);
        break;
      case CursorAction::Kind::kReduceScatter:
        reduce(unit);
        break;
      case CursorAction::Kind::kRelease:
        release(unit);
        break;
    }
  }
}

// The host waits; on devices only the current stream does.
void SegmentRun::wait(const ShardedUnit::FuturePtr& future,
                      const ShardedUnit& unit) {
  std::optional<WaitForPeers> waiting;
  if (!future->completed()) waiting.emplace(model_.progress, &unit.name);
  future->wait();
}

// If memory is short, records the error and releases this rank's buffers, so
// that the rest of the schedule can still run on them.
Lease SegmentRun::acquire(int64_t bytes) {
  try {
    return model_.memory.acquire(bytes);
  } catch (...) {
    record_error();
  }
  for (size_t unit = 0; unit < model_.units.size(); ++unit) {
    if (!model_.units[unit].is_by_hand) release(unit);
  }
  return model_.memory.acquire(bytes);
}

void SegmentRun::all_gather(size_t number) {
  ShardedUnit& unit = model_.units[number];
  try {
    const bool is_held = unit.gathered.has_value();
    const bool has_kept_storage = !is_held && unit.kept;
    Lease lease = has_kept_storage ? std::exchange(unit.kept, {})
                                   : acquire(unit.whole_bytes());
    ShardedUnit::Gathered gathered = gather_into(number, std::move(lease));
    if (is_held) {
      surplus_gathers_.push_back(std::move(gathered));
    } else {
      unit.gathered = std::move(gathered);
      unit.is_stale = false;
    }
  } catch (...) {
    record_error(absl::StrCat("the all-gather of ", describe_unit(unit.name)));
    is_broken_ = true;
  }
}

ShardedUnit::Gathered SegmentRun::gather_into(size_t number, Lease lease) {
  ShardedUnit& unit = model_.units[number];
  ShardTransport& transport = *unit.transport;
  const auto on_gathers = transport.streams().for_gathers();
  std::exchange(shards_written_, {}).wait();
  has_gathered_ = true;
  std::exchange(lease.last_use, {}).wait();
  ShardedUnit::Gathered gathered = {.lease = std::move(lease)};
  gathered.wholes = unsharded_views(unit, gathered.lease.bytes);
  const at::NoGradGuard no_grad;
  model_.recorder.launch_begins(ShardingRecorder::kAllGather, number,
                                unit.whole_bytes());
  for (size_t i = 0; i < unit.flats.size(); ++i) {
    FlatShard& flat = *unit.flats[i];
    if (flat.is_whole_here()) continue;
    const at::Tensor& whole = gathered.wholes[i];
    if (plan_.has_slices && !unit.slices.empty()) {
      const int num_ranks = *unit.settings.reshard_to;
      const int64_t size = whole.numel() / num_ranks;
      whole.narrow(0, transport.shard_rank() % num_ranks * size, size)
          .copy_(unit.slices[i]);
      gathered.futures.push_back(transport.all_gather(whole, num_ranks));
    } else {
      flat.write_own_slice(whole);
      gathered.futures.push_back(
          transport.all_gather(whole, transport.num_shards()));
    }
    model_.recorder.launched(ShardingRecorder::kAllGather,
                             *gathered.futures.back());
  }
  model_.progress.launched.fetch_add(1, std::memory_order_relaxed);
  return gathered;
}

void SegmentRun::wait_for(size_t number) {
  ShardedUnit& unit = model_.units[number];
  const bool is_new_stream = unit.uses->add_current();
  if (unit.is_bound && !is_new_stream) return;
  if (is_new_stream) {
    for (const auto& flat : unit.flats) flat->note_use();
  }
  model_.recorder.needed(number);
  std::vector<ShardedUnit::FuturePtr>& futures = unit.gathered->futures;
  try {
    for (const auto& future : futures) {
      wait(future, unit);
      if (future->hasError()) {
        std::rethrow_exception(future->exception_ptr());
      }
    }
  } catch (...) {
    is_broken_ = true;
    throw_failure_of_peers();
    throw_with_context(
        absl::StrCat("the all-gather of ", describe_unit(unit.name)));
  }
  model_.recorder.unsharded(number);
  if (device().is_cpu()) futures.clear();
  unit.bind();
}

void SegmentRun::release(size_t number) {
  ShardedUnit& unit = model_.units[number];
  if (!unit.gathered || unit.is_by_hand) return;
  const bool keeps = plan_.keeps_slices && unit.settings.keeps_slices();
  const bool has_memory{unit.gathered->lease};
  if (!has_memory) unit.uses->forget();
  if (has_memory && (keeps || unit.uses->empty())) {
    // The all-gather may still write to a buffer that no operator has used.
    const auto on_gathers = unit.transport->streams().for_gathers();
    for (const auto& future : unit.gathered->futures) {
      wait(future, unit);
      is_broken_ |= future->hasError();
    }
    if (keeps) {
      const int num_ranks = *unit.settings.reshard_to;
      const int slice = unit.transport->shard_rank() % num_ranks;
      const at::NoGradGuard no_grad;
      unit.slices.clear();
      for (const at::Tensor& whole : unit.gathered->wholes) {
        const int64_t size = whole.numel() / num_ranks;
        unit.slices.push_back(whole.narrow(0, slice * size, size).clone());
      }
    }
    unit.uses->add_current();
  }
  const StreamPoint last_use = unit.uses->end();
  unit.unbind();
  Lease lease = std::exchange(unit.gathered, std::nullopt)->lease;
  if (unit.settings.keeps_storage && lease) {
    lease.last_use = last_use;
    unit.kept = std::move(lease);
  } else {
    model_.memory.release(std::move(lease), last_use);
  }
}

// ---- Gradients.

void SegmentRun::prepare_gradients(size_t number) {
  ShardedUnit& unit = model_.units[number];
  const bool has_all = std::ranges::all_of(unit.flats, [](const auto& flat) {
    return !flat->is_trained() || flat->has_gradients();
  });
  if (has_all) return;
  while (reducing_.size() >= plan_.max_reducing) finish_oldest_reduction();
  if (!unit.gradients) unit.gradients = acquire(unit.gradient_bytes());
  int64_t offset = 0;
  for (const auto& flat : unit.flats) {
    if (!flat->is_trained()) continue;
    const int64_t size = flat->gradient_bytes();
    flat->set_gradients(unit.gradients.bytes.narrow(0, offset, size),
                        unit.gradients.last_use);
    offset += size;
  }
}

void SegmentRun::accumulate(size_t number, FlatShard& flat, size_t parameter,
                            const at::Tensor& gradient, bool is_reduced) {
  throw_recorded_error();
  prepare_gradients(number);
  flat.accumulate(parameter, gradient);
  if (is_reduced) count_gradient(number);
}

void SegmentRun::add_held_gradients(size_t number) {
  prepare_gradients(number);
  count_gradient(number);
}

void SegmentRun::count_gradient(size_t number) {
  CursorActions actions;
  cursor_.accumulated(number, actions);
  perform_all(actions);
  throw_recorded_error();
}

void SegmentRun::reduce(size_t number) {
  ShardedUnit& unit = model_.units[number];
  if (!unit.settings.synchronizes || !unit.is_trained()) return;
  try {
    prepare_gradients(number);
    UnitReduction& reduction = reducing_.emplace_back(UnitReduction{
        .unit = number, .gradients = std::exchange(unit.gradients, {})});
    model_.recorder.launch_begins(ShardingRecorder::kReduceScatter, number,
                                  unit.gradient_bytes());
    for (const auto& flat : unit.flats) {
      if (!flat->is_trained()) continue;
      reduction.flats.push_back(reduce_flat(unit, *flat));
    }
  } catch (...) {
    record_error(absl::StrCat("the reduction of ", describe_unit(unit.name)));
    is_broken_ = true;
  }
}

SegmentRun::FlatReduction SegmentRun::reduce_flat(const ShardedUnit& unit,
                                                  FlatShard& flat) {
  const at::NoGradGuard no_grad;
  FlatReduction reduction = {.flat = &flat};
  try {
    reduction.sum = flat.make_sum();  // on the current stream: it is `.grad`
  } catch (...) {
    record_error();  // memory is short
  }
  StreamPoint sum_made;
  if (!flat.is_written_here()) sum_made = StreamPoint::now(flat.device());
  const auto on_reductions = unit.transport->streams().for_reductions();
  sum_made.wait();
  const at::Tensor gradients = flat.take_gradients();
  if (has_failed()) gradients.zero_();
  if (!reduction.sum.defined()) {  // any memory will do: the sum is dropped
    const int64_t size = gradients.numel() / unit.transport->num_shards();
    reduction.sum =
        gradients.narrow(0, unit.transport->shard_rank() * size, size);
  }
  const auto launched = std::make_shared<ShardedUnit::FuturePtr>();
  try {
    reduction.future =
        launch_reduction(unit, flat, gradients, reduction.sum, launched);
  } catch (...) {
    record_error();
    reduction.future = *launched;
    if (!reduction.future) {  // a comm hook threw before its launch
      gradients.zero_();
      reduction.future =
          launch_reduction(unit, flat, gradients, reduction.sum, launched);
    }
  }
  model_.recorder.launched(ShardingRecorder::kReduceScatter, *reduction.future);
  return reduction;
}

ShardedUnit::FuturePtr SegmentRun::launch_reduction(
    const ShardedUnit& unit, FlatShard& flat, const at::Tensor& gradients,
    const at::Tensor& sum,
    const std::shared_ptr<ShardedUnit::FuturePtr>& launched) {
  ShardTransport& transport = *unit.transport;
  const bool over_replicas = unit.sums_over_replicas();
  ShardTransport::ReduceOptions options = {
      .scale = over_replicas ? 1.0 / unit.divisor() : 1.0,
      .over_replicas = over_replicas,
      .partial_sum = over_replicas ? flat.take_partial_sum() : at::Tensor()};
  if (unit.divides_first(flat)) {  // earlier partial sums were divided, too
    options.scale = 1;
    if (unit.divisor() != 1) gradients.mul_(1 / unit.divisor());
  }
  if (!unit.comm_hook) {
    return transport.reduce_scatter(gradients, sum, options);
  }
  auto future = unit.comm_hook->reduce(
      {.unit = unit.name,
       .index = flat.context().unit,
       .whole = gradients,
       .shard = sum,
       .rank = transport.shard_rank(),
       .sum = [&transport, options, launched,
               name = unit.comm_hook->hook_name()](const at::Tensor& sent,
                                                   const at::Tensor& shard) {
         TORCH_CHECK(!*launched,
                     "fully_shard: expected one call of `sum` "
                     "by comm hook '",
                     name, "', found two.\nReturn the first call's future.");
         *launched = transport.reduce_scatter(sent, shard, options);
         return *launched;
       }});
  TORCH_CHECK(future, "fully_shard: expected a future from comm hook '",
              unit.comm_hook->hook_name(), "' for ", describe_unit(unit.name),
              ", found null.\nReturn the future of its collective.");
  return future;
}

// Releases the memory of the gradients. The flat shards get the sums when the
// segment ends.
void SegmentRun::finish_oldest_reduction() {
  UnitReduction oldest = std::move(reducing_.front());
  reducing_.pop_front();
  const ShardedUnit& unit = model_.units[oldest.unit];
  for (const FlatReduction& reduction : oldest.flats) {
    if (!reduction.future->completed()) wait(reduction.future, unit);
    if (!reduction.future->hasError()) continue;
    is_broken_ |= !unit.comm_hook || unit.comm_hook->fails_by_network_only();
    try {
      throw_failure_of_peers();
      std::rethrow_exception(reduction.future->exception_ptr());
    } catch (...) {
      record_error(unit.comm_hook ? ""
                                  : absl::StrCat("the reduction of ",
                                                 describe_unit(unit.name)));
    }
  }
  const auto on_reductions = model_.meshes.streams().for_reductions();
  for (FlatReduction& reduction : oldest.flats) {
    if (!device().is_cpu()) reduction.future->wait();
    reduced_.push_back(std::move(reduction));
  }
  model_.memory.release(std::move(oldest.gradients),
                        StreamPoint::now(device()));
}

void SegmentRun::wait_for_reductions() {
  while (!reducing_.empty()) finish_oldest_reduction();
  for (const FlatReduction& reduced : std::exchange(reduced_, {})) {
    if (!device().is_cpu()) {
      reduced.future->wait();  // the current stream waits
      record_use(reduced.sum);
    }
    if (!has_failed()) reduced.flat->add_sum(reduced.sum);
  }
}

void SegmentRun::drop_gradients() {
  for (ShardedUnit& unit : model_.units) {
    for (const auto& flat : unit.flats) {
      flat->drop_gradients();
      flat->drop_sum();
      flat->drop_partial_sum();
    }
    if (!unit.gradients) continue;
    model_.memory.release(std::exchange(unit.gradients, {}),
                          StreamPoint::now(device()));
  }
}

// ---- Rounds and the end.

RoundResult SegmentRun::round(std::optional<size_t> need,
                              CursorActions& actions) {
  RoundMessage own = cursor_.message(need);
  own.used = used_;
  own.error = error_text_;
  RoundAnswers answers;
  try {
    answers = model_.exchange.round(own);
  } catch (...) {
    is_broken_ = true;
    throw;
  }
  used_anywhere_.assign(used_.size(), 0);
  for (const RoundMessage& message : answers.by_rank) {
    for (size_t i = 0; i < used_.size() && !message.has_failed; ++i) {
      used_anywhere_[i] |= message.used[i];
    }
  }
  // Peers that called end_unconfirmed() close the group on this failure.
  is_broken_ |= answers.has_unconfirmed_end && !answers.error.empty();
  const RoundResult result = cursor_.end_round(answers.by_rank, actions);
  if (result == RoundResult::kFailed && !own.has_failed) {
    is_over_ = true;
    perform_all(actions);
    wait_for_reductions();
    finish_all_gathers();
    drop_gradients();
    throw_peer_failure(answers.error);
  }
  return result;
}

// Makes the current stream wait for all-gathers, which read the shards that an
// optimizer writes next.
void SegmentRun::finish_all_gathers() {
  for (ShardedUnit::Gathered& gathered : std::exchange(surplus_gathers_, {})) {
    const auto on_gathers = model_.meshes.streams().for_gathers();
    for (const auto& future : gathered.futures) future->wait();
    model_.memory.release(std::move(gathered.lease),
                          StreamPoint::now(device()));
  }
  if (!std::exchange(has_gathered_, false)) return;
  StreamPoint shards_read;
  {
    const auto on_gathers = model_.meshes.streams().for_gathers();
    shards_read = StreamPoint::now(device());
  }
  shards_read.wait();
}

void SegmentRun::finish(const std::vector<char>& used, bool has_used_all) {
  used_ = used;
  throw_recorded_error();
  CursorActions actions;
  cursor_.finish(actions);
  perform_all(actions);
  RoundMessage own = cursor_.message();
  if (plan_.may_end_unconfirmed && has_used_all && error_ == nullptr &&
      !cursor_.is_learning() && !cursor_.has_deviated() &&
      model_.exchange.may_end_unconfirmed() &&
      std::ranges::find(own.complete, 1) == own.complete.end()) {
    wait_for_reductions();
    throw_recorded_error();
    used_anywhere_ = own.used = used;
    model_.exchange.end_unconfirmed(own);
    cursor_.end_round({&own, 1}, actions);
    perform_all(actions);
  } else {
    RoundResult result = RoundResult::kContinues;
    size_t num_issued = 0;
    do {
      wait_for_reductions();
      throw_recorded_error();
      num_issued = cursor_.record().entries.size();
      result = round(std::nullopt, actions);
      perform_all(actions);
    } while (result == RoundResult::kContinues ||
             cursor_.record().entries.size() > num_issued);
    throw_recorded_error();
  }
  is_over_ = true;
  finish_all_gathers();
  has_finished_ = true;
}

void SegmentRun::fail(const std::string& error) noexcept {
  if (is_over_) return;
  is_over_ = true;
  error_text_ = error_ != nullptr ? message_of(error_) : error;
  if (error_text_.empty()) error_text_ = "failed";
  error_ = nullptr;
  try {
    for (ShardedUnit& unit : model_.units) {
      for (const auto& flat : unit.flats) flat->drop_sum();
    }
    CursorActions actions;
    cursor_.fail(actions);
    perform_all(actions);
    wait_for_reductions();
    if (!is_broken_) round(std::nullopt, actions);
    perform_all(actions);
    finish_all_gathers();
  } catch (...) {
    is_broken_ = true;
  }
  if (!is_broken_) return drop_gradients();
  // Collectives may still write to this memory, so it is never reused.
  for (ShardedUnit& unit : model_.units) {
    unit.unbind();
    unit.gathered.reset();
    unit.gradients = {};
    for (const auto& flat : unit.flats) flat->drop_gradients();
  }
}

void SegmentRun::record_error(const std::string& context) {
  if (error_ != nullptr) return;
  error_ = std::current_exception();
  if (context.empty()) return;
  try {
    throw_with_context(context);
  } catch (...) {
    error_ = std::current_exception();
  }
}

// After a collective failed on a device: a peer that closed the group has sent
// the reason, which confirm() throws.
void SegmentRun::throw_failure_of_peers() {
  if (is_broken_ && !device().is_cpu() && !model_.exchange.is_broken()) {
    model_.exchange.confirm();
  }
}

void SegmentRun::throw_recorded_error() {
  if (error_ != nullptr) std::rethrow_exception(error_);
}

}  // namespace brigade
