// What becomes of an iteration that an error ends, and how this rank gets back
// in step with its peers.

#include <c10/util/Exception.h>

#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/peer_error.h"
#include "brigade/comm_hooks/own_errors.h"
#include "brigade/comm_hooks/wire_format.h"
#include "brigade/reducer/reducer.h"

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

void Reducer::on_backward_abandoned(int64_t iteration, int backward_id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!iteration_ || iteration_->iteration != iteration) return;
  if (iteration_->phase == Phase::kFailed || !all_sent(*iteration_)) {
    return give_up();
  }
  // This rank launched what its peers wait for: the reduction itself is sound.
  // Peers that did give up may now launch what this rank waits for.
  failure_channel_.announce(iteration, num_steps(iteration_->sums_used_map));
  try {
    finalize();
  } catch (const std::exception& error) {
    TORCH_WARN("Reducer: while another error ended backward: ", error.what());
  } catch (...) {
    TORCH_WARN("Reducer: an unknown error while another ended backward");
  }
}

// With the used map, if it is summed, a step of its own.
size_t Reducer::num_steps(bool sums_used_map) const {
  return bound_.buckets.size() + sums_used_map;
}

// True if peers wait for nothing that this rank has yet to launch.
bool Reducer::all_sent(const IterationState& iteration) const {
  if (iteration.sums_used_map && !iteration.used_map_sent) return false;
  for (size_t b = iteration.launches.size(); b < bound_.buckets.size(); ++b) {
    if (!bound_.buckets[b].is_empty()) return false;
  }
  return true;
}

// Does not throw: destructors of autograd's call it.
void Reducer::give_up() {
  const std::shared_ptr<IterationState> iteration =
      std::exchange(iteration_, nullptr);
  finished_.mark_finished(iteration->iteration, /*may_be_repeated=*/false);
  ++statistics_.given_up;
  if (graph_.used_map) graph_.used_map->clear_marks();
  if (graph_.firing_counts && iteration->sums_used_map) {
    graph_.firing_counts->forget();
  }
  if (skips_unused_buckets() && !iteration->used_map_sent) {
    send_empty_used_map(*iteration);
  }
  // Announced before anything is waited for: peers that gave up earlier than
  // this rank have yet to launch what it waits for, and do so when they read
  // it.
  if (all_sent(*iteration)) {
    graph_.ready_order.observe(iteration->order.whole_order());
    failure_channel_.announce(iteration->iteration,
                              num_steps(iteration->sums_used_map));
  } else {
    graph_.ready_order.note(iteration->order.whole_order());
    failure_channel_.require_realignment(iteration->iteration,
                                         iteration->num_steps_done());
  }
  wait_quietly(*iteration);
}

// Peers wait for this rank's map in the middle of their backwards, before they
// read any announcement.
void Reducer::send_empty_used_map(IterationState& iteration) {
  iteration.used_map_sent = true;
  try {
    graph_.used_map->launch(*group_);
  } catch (const std::exception& error) {
    TORCH_WARN("Reducer: while giving up ",
               describe(occasion(iteration.iteration)), ": ", error.what());
  } catch (...) {
    TORCH_WARN("Reducer: an unknown error while giving up ",
               describe(occasion(iteration.iteration)));
  }
}

void Reducer::wait_quietly(const IterationState& iteration) const {
  const WaitForPeers waiting(*statistics_.progress);
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
    } catch (...) {
      TORCH_WARN("Reducer: an unknown error while waiting for bucket ",
                 launch.record.bucket);
    }
  }
}

// Launches what the other ranks have launched of an iteration that all gave up,
// and discards the results.
void Reducer::realign() {
  const auto [begin, end] = failure_channel_.agree_on_launches();
  if (graph_.used_map) graph_.used_map->wait();
  for (size_t step = begin; step < end; ++step) launch_share_of_zeros(step);
  // Peers that launched everything by themselves plan from this iteration.
  if (end == num_steps(sums_used_map())) graph_.ready_order.confirm();
  failure_channel_.realigned();
}

void Reducer::launch_share_of_zeros(size_t step) {
  const size_t num_buckets = bound_.buckets.size();
  const bool map_first = skips_unused_buckets();
  if (sums_used_map() && step == (map_first ? 0 : num_buckets)) {
    failure_channel_.advance();
    graph_.used_map->launch(*group_);
    graph_.used_map->wait();
    return;
  }
  const size_t b = map_first ? step - 1 : step;
  Bucket& bucket = bound_.buckets[b];
  if (bucket.is_empty() || is_skipped(b)) return failure_channel_.advance();
  try {
    const auto future = bucket.launch_zeros();
    ++statistics_.buckets_launched;
    failure_channel_.advance();
    future->waitAndThrow();
  } catch (...) {
    rethrow(std::current_exception(), ErrorSource::kFuture, b,
            statistics_.prepared);
  }
}

void Reducer::rethrow(const std::exception_ptr& error, ErrorSource source,
                      size_t bucket, int64_t iteration) {
  const std::string where = absl::StrCat(
      "Reducer: ",
      describe_bucket(table_, bound_.plan.buckets()[bucket], bucket,
                      bound_.plan.num_buckets(), occasion(iteration)));
  if (dynamic_cast<ThrowsOwnErrors*>(options_.comm_hook.get())) {
    std::rethrow_exception(error);
  }
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

}  // namespace brigade
