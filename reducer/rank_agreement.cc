#include "brigade/reducer/rank_agreement.h"

#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/reducer/failure.h"
#include "brigade/reducer/launching.h"

namespace brigade {
namespace {

using Patience = std::optional<std::chrono::milliseconds>;

bool has_ended(const RankStatus& rank_status) {
  return rank_status.kind == StatusKind::kEnd;
}

bool is_over_for(const RankStatus& rank_status) {
  return has_ended(rank_status) || rank_status.kind == StatusKind::kFailed;
}

bool launches_later(const RankStatus& rank_status) {
  return rank_status.launches_later != 0;
}

std::string describe_awaited(const Iteration& iteration) {
  const auto& launches = iteration.launches;
  if (launches.empty()) return describe(iteration.occasion);
  auto awaited = std::ranges::find_if(launches, is_pending);
  if (awaited == launches.end()) --awaited;
  return describe_place(*awaited->collective, iteration.occasion);
}

}  // namespace

RankStatus RankAgreement::begin_status() const {
  std::string words = policy_.describe_sequence();
  if (const std::string& hook = policy_.hook_traits().name; !hook.empty()) {
    absl::StrAppend(&words, ", comm hook ", hook);
  }
  return {.kind = StatusKind::kBegin, .text = status_text(words)};
}

RankStatus RankAgreement::send(const Iteration& iteration, RankStatus own) {
  own.iteration = iteration.number;
  const uint64_t of_sequence = policy_.fingerprint();
  own.fingerprint = own.fingerprint == 0
                        ? of_sequence
                        : c10::hash_combine(of_sequence, own.fingerprint);
  return peers_.send(own, /*ends_iteration=*/is_over_for(own));
}

StatusComparison RankAgreement::exchange(Iteration& iteration,
                                         const RankStatus& own,
                                         Patience patience) {
  try {
    StatusComparison found = peers_.await(send(iteration, own), patience);
    // Peers have delivered what this rank has not launched.
    found.must_close |= !found.status.ok() && runs_ahead() && !has_ended(own) &&
                        std::ranges::any_of(found.by_rank, has_ended);
    catch_up(iteration, own, found, patience);
    return found;
  } catch (const c10::DistBackendError& error) {
    const std::string where = describe_awaited(iteration);
    const std::string text = error.what_without_backtrace();
    peers_.close(text);
    throw_peer_error(absl::StrCat("Reducer: ", where),
                     std::make_exception_ptr(std::runtime_error(text)));
  }
}

std::string RankAgreement::launch_substitutes(Iteration& iteration) {
  try {
    launch_rest(iteration, peers_, observations_);
    return "";
  } catch (...) {
    return message_of(std::current_exception());
  }
}

// Ranks that have launched less than others launch zeros, and tell whether they
// could. Not before all are known to have ended: until then zeros might meet
// another collective of the program. Where ranks begin each iteration together,
// only those that have begun it launch later.
void RankAgreement::catch_up(Iteration& iteration, const RankStatus& own,
                             StatusComparison& found, Patience patience) {
  if (found.status.ok() ||
      !std::ranges::any_of(found.by_rank, launches_later)) {
    return;
  }
  if (found.must_close) {
    // On devices peers that have ended wait for these in the user's stream.
    if (launches_later(own) && runs_ahead()) launch_substitutes(iteration);
    return;
  }
  if (!policy_.skips_unused_buckets() &&
      !std::ranges::any_of(found.by_rank, is_over_for)) {
    return;
  }
  const auto has_launched_as_much = [&](const RankStatus& peer) {
    return peer.kind == StatusKind::kFailed && launches_later(peer) &&
           peer.launched == own.launched;
  };
  if (std::ranges::all_of(found.by_rank, has_launched_as_much)) return;
  RankStatus caught_up = {.kind = StatusKind::kFailed};
  if (launches_later(own)) {
    const std::string problem = launch_substitutes(iteration);
    if (!problem.empty()) peers_.set_cannot_continue();
    caught_up.text = status_text(problem);
  }
  found.must_close =
      peers_.await(send(iteration, caught_up), patience).must_close;
}

bool RankAgreement::runs_ahead() const {
  return std::ranges::none_of(policy_.sequence(), [](const Collective* entry) {
    return entry->device().is_cpu();
  });
}

void RankAgreement::defer(std::shared_ptr<Iteration> iteration,
                          const RankStatus& own) {
  const RankStatus sent = send(*iteration, own);
  unconfirmed_ends_.push_back(
      {.iteration = std::move(iteration), .sent = sent});
}

void RankAgreement::confirm_oldest_end() {
  const UnconfirmedEnd end = std::move(unconfirmed_ends_.front());
  unconfirmed_ends_.pop_front();
  const size_t num_later = unconfirmed_ends_.size();
  try {
    StatusComparison found = peers_.await(end.sent);
    if (found.status.ok()) return policy_.on_end_confirmed();
    found.must_close = true;
    peers_.close(std::string(found.status.message()));
    throw_if_apart(
        found,
        absl::StrCat(
            "Reducer: iteration ", end.iteration->number,
            num_later == 0 ? ""
                           : absl::StrCat(", and ", num_later, " after it"),
            ", whose results were delivered before this was known.\nLoad a "
            "checkpoint on all ranks"));
  } catch (...) {
    if (!peers_.is_closed()) {
      peers_.close(message_of(std::current_exception()));
    }
    late_failure_ = message_of(std::current_exception());
    unconfirmed_ends_.clear();
    policy_.on_end_refuted();
    throw;
  }
}

void RankAgreement::confirm_ends() {
  while (!unconfirmed_ends_.empty()) confirm_oldest_end();
}

// What an iteration teaches counts before the next. One that could not be
// delivered still has entries of the policy's, which may change.
void RankAgreement::confirm_due_ends() {
  const auto is_delivered = [](const UnconfirmedEnd& end) {
    return end.iteration->launches.empty();
  };
  const bool must_know_all =
      policy_.is_learning() ||
      !std::ranges::all_of(unconfirmed_ends_, is_delivered);
  const size_t may_be_open =
      must_know_all
          ? 0
          : static_cast<size_t>(policy_.options().max_unconfirmed_iterations);
  while (!unconfirmed_ends_.empty() &&
         (unconfirmed_ends_.size() > may_be_open ||
          peers_.is_complete(unconfirmed_ends_.front().sent))) {
    confirm_oldest_end();
  }
}

}  // namespace brigade
