#include "brigade/reducer/engine.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <exception>
#include <functional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/reducer/gradient_errors.h"

namespace brigade {
namespace {

// Of a user's hook, to see whether its continuations launch collectives.
constexpr int64_t kWatchedIterations = 5;

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
}

Engine::~Engine() {
  observations_.stall_watch = nullptr;  // asks this object

  // A backward that failed may report it a little late, on another thread.
  const std::weak_ptr<GradientHooks> callbacks = hooks_;
  hooks_ = nullptr;
  while (!callbacks.expired()) std::this_thread::yield();

  if (iteration_) end_.let_go(*iteration_);
}

// Ranks have compared everything that the plan follows from: it is agreed on.
void Engine::connect() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!policy_.options().verify_across_ranks) return;  // ranks connect later
  connect_ranks();
  peers_.set_agreed(policy_.fingerprint());
  policy_.connect_on_host();
}

void Engine::connect_ranks() {
  peers_.connect();
  observations_.watch_stalls(policy_.group(), peers_.store_prefix(),
                             {.engine = "Reducer", .unit = "bucket"},
                             [this] { return describe_progress(); });
}

// ---- An iteration

void Engine::prepare(std::span<const at::Tensor> outputs) {
  noting_errors([&] {
    require_no_running_backward();
    end_unfinished_iteration();
    if (!policy_.expects_gradients()) {
      take_iteration();
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
  take_iteration();
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

// A checkpoint around the wrapped module, for instance, runs forward again in
// backward.
void Engine::require_no_running_backward() const {
  const bool is_inside = iteration_ && iteration_->phase == Phase::kReducing &&
                         running_backward_id() >= 0;
  TORCH_CHECK(!is_inside,
              "Reducer: expected a forward outside of the backward of ",
              describe(iteration_->occasion),
              ", found one inside of it, which is to be reduced as well.\n"
              "Checkpoint inside of what is wrapped, not around it; or call it "
              "there under no_sync().");
}

// An iteration that has begun and is not over will get no more gradients.
void Engine::end_unfinished_iteration() {
  if (!has_begun()) return;
  Iteration& iteration = *iteration_;
  // A backward whose end was not reported has thrown, on another thread.
  if (iteration.phase != Phase::kSuspended) return abort_iteration();
  TORCH_CHECK(
      !finalizes_manually_ || !iteration.order.all_launched(),
      "Expected to have finalized the prior backward pass, but that of ",
      describe(iteration.occasion),
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
  noting_errors([&] {
    end_unfinished_iteration();
    start_iteration();
    iteration_->phase = Phase::kReducing;
    observations_.counts.begun = iteration_->number;
    peers_.backward_begins();
    try {
      if (policy_.skips_unused_buckets()) end_.begin_together(*iteration_);
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
  TORCH_CHECK(!iteration_, "Reducer::set_manual_finalization: ",
              describe(iteration_->occasion),
              " is prepared or under way; this cannot be called after forward "
              "while a backward is expected.\nCall it before forward, or when "
              "the iteration is over.");
  finalizes_manually_ = required;
}

void Engine::finalize() {
  noting_errors([&] {
    TORCH_CHECK(finalizes_manually_,
                "Reducer::finalize_backward: manual backward finalization is "
                "not required.\nSet it before forward, or let backward end the "
                "iteration.");
    TORCH_CHECK(has_begun() && !iteration_->is_ending(),
                "Reducer::finalize_backward: no gradient reduction requires "
                "finalization.\nCall it once, after a backward outside of "
                "no_sync.");
    TORCH_CHECK(
        iteration_->order.all_launched(),
        "Reducer::finalize_backward: called before all DDP buckets were ready: "
        "gradients of ",
        policy_.table().name_of_variables(missing(*iteration_)),
        " are missing.\nCall it when all have come, at the latest after "
        "backward.");
    finish();
  });
}

void Engine::finish() {
  const std::shared_ptr<Iteration> iteration = take_iteration();
  membership_.mark_finished(iteration->preparation, iteration->creates_graph);
  has_forward_ = iteration->creates_graph;  // which a backward may go through
  end_.finish(iteration);
}

void Engine::abort_iteration() {
  const std::shared_ptr<Iteration> iteration = take_iteration();
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

std::shared_ptr<Iteration> Engine::take_iteration() {
  return std::exchange(iteration_, nullptr);
}

std::string Engine::describe_missing(const Iteration& iteration) const {
  return describe_missing_gradients(policy_.table(), missing(iteration),
                                    iteration.occasion, policy_.options());
}

Occasion Engine::occasion(int64_t iteration) const {
  return {.iteration = iteration, .rank = policy_.group()->getRank()};
}

// ---- In a backward: gradients become ready, collectives are launched

// The outputs of any forward since the last iteration are this one's.
void Engine::on_output_reached(Preparation preparation) {
  noting_errors([&] {
    const int backward_id = running_backward_id();
    membership_.output_reached(preparation, backward_id);
    if (!iteration_ || iteration_->is_ending() ||
        membership_.is_finished(preparation)) {
      return;
    }
    observations_.timeline.backward_begins();
    enter_backward(backward_id);
    try {
      // Launches that need no gradient go first: on a rank that leaves
      // out all but the last parameters the first gradient may come after
      // another collective of the backward, which its peers meet after their
      // first units.
      if (policy_.begins_at_outputs() && accumulates_all_gradients()) {
        begin_reduction();
      }
      for (const EarlyGradient& early : membership_.take_from(backward_id)) {
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
    if (!iteration_ || iteration_->is_ending()) {
      policy_.on_local_gradient(variable, is_defined);
      if (iteration_) return;
      if (const auto finished = membership_.passed_by(backward_id)) {
        TORCH_CHECK(false,
                    describe_late_gradient(policy_.table(), variable.parameter,
                                           occasion(*finished)));
      }
      if (expects_forwards_ && !has_forward_ &&
          !membership_.is_local(backward_id)) {
        report_unannounced(variable);
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

// The program called the wrapped module and not its wrapper, say.
void Engine::report_unannounced(VariableIndex variable) {
  const std::string text =
      describe_gradient_without_forward(policy_.table(), variable.parameter,
                                        occasion(observations_.counts.begun));
  TORCH_CHECK(!policy_.options().one_backward_per_forward, text);
  if (!std::exchange(has_warned_, true)) TORCH_WARN(text);
}

// Reentrant backwards inside of one change nothing.
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

// Autograd reports a backward's end only to those who ask during it.
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

// The backward may come to the prepared outputs later; else the gradient stays
// on this rank.
void Engine::accept_early_gradient(VariableIndex variable, bool is_defined,
                                   int backward_id) {
  policy_.on_local_gradient(variable, is_defined);
  const Iteration& iteration = *iteration_;
  if (iteration.is_ready[policy_.table().number_of(variable)]) {
    // Its unit is on its way. The iteration should have been over.
    TORCH_CHECK(false, describe_missing(iteration));
  }
  membership_.keep({.variable = variable,
                    .is_defined = is_defined,
                    .backward_id = backward_id});
}

// Gradients that will not come are ready once backward has begun. Not before:
// forward's outputs may be used for something else.
void Engine::begin_reduction() {
  Iteration& iteration = *iteration_;
  if (iteration.has_begun()) return;
  iteration.phase = Phase::kReducing;
  observations_.counts.begun = iteration.number;
  observations_.timeline.backward_begins();
  iteration.creates_graph = at::GradMode::is_enabled();
  if (policy_.skips_unused_buckets()) end_.begin_together(*iteration_);
  if (!policy_.hook_traits().fails_by_network_only &&
      iteration.number <= watches_continuations_until_) {
    iteration.continuations.emplace();
  }
  mark_at_begin();
  launch_ready();
}

// Marks the gradients that the policy knows will not come.
void Engine::mark_at_begin() {
  const bool is_shadow = iteration_->is_shadow;
  policy_.mark_used_at_begin(is_shadow);
  // Before anything is launched that depends on the map.
  if (policy_.skips_unused_buckets()) deliver_used_map();
  policy_.on_backward_begins(
      is_shadow, [this](size_t variable, Slot slot) { mark(variable, slot); });
}

// The sum of the used parameters, which is launched first.
void Engine::deliver_used_map() {
  launch_ready();
  const WaitForPeers waiting(*observations_.progress);
  Collective& map = *iteration_->launches.front().collective;
  try {
    map.deliver(/*result=*/{});  // which waits
  } catch (...) {
    end_.raise(*iteration_,
               failure_of(iteration_->occasion, ErrorSource::kFuture, map));
  }
}

// `then_launch`: the entries that are ready.
void Engine::mark(size_t variable, Slot slot, bool then_launch) {
  if (slot.has_gradient) {
    observations_.timeline.gradient_ready(policy_.table().variable(variable));
  }
  iteration_->is_ready[variable] = true;
  if (!iteration_->order.mark(slot.entry)) return;
  const HookScope scope(iteration_->preparer);
  pack(*iteration_, slot.entry, observations_);
  if (then_launch) launch_in_scope();
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
    policy_.refuse(variable, iteration_->occasion);
  }
  if (const auto slot = policy_.on_gradient(variable, is_defined)) {
    mark(number, *slot, /*then_launch=*/true);
  }
}

void Engine::on_backward_end(int64_t preparation, int backward_id) {
  noting_errors([&] {
    const std::shared_ptr<Iteration> iteration = iteration_;
    if (!iteration || iteration->preparation.number != preparation) return;
    if (iteration->is_ending()) return abort_iteration();
    // Gradients were computed, but not of parameters; perhaps there are none to
    // come.
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
    // Comm hooks that have only now been called may have queued callbacks.
    if (iteration->launches.size() > launched_before) {
      return watch_end(backward_id);
    }
    iteration->phase = Phase::kSuspended;
    if (iteration->order.all_launched()) {
      if (!finalizes_manually_) finish();
    } else if (policy_.options().one_backward_per_forward) {
      end_unfinished_iteration();
    }
    // Otherwise another backward may bring the missing gradients. Launches are
    // not waited for: a peer may have failed before its own.
  });
}

// ---- Between iterations: ranks meet, and the sequence changes

// Peers may be in an iteration that this rank has not begun.
void Engine::come_together(std::string_view deed) {
  end_unfinished_iteration();
  peers_.require_open();
  if (end_.runs_ahead()) return end_.confirm_due_ends();
  if (!peers_.is_connected()) connect_ranks();
  agree(*make_iteration(observations_.counts.begun),
        {.kind = StatusKind::kAsk,
         .fingerprint = std::hash<std::string_view>()(deed),
         .text = status_text(deed)});
}

void Engine::agree(Iteration& iteration, const RankStatus& own) {
  try {
    end_.agree(iteration, own);
  } catch (...) {
    take_iteration();
    throw;
  }
}

bool Engine::replan() {
  return noting_errors([&] {
    if (has_begun()) return false;
    // An observed order counts when the iteration's end is confirmed.
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
              describe(occasion(observations_.counts.begun)),
              " is being reduced.\nCall it before the backward or after it.");
}

void Engine::set_hook(std::shared_ptr<c10d::CommHookInterface> hook) {
  noting_errors([&] {
    require_not_reducing("Reducer::set_comm_hook");
    // All ranks change it, whatever each of them is still to hear.
    std::exception_ptr refuted;
    try {
      end_.confirm_ends();
    } catch (...) {
      refuted = std::current_exception();
    }
    if (policy_.set_hook(std::move(hook))) {
      end_.adopt_sequence(iteration_.get());
    }
    peers_.compare_others(!policy_.hook_traits().fails_by_network_only);
    const int64_t begun = observations_.counts.begun;
    watches_continuations_until_ = begun + kWatchedIterations;
    // Later ranks may be in different places.
    if (peers_.is_connected()) agree_on_sequence(*make_iteration(begun + 1));
    if (refuted) std::rethrow_exception(refuted);
  });
}

// A sequence is agreed on where it is made: later a peer may wait for something
// else than this rank's next forward or first gradient.
void Engine::agree_on_sequence(Iteration& iteration) {
  if (!peers_.is_connected()) connect_ranks();
  if (peers_.is_agreed(policy_.fingerprint())) return;
  agree(iteration, end_.begin_status());
  peers_.set_agreed(policy_.fingerprint());
}

void Engine::call_between_iterations(std::string_view doing,
                                     const std::function<void()>& collective) {
  const WaitForPeers waiting(*observations_.progress);
  try {
    collective();
  } catch (...) {
    peers_.close(message_of(std::current_exception()));
    throw_peer_error(absl::StrCat("Reducer: ", std::string(doing), " on rank ",
                                  policy_.group()->getRank()),
                     std::current_exception());
  }
}

// Called on another thread; never waits for the lock, which an engine that
// waits for its peers holds.
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
    return absl::StrCat("has prepared nothing since iteration ",
                        observations_.counts.begun);
  }
  if (!iteration_->has_begun()) {
    return absl::StrCat("has prepared iteration ", iteration_->number,
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
