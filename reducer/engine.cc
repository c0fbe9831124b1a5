#include "brigade/reducer/engine.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <exception>
#include <functional>
#include <iostream>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/reducer/gradient_errors.h"

namespace brigade {
namespace {

// Iterations with a new user's hook in which its continuations are watched.
constexpr int64_t kWatchedIterations = 5;

constexpr std::chrono::seconds kDestructionTimeout{5};
constexpr std::chrono::seconds kMissingGradientsReportTime{10};

}  // namespace

Engine::Engine(ReducerSetup setup)
    : policy_(std::move(setup)),
      peers_(policy_.group()),
      end_(policy_, peers_, observations_),
      watches_continuations_until_(kWatchedIterations),
      hooks_(std::make_shared<GradientHooks>(
          policy_.table().replicas(),
          [this](VariableIndex variable, bool is_defined) {
            gradient_ready(variable, is_defined);
          })) {
  policy_.set_hooks(*hooks_);
  end_.adopt_sequence(nullptr);
  peers_.compare_others(!policy_.hook_traits().fails_by_network_only);
  if (!policy_.options().verify_across_ranks) return;  // ranks connect later
  const std::lock_guard<std::mutex> lock(mutex_);
  connect_ranks();
  // Ranks have compared parameters and options, which determine the plan.
  peers_.set_agreed(policy_.fingerprint());
  policy_.connect_on_host();
}

Engine::~Engine() {
  confirm_at_destruction();
  stall_watch_ = nullptr;  // calls describe_progress()

  // A failed backward may run its callbacks late, on another thread.
  const std::weak_ptr<GradientHooks> callbacks = hooks_;
  hooks_ = nullptr;
  while (!callbacks.expired()) std::this_thread::yield();

  if (iteration_) end_.release_in_flight(*iteration_);
}

// On devices the last iterations may have failed on a peer. The user must learn
// of it before saving parameters that were stepped with their gradients. A
// forked child does nothing: the statuses are the parent's.
void Engine::confirm_at_destruction() noexcept {
  if (!peers_.is_usable_here() || peers_.is_closed() ||
      !peers_.can_continue()) {
    return;
  }
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::cerr << report_missing();
    if (end_.confirm_ends_within(kDestructionTimeout)) return;
    std::cerr
        << "Reducer: destroyed before the statuses of the last iterations "
           "arrived; a rank may have failed in them.\nCall "
           "await_statuses() first."
        << std::endl;
  } catch (...) {
    std::cerr << "Reducer: a failure became known when the reducer was "
                 "destroyed.\n"
              << message_of(std::current_exception())
              << "\nThe parameters may be those of a failed step: load a "
                 "checkpoint."
              << std::endl;
  }
}

void Engine::connect_ranks() {
  peers_.connect();
  stall_watch_ = StallWatch::start(
      policy_.group(), peers_.store_prefix(),
      {.engine = "Reducer", .unit = "bucket", .without_data = "join()"},
      observations_.progress, [this] {
        warn_of_missing_late();
        return describe_progress();
      });
  if (!stall_watch_) return;
  if (stall_report_after_) stall_watch_->set_report_after(*stall_report_after_);
  stall_watch_->set_handler(std::exchange(stall_handler_, nullptr));
}

void Engine::note_error() {
  // May take Python's GIL, which is taken before error_mutex_.
  std::string text = message_of(std::current_exception());
  const std::lock_guard<std::mutex> lock(error_mutex_);
  last_error_ = {.time_ns = now_ns(),
                 .iteration = observations_.progress->iteration,
                 .text = std::move(text)};
}

void Engine::ending_iterations(const std::function<void()>& work) {
  const auto num_reduced = [this] {
    return locked([this] { return end_.num_reduced(); });
  };
  const int64_t before = num_reduced();
  std::exception_ptr error;
  try {
    noting_errors(work);
  } catch (...) {
    error = std::current_exception();
  }
  if (after_iteration_ && num_reduced() > before) {
    try {
      after_iteration_();
    } catch (...) {
      note_error();
      if (!error) throw;
    }
  }
  if (error) std::rethrow_exception(error);
}

