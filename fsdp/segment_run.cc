#include "brigade/fsdp/segment_run.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/streams/streams.h"

namespace brigade {

namespace {

// The unsharded parameters of a unit in a buffer, by flat.
std::vector<at::Tensor> wholes_in(const ShardedUnit& unit,
                                  const at::Tensor& bytes) {
  std::vector<at::Tensor> wholes;
  int64_t offset = 0;
  for (const auto& flat : unit.flats) {
    const int64_t size = flat->whole_bytes();
    wholes.push_back(
        flat->whole_in(size == 0 ? bytes : bytes.narrow(0, offset, size)));
    offset += size;
  }
  return wholes;
}

// How long a rank that has failed waits for its peers to hear of it.
constexpr std::chrono::seconds kFailurePatience(30);

}  // namespace

SegmentRun::SegmentRun(Model model, Plan plan)
    : model_(model),
      plan_(std::move(plan)),
      cursor_(plan_.rules, plan_.schedule, plan_.unsharded, plan_.expected) {}

void SegmentRun::begin() {
  shards_written_ = StreamPoint::now(device());
  CursorActions actions = cursor_.begin();
  perform(actions);
  throw_noted();
}

void SegmentRun::use(std::span<const size_t> units) {
  throw_noted();
  CursorActions actions;
  while (const std::optional<size_t> unit = cursor_.need(units, actions)) {
    perform(actions);
    throw_noted();
    round(unit, actions);
    perform(actions);
    throw_noted();
  }
  perform(actions);
  throw_noted();
  for (const size_t unit : units) wait_for(unit);
}

// ---- All-gathers.

// All of them; none is left.
void SegmentRun::perform(CursorActions& actions) {
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

// Of the host; on devices the current stream waits.
void SegmentRun::wait(const ShardedUnit::FuturePtr& future,
                      const ShardedUnit& unit) {
  std::optional<WaitForPeers> waiting;
  if (!future->completed()) waiting.emplace(model_.progress, &unit.name);
  future->wait();
}

// Where memory is short, the segment fails, and what this rank holds serves for
// the rest of it.
Lease SegmentRun::acquire(int64_t bytes) {
  try {
    return model_.memory.acquire(bytes);
  } catch (...) {
    note_error();
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
    Lease lease = !is_held && unit.kept ? std::exchange(unit.kept, {})
                                        : acquire(unit.whole_bytes());
    ShardedUnit::Gathered gathered = gather_into(number, std::move(lease));
    if (is_held) {
      for_peers_.push_back(std::move(gathered));
    } else {
      unit.gathered = std::move(gathered);
      unit.is_stale = false;
    }
  } catch (...) {
    note_error(absl::StrCat("the all-gather of unit '", unit.name, "'"));
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
  gathered.wholes = wholes_in(unit, gathered.lease.bytes);
  const at::NoGradGuard no_grad;
  model_.recorder.begins(ShardingRecorder::kGather, number);
  for (size_t i = 0; i < unit.flats.size(); ++i) {
    FlatShard& flat = *unit.flats[i];
    if (flat.is_whole_here()) continue;
    const at::Tensor& whole = gathered.wholes[i];
    if (plan_.has_slices && !unit.slices.empty()) {
      const int num_ranks = *unit.settings.reshards_to;
      const int64_t size = whole.numel() / num_ranks;
      whole.narrow(0, transport.shard_rank() % num_ranks * size, size)
          .copy_(unit.slices[i]);
      gathered.futures.push_back(transport.all_gather(whole, num_ranks));
    } else {
      flat.write_own_slice(whole);
      gathered.futures.push_back(
          transport.all_gather(whole, transport.num_shards()));
    }
    model_.recorder.launched(ShardingRecorder::kGather,
                             *gathered.futures.back());
  }
  model_.progress.launched.fetch_add(1, std::memory_order_relaxed);
  return gathered;
}

void SegmentRun::wait_for(size_t number) {
  ShardedUnit& unit = model_.units[number];
  const bool is_new_stream = unit.uses->note();
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
    throw_told();
    throw_named(absl::StrCat("the all-gather of unit '", unit.name, "'"));
  }
  model_.recorder.unsharded(number);
  if (device().is_cpu()) futures.clear();
  unit.bind();
}

// The slice of the neighbours' share.
void SegmentRun::keep_slices(ShardedUnit& unit) {
  const int num_ranks = *unit.settings.reshards_to;
  const int place = unit.transport->shard_rank() % num_ranks;
  const at::NoGradGuard no_grad;
  unit.slices.clear();
  for (const at::Tensor& whole : unit.gathered->wholes) {
    const int64_t size = whole.numel() / num_ranks;
    unit.slices.push_back(whole.narrow(0, place * size, size).clone());
  }
}

void SegmentRun::release(size_t number) {
  ShardedUnit& unit = model_.units[number];
  if (!unit.gathered || unit.is_by_hand) return;
  const bool keeps = plan_.keeps_slices && unit.settings.keeps_slices();
  const bool has_memory{unit.gathered->lease};
  if (!has_memory) unit.uses->forget();
  if (has_memory && (keeps || unit.uses->empty())) {
    // A buffer that was not used is still being written.
    const auto on_gathers = unit.transport->streams().for_gathers();
    for (const auto& future : unit.gathered->futures) {
      wait(future, unit);
      is_broken_ |= future->hasError();
    }
    if (keeps) keep_slices(unit);
    unit.uses->note();
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
  while (reducing_.size() >= plan_.max_reducing) end_oldest_reduction();
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
                            const at::Tensor& gradient, bool counts) {
  throw_noted();
  prepare_gradients(number);
  flat.accumulate(parameter, gradient);
  if (counts) count_gradient(number);
}

void SegmentRun::add_held_gradients(size_t number) {
  prepare_gradients(number);
  count_gradient(number);
}

void SegmentRun::count_gradient(size_t number) {
  CursorActions actions;
  cursor_.accumulated(number, actions);
  perform(actions);
  throw_noted();
}

void SegmentRun::reduce(size_t number) {
  ShardedUnit& unit = model_.units[number];
  if (!unit.settings.synchronizes || !unit.is_trained()) return;
  try {
    prepare_gradients(number);
    Reducing& reducing = reducing_.emplace_back(
        Reducing{.unit = number, .lease = std::exchange(unit.gradients, {})});
    model_.recorder.begins(ShardingRecorder::kReduction, number);
    for (const auto& flat : unit.flats) {
      if (flat->is_trained()) reducing.sums.push_back(reduce_flat(unit, *flat));
    }
  } catch (...) {
    note_error(absl::StrCat("the reduction of unit '", unit.name, "'"));
    is_broken_ = true;
  }
}

SegmentRun::Sum SegmentRun::reduce_flat(const ShardedUnit& unit,
                                        FlatShard& flat) {
  const at::NoGradGuard no_grad;
  // The sum becomes `.grad`: its memory belongs to the current stream.
  Sum reducing = {.flat = &flat};
  try {
    reducing.sum = flat.make_sum();
  } catch (...) {
    note_error();  // memory is short
  }
  StreamPoint sum_made;
  if (!flat.is_written_here()) sum_made = StreamPoint::now(flat.device());
  const auto on_sums = unit.transport->streams().for_sums();
  sum_made.wait();
  const at::Tensor whole = flat.take_gradients();
  if (has_failed()) whole.zero_();
  if (!reducing.sum.defined()) {  // in memory that it has; it is dropped
    const int64_t size = whole.numel() / unit.transport->num_shards();
    reducing.sum = whole.narrow(0, unit.transport->shard_rank() * size, size);
  }
  try {
    reducing.future = launch_sum(unit, flat, whole, reducing.sum);
  } catch (...) {
    note_error();  // a hook's, before it has launched anything
    whole.zero_();
    reducing.future = launch_sum(unit, flat, whole, reducing.sum);
  }
  model_.recorder.launched(ShardingRecorder::kReduction, *reducing.future);
  return reducing;
}

ShardedUnit::FuturePtr SegmentRun::launch_sum(const ShardedUnit& unit,
                                              FlatShard& flat,
                                              const at::Tensor& whole,
                                              const at::Tensor& sum) {
  ShardTransport& transport = *unit.transport;
  const bool over_replicas = unit.sums_over_replicas();
  ShardTransport::Sum of = {
      .scale = over_replicas ? 1.0 / unit.divisor() : 1.0,
      .over_replicas = over_replicas,
      .of_row = over_replicas ? flat.take_row_sum() : at::Tensor()};
  if (!unit.comm_hook) return transport.reduce_scatter(whole, sum, of);
  if (!transport.scales()) {
    const double scale = std::exchange(of.scale, 1);
    if (scale != 1) whole.mul_(scale);
    if (scale != 1 && of.of_row.defined()) of.of_row = of.of_row * scale;
  }
  auto future = unit.comm_hook->reduce(
      {.unit = unit.name,
       .index = flat.context().unit,
       .whole = whole,
       .shard = sum,
       .rank = transport.shard_rank(),
       .sum = [&transport, of](const at::Tensor& sent,
                               const at::Tensor& shard) {
         return transport.reduce_scatter(sent, shard, of);
       }});
  TORCH_CHECK(future, "fully_shard: the comm hook '",
              unit.comm_hook->hook_name(), "' of unit '", unit.name,
              "' returned no future.\nReturn that of its collective.");
  return future;
}

// The memory of its gradients is free; its sums are taken when the segment has
// ended.
void SegmentRun::end_oldest_reduction() {
  Reducing reducing = std::move(reducing_.front());
  reducing_.pop_front();
  for (const Sum& sum : reducing.sums) {
    wait_for_sum(model_.units[reducing.unit], sum);
  }
  const auto on_sums = model_.meshes.streams().for_sums();
  for (Sum& sum : reducing.sums) {
    if (!device().is_cpu()) sum.future->wait();
    reduced_.push_back(std::move(sum));
  }
  model_.memory.release(std::move(reducing.lease), StreamPoint::now(device()));
}

void SegmentRun::wait_for_sum(const ShardedUnit& unit, const Sum& sum) {
  if (!sum.future->completed()) wait(sum.future, unit);
  if (!sum.future->hasError()) return;
  is_broken_ |= !unit.comm_hook || unit.comm_hook->fails_by_network_only();
  try {
    throw_told();
    std::rethrow_exception(sum.future->exception_ptr());
  } catch (...) {
    note_error(unit.comm_hook
                   ? ""
                   : absl::StrCat("the reduction of unit '", unit.name, "'"));
  }
}

void SegmentRun::wait_for_reductions() {
  while (!reducing_.empty()) end_oldest_reduction();
  for (const Sum& reduced : std::exchange(reduced_, {})) {
    if (!device().is_cpu()) {
      reduced.future->wait();  // for the current stream
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
      flat->drop_row_sum();
    }
    if (!unit.gradients) continue;
    model_.memory.release(std::exchange(unit.gradients, {}),
                          StreamPoint::now(device()));
  }
}

// ---- The end.

RoundResult SegmentRun::round(std::optional<size_t> need,
                              CursorActions& actions) {
  RoundMessage own = cursor_.message(need);
  own.used = used_;
  own.error = words_;
  RoundAnswers answers;
  try {
    std::optional<std::chrono::milliseconds> patience;
    if (own.has_failed) patience = kFailurePatience;
    answers = model_.exchange.round(own, patience);
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
  // Peers that have gone on close the group when they learn of it.
  is_broken_ |= answers.has_unconfirmed && !answers.error.empty();
  const RoundResult result = cursor_.end_round(answers.by_rank, actions);
  if (result == RoundResult::kFailed && !own.has_failed) {
    is_over_ = true;
    perform(actions);
    wait_for_reductions();
    end_gathers();
    drop_gradients();
    throw_of_peers(answers.error);
  }
  return result;
}

// Shards may be written after the current stream.
void SegmentRun::end_gathers() {
  for (ShardedUnit::Gathered& gathered : std::exchange(for_peers_, {})) {
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
  throw_noted();
  CursorActions actions;
  cursor_.finish(actions);
  perform(actions);
  RoundMessage own = cursor_.message();
  if (plan_.may_go_on && has_used_all && error_ == nullptr &&
      !cursor_.is_learning() && !cursor_.has_deviated() &&
      model_.exchange.may_end_unconfirmed() &&
      std::ranges::find(own.complete, 1) == own.complete.end()) {
    wait_for_reductions();
    throw_noted();
    used_anywhere_ = own.used = used;
    model_.exchange.end_unconfirmed(own);
    cursor_.end_round({&own, 1}, actions);
    perform(actions);
  } else {
    RoundResult result = RoundResult::kContinues;
    size_t num_issued = 0;
    do {
      wait_for_reductions();
      throw_noted();
      num_issued = cursor_.record().entries.size();
      result = round(std::nullopt, actions);
      perform(actions);
    } while (result == RoundResult::kContinues ||
             cursor_.record().entries.size() > num_issued);
    throw_noted();
  }
  is_over_ = true;
  end_gathers();
}

void SegmentRun::fail(const std::string& error) noexcept {
  if (is_over_) return;
  is_over_ = true;
  words_ = error_ != nullptr ? message_of(error_) : error;
  if (words_.empty()) words_ = "failed";
  error_ = nullptr;
  try {
    for (ShardedUnit& unit : model_.units) {
      for (const auto& flat : unit.flats) flat->drop_sum();
    }
    CursorActions actions;
    cursor_.fail(actions);
    perform(actions);
    wait_for_reductions();
    if (!is_broken_) round(std::nullopt, actions);
    perform(actions);
    end_gathers();
  } catch (...) {
    is_broken_ = true;
  }
  if (!is_broken_) return drop_gradients();
  // Collectives may write to this memory for ever: it is not lent again.
  for (ShardedUnit& unit : model_.units) {
    unit.unbind();
    unit.gathered.reset();
    unit.gradients = {};
    for (const auto& flat : unit.flats) flat->drop_gradients();
  }
}

// `doing`: names it in a peer's or the network's error.
void SegmentRun::note_error(const std::string& doing) {
  if (error_ != nullptr) return;
  error_ = std::current_exception();
  if (doing.empty()) return;
  try {
    throw_named(doing);
  } catch (...) {
    error_ = std::current_exception();
  }
}

// A collective has failed. A peer that has closed the group has said why.
void SegmentRun::throw_told() {
  if (is_broken_ && !device().is_cpu() && !model_.exchange.is_broken()) {
    model_.exchange.confirm();
  }
}

void SegmentRun::throw_noted() {
  if (error_ != nullptr) std::rethrow_exception(error_);
}

}  // namespace brigade