// ---- An iteration

void Engine::prepare(std::span<const at::Tensor> outputs) {
  noting_errors([&] {
    require_no_running_backward();
    end_unfinished_iteration();
    if (!policy_.expects_gradients()) {
      iteration_ = nullptr;
      return;
    }
    start_iteration();
    policy_.on_prepared(outputs);
    membership_.prepared(watch_outputs(
        outputs, hooks_, [this, preparation = iteration_->preparation] {
          on_output_reached(preparation);
        }));
    observations_.timeline.prepared(iteration_->number);
  });
}

void Engine::start_iteration() {
  iteration_ = nullptr;
  peers_.require_open();
  end_.confirm_due_ends();
  policy_.check_variables();
  replan_if_due();
  policy_.before_iteration();

  has_forward_ = true;
  ++observations_.counts.prepared;
  iteration_ = make_iteration(observations_.counts.begun + 1);
  membership_.prepared(/*outputs_are_watched=*/false);
  observations_.iteration_begins(iteration_->number);
  const std::shared_ptr<Iteration> agreeing = iteration_;
  agree_on_sequence(*agreeing);
}

// A checkpoint around the wrapped module runs forward again in backward.
void Engine::require_no_running_backward() const {
  const bool is_inside = iteration_ && iteration_->phase == Phase::kReducing &&
                         running_backward_id() >= 0;
  TORCH_CHECK(!is_inside,
              "Reducer: expected the forward outside of the backward of ",
              describe(iteration_->id),
              ", found a forward inside of it that would be reduced, too.\n"
              "Put checkpoints inside the wrapped module, not around it; or "
              "run this forward under no_sync().");
}

void Engine::end_unfinished_iteration() {
  if (!has_begun()) return;
  Iteration& iteration = *iteration_;
  // The backward has thrown on another thread, so its end was not reported.
  if (iteration.phase != Phase::kSuspended) return abort_iteration();
  TORCH_CHECK(
      !finalizes_manually_ || !iteration.order.all_launched(),
      "Expected to have finalized the prior backward pass, but that of ",
      describe(iteration.id),
      " was not.\nCall finalize_backward() once after each backward "
      "that is reduced.");
  iteration.failure = describe_missing(iteration);
  const std::string text = iteration.failure;
  abort_iteration();
  TORCH_CHECK(false, text);
}

void Engine::note_local_forward(std::span<const at::Tensor> outputs) {
  const std::lock_guard<std::mutex> lock(mutex_);
  has_forward_ = true;
  membership_.note_local_forward();
  watch_outputs(outputs, hooks_, [this] { on_local_output_reached(); });
}

void Engine::shadow() {
  ending_iterations([&] {
    end_unfinished_iteration();
    start_iteration();
    iteration_->phase = Phase::kReducing;
    observations_.counts.begun = iteration_->number;
    peers_.backward_begins();
    try {
      if (policy_.skips_unused_buckets()) end_.compare_begin(*iteration_);
      iteration_->is_shadow = true;
      mark_at_begin();
      iteration_->order.mark_all();
      launch_ready();
    } catch (...) {
      iteration_->fail(std::current_exception());
      abort_iteration();
      throw;
    }
    finish();
  });
}

void Engine::set_manual_finalization(bool required) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (required == finalizes_manually_) return;
  TORCH_CHECK(!iteration_,
              "Reducer::set_manual_finalization: ", describe(iteration_->id),
              " is prepared or under way; this cannot be called after forward "
              "while a backward is expected.\nCall it before forward, or when "
              "the iteration is over.");
  finalizes_manually_ = required;
}

void Engine::finalize() {
  ending_iterations([&] {
    TORCH_CHECK(finalizes_manually_,
                "Reducer::finalize_backward: manual backward finalization is "
                "not required.\nSet it before forward, or let backward end the "
                "iteration.");
    TORCH_CHECK(has_begun() && !iteration_->has_failed(),
                "Reducer::finalize_backward: no gradient reduction requires "
                "finalization.\nCall it once, after a backward outside of "
                "no_sync.");
    TORCH_CHECK(
        iteration_->order.all_launched(),
        "Reducer::finalize_backward: called before all DDP buckets were ready: "
        "gradients of ",
        policy_.table().name_of_variables(missing(*iteration_)),
        " are missing.\nCall it when all gradients are ready, or after "
        "backward.");
    finish();
  });
}

void Engine::finish() {
  const auto iteration = std::exchange(iteration_, nullptr);
  membership_.mark_finished(iteration->preparation, iteration->creates_graph);
  // A later backward may run through the graph of this one.
  has_forward_ = iteration->creates_graph;
  end_.finish(iteration);
}

void Engine::abort_iteration() {
  const auto iteration = std::exchange(iteration_, nullptr);
  membership_.mark_finished(iteration->preparation,
                            /*may_be_repeated=*/false);
  end_.abort(*iteration);
}

std::shared_ptr<Iteration> Engine::make_iteration(int64_t number) const {
  return std::make_shared<Iteration>(
      Preparation{.number = observations_.counts.prepared, .iteration = number},
      policy_.group()->getRank(), policy_.sequence(),
      policy_.table().num_variables());
}

std::string Engine::describe_missing(const Iteration& iteration) const {
  return describe_missing_gradients(policy_.table(), missing(iteration),
                                    iteration.id, policy_.options());
}

IterationId Engine::iteration_id(int64_t iteration) const {
  return {.iteration = iteration, .rank = policy_.group()->getRank()};
}

// ---- During a backward: gradients become ready, collectives are launched

// Outputs of every forward since the last reduction belong to this iteration.
void Engine::on_output_reached(Preparation preparation) {
  noting_errors([&] {
    const int backward_id = running_backward_id();
    membership_.output_reached(preparation, backward_id);
    if (!iteration_ || iteration_->has_failed() ||
        membership_.is_finished(preparation)) {
      return;
    }
    observations_.timeline.backward_begins();
    policy_.note_missing_gradients();
    enter_backward(backward_id);
    try {
      // Launches entries that wait for no gradient before backward runs a
      // collective of the program. Otherwise a rank that uses only the last
      // parameters would launch them after it, and its peers before it.
      if (policy_.begins_at_outputs() && accumulates_all_gradients()) {
        begin_reduction();
      }
      for (const EarlyGradient& early :
           membership_.take_early_gradients(backward_id)) {
        accept_gradient(early.variable, early.is_defined);
      }
    } catch (...) {
      iteration_->fail(std::current_exception());
      throw;
    }
  });
}

void Engine::on_local_output_reached() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int id = running_backward_id();
  if (!membership_.local_output_reached(id)) return;
  const auto ended = [this, id] {
    const std::lock_guard<std::mutex> lock_at_end(mutex_);
    membership_.local_backward_ended(id);
  };
  watch_backward_end(hooks_, ended, ended);
}

void Engine::gradient_ready(VariableIndex variable, bool is_defined) {
  noting_errors([&] {
    const int backward_id = running_backward_id();
    if (!iteration_ || iteration_->has_failed()) {
      policy_.on_local_gradient(variable, is_defined);
      if (iteration_) return;
      if (const auto finished =
              membership_.finished_iteration_of(backward_id)) {
        TORCH_CHECK(false,
                    describe_late_gradient(policy_.table(), variable.parameter,
                                           iteration_id(*finished)));
      }
      if (expects_forwards_ && !has_forward_ &&
          !membership_.is_local(backward_id)) {
        report_gradient_without_forward(variable);
      }
      return;
    }
    const bool runs = iteration_->phase == Phase::kReached ||
                      iteration_->phase == Phase::kReducing;
    try {
      if (!runs && membership_.is_undecided(backward_id)) {
        return accept_early_gradient(variable, is_defined, backward_id);
      }
      if (!runs) enter_backward(backward_id);
      accept_gradient(variable, is_defined);
    } catch (...) {
      iteration_->fail(std::current_exception());
      throw;
    }
  });
}

void Engine::report_gradient_without_forward(VariableIndex variable) {
  const std::string text = describe_gradient_without_forward(
      policy_.table(), variable.parameter,
      iteration_id(observations_.counts.begun));
  TORCH_CHECK(!policy_.options().one_backward_per_forward, text);
  if (!std::exchange(has_warned_, true)) TORCH_WARN(text);
}

// Reentrant backwards change nothing.
void Engine::enter_backward(int backward_id) {
  Phase& phase = iteration_->phase;
  if (phase == Phase::kPrepared) {
    phase = Phase::kReached;
    peers_.backward_begins();
  } else if (phase == Phase::kSuspended) {
    phase = Phase::kReducing;
  } else {
    return;
  }
  watch_end(backward_id);
}

// Autograd accepts such a callback only while the backward runs.
void Engine::watch_end(int backward_id) {
  const int64_t preparation = iteration_->preparation.number;
  const auto on_abandoned = [this, preparation] {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (iteration_ && iteration_->preparation.number == preparation) {
      abort_iteration();
    }
  };
  watch_backward_end(
      hooks_,
      [this, preparation, backward_id] {
        on_backward_end(preparation, backward_id);
      },
      on_abandoned);
}

// The gradient is local unless the backward reaches the prepared outputs later.
void Engine::accept_early_gradient(VariableIndex variable, bool is_defined,
                                   int backward_id) {
  policy_.on_local_gradient(variable, is_defined);
  const Iteration& iteration = *iteration_;
  if (iteration.is_ready[policy_.table().number_of(variable)]) {
    // Its bucket may be in flight: this iteration was never completed.
    TORCH_CHECK(false, describe_missing(iteration));
  }
  membership_.keep_early({.variable = variable,
                          .is_defined = is_defined,
                          .backward_id = backward_id});
}

// Unused parameters count as ready from here on, and not earlier: the outputs
// of a forward may never get a backward.
void Engine::begin_reduction() {
  Iteration& iteration = *iteration_;
  if (iteration.has_begun()) return;
  iteration.phase = Phase::kReducing;
  observations_.counts.begun = iteration.number;
  observations_.timeline.backward_begins();
  iteration.creates_graph = at::GradMode::is_enabled();
  if (policy_.skips_unused_buckets()) end_.compare_begin(*iteration_);
  if (!policy_.hook_traits().fails_by_network_only &&
      iteration.number <= watches_continuations_until_) {
    iteration.continuations.emplace();
  }
  mark_at_begin();
  launch_ready();
}

void Engine::mark_at_begin() {
  const bool is_shadow = iteration_->is_shadow;
  policy_.mark_used_at_begin(is_shadow);
  // The map decides which buckets are launched.
  if (policy_.skips_unused_buckets()) await_used_map();
  policy_.on_backward_begins(
      is_shadow, [this](size_t variable, Slot slot) { mark(variable, slot); });
}

// The used-parameter map is the first entry.
void Engine::await_used_map() {
  launch_ready();
  const WaitForPeers waiting(*observations_.progress);
  Collective& map = *iteration_->launches.front().collective;
  try {
    map.deliver(/*result=*/{});
  } catch (...) {
    end_.raise(*iteration_,
               failure_of(iteration_->id, ErrorSource::kFuture, map));
  }
}

void Engine::mark(size_t variable, Slot slot, bool launch_if_ready) {
  if (slot.has_gradient) {
    observations_.timeline.gradient_ready(policy_.table().variable(variable));
  }
  iteration_->is_ready[variable] = true;
  if (!iteration_->order.mark(slot.entry)) return;
  const HookScope scope(iteration_->preparer);
  pack(*iteration_, slot.entry, observations_);
  if (launch_if_ready) launch_in_scope();
}

void Engine::launch_ready() {
  if (!iteration_->order.next()) return;
  const HookScope scope(iteration_->preparer);
  launch_in_scope();
}

void Engine::launch_in_scope() {
  if (const auto failure =
          brigade::launch_ready(*iteration_, peers_, observations_)) {
    end_.raise(*iteration_, *failure);
  }
}

void Engine::accept_gradient(VariableIndex variable, bool is_defined) {
  begin_reduction();
  const size_t number = policy_.table().number_of(variable);
  if (iteration_->is_ready[number]) {
    policy_.refuse(variable, iteration_->id);
  }
  if (const auto slot = policy_.on_gradient(variable, is_defined)) {
    mark(number, *slot, /*launch_if_ready=*/true);
  }
}

void Engine::on_backward_end(int64_t preparation, int backward_id) {
  ending_iterations([&] {
    const std::shared_ptr<Iteration> iteration = iteration_;
    if (!iteration || iteration->preparation.number != preparation) return;
    if (iteration->has_failed()) return abort_iteration();
    // The backward reached no parameter.
    if (!iteration->has_begun() && !policy_.may_end_without_gradients()) {
      iteration->phase = Phase::kPrepared;
      return;
    }
    const size_t launched_before = iteration->launches.size();
    try {
      begin_reduction();
      policy_.on_backward_ends(
          [this](size_t variable, Slot slot) { mark(variable, slot); });
      launch_ready();
    } catch (...) {
      iteration->fail(std::current_exception());
      abort_iteration();
      throw;
    }
    // The comm hooks of these launches may have queued more callbacks of this
    // backward.
    if (iteration->launches.size() > launched_before) {
      return watch_end(backward_id);
    }
    iteration->phase = Phase::kSuspended;
    iteration->suspended_at = std::chrono::steady_clock::now();
    if (iteration->order.all_launched()) {
      if (!finalizes_manually_) finish();
    } else if (policy_.options().one_backward_per_forward) {
      end_unfinished_iteration();
    }
    // Does not wait for the launches: a peer may have failed before its own.
  });
}

// ---- Between iterations: ranks compare, and the sequence changes

// Peers may be in an iteration that this rank has not begun.
void Engine::barrier(std::string_view action) {
  end_unfinished_iteration();
  peers_.require_open();
  if (end_.runs_ahead()) return end_.confirm_due_ends();
  if (!peers_.is_connected()) connect_ranks();
  agree(*make_iteration(observations_.counts.begun),
        {.kind = StatusKind::kAsk,
         .fingerprint = std::hash<std::string_view>()(action),
         .text = status_text(action)});
}

void Engine::agree(Iteration& iteration, const RankStatus& own) {
  try {
    end_.agree(iteration, own);
  } catch (...) {
    iteration_ = nullptr;
    throw;
  }
}

bool Engine::replan() {
  return noting_errors([&] {
    if (has_begun()) return false;
    // The policy takes an observed order when the iteration's end is confirmed.
    if (policy_.is_learning()) end_.confirm_ends();
    return replan_if_due();
  });
}

bool Engine::replan_if_due() {
  if (!policy_.is_replan_due()) return false;
  const bool was_agreed = peers_.is_agreed(policy_.fingerprint());
  call_between_iterations("agreeing on the order of gradients",
                          [this] { policy_.agree_on_order(); });
  ++observations_.counts.rebuilds;
  if (policy_.replan()) {
    end_.adopt_sequence(iteration_.get());
    if (was_agreed) peers_.set_agreed(policy_.fingerprint());
  }
  return true;
}

void Engine::require_not_reducing(std::string_view caller) const {
  TORCH_CHECK(!has_begun(), caller, ": ",
              describe(iteration_id(observations_.counts.begun)),
              " is being reduced.\nCall it before the backward or after it.");
}

void Engine::change_sequence(std::string_view caller,
                             const std::function<bool()>& change) {
  noting_errors([&] {
    require_not_reducing(caller);
    // A late failure must not keep this rank from the collective below.
    std::exception_ptr late_failure;
    try {
      end_.confirm_ends();
    } catch (...) {
      late_failure = std::current_exception();
    }
    if (change()) end_.adopt_sequence(iteration_.get());
    const int64_t begun = observations_.counts.begun;
    if (peers_.is_connected()) agree_on_sequence(*make_iteration(begun + 1));
    if (late_failure) std::rethrow_exception(late_failure);
  });
}

void Engine::set_hook(std::shared_ptr<c10d::CommHookInterface> hook) {
  change_sequence("Reducer::set_comm_hook", [&] {
    const bool has_changed = policy_.set_hook(std::move(hook));
    peers_.compare_others(!policy_.hook_traits().fails_by_network_only);
    watches_continuations_until_ =
        observations_.counts.begun + kWatchedIterations;
    return has_changed;
  });
}

// Called where the sequence changes: later a peer may be in another collective.
void Engine::agree_on_sequence(Iteration& iteration) {
  if (!peers_.is_connected()) connect_ranks();
  if (peers_.is_agreed(policy_.fingerprint())) return;
  agree(iteration, end_.begin_status());
  peers_.set_agreed(policy_.fingerprint());
}

void Engine::call_between_iterations(std::string_view action,
                                     const std::function<void()>& collective) {
  const WaitForPeers waiting(*observations_.progress);
  try {
    collective();
  } catch (...) {
    peers_.close(message_of(std::current_exception()));
    const std::optional<LivenessProbe> probe =
        peers_.find_survivors(absl::StrCat(observations_.counts.begun + 1));
    throw_peer_error(absl::StrCat("Reducer: ", std::string(action), " on rank ",
                                  policy_.group()->getRank()),
                     std::current_exception(), probe ? &*probe : nullptr);
  }
}

std::string Engine::report_missing(std::chrono::seconds ago) {
  if (!has_begun() || iteration_->phase != Phase::kSuspended ||
      iteration_->order.all_launched() ||
      std::chrono::steady_clock::now() - iteration_->suspended_at < ago ||
      std::exchange(iteration_->has_reported_missing, true)) {
    return "";
  }
  return absl::StrCat(describe_missing(*iteration_),
                      "\nThe iteration is not over: its gradients are not "
                      "averaged.\n");
}

void Engine::warn_of_missing_late() {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  const std::string report = report_missing(kMissingGradientsReportTime);
  if (!report.empty()) TORCH_WARN(report);
}

std::string Engine::describe_progress() const {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  const Progress& progress = *observations_.progress;
  if (!lock.owns_lock()) {
    return absl::StrCat("has launched ", progress.launched.load(), " of ",
                        progress.num_units.load(), " buckets of iteration ",
                        progress.iteration.load(),
                        progress.is_waiting() ? " and waits for its peers"
                                              : " and is inside a hook");
  }
  if (!iteration_) {
    const int64_t last = observations_.counts.begun;
    return last == 0 ? "has not finished its first forward"
                     : absl::StrCat("has ended iteration ", last,
                                    " and not finished the next forward");
  }
  if (!iteration_->has_begun()) {
    return absl::StrCat("has finished the forward of iteration ",
                        iteration_->number,
                        ", whose backward has reached no parameter");
  }
  std::string words =
      absl::StrCat("has launched ", num_units(iteration_->launches), " of ",
                   num_units(iteration_->sequence), " buckets of iteration ",
                   iteration_->number);
  const std::vector<size_t> unready = missing(*iteration_);
  if (!unready.empty()) {
    absl::StrAppend(&words, " and waits for the gradients of ",
                    policy_.table().name_of_variables(unready));
  }
  return words;
}

}  // namespace brigade
