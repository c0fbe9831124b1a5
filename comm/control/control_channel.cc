#include "brigade/comm/control/control_channel.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/control/status_answers.h"
#include "brigade/comm/control/status_check.h"
#include "brigade/comm/errors/liveness_probe.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/find_backend.h"
#include "brigade/comm/group/group_timeout.h"
#include "brigade/comm/group/has_peers.h"

namespace brigade {
namespace {

using std::chrono::milliseconds;

// Survivors learn of a death within milliseconds of each other on one host.
constexpr milliseconds kAnswerPatience{3000};

std::string end_key(const std::string& prefix) {
  return absl::StrCat(prefix, "end");
}

// What a rank that has left answers to a liveness probe; >= 0 is a rank that is
// there.
int64_t left_after(int64_t iteration) { return -1 - iteration; }

AnswersStatuses* find_answers(c10d::ProcessGroup& group) {
  return dynamic_cast<AnswersStatuses*>(find_backend(group, at::kCPU).get());
}

// "rank 1 has left after iteration 7"; empty if none has.
std::string describe_leavers(const LivenessProbe& probe) {
  std::vector<std::string> parts;
  for (size_t rank = 0; rank < probe.answers.size(); ++rank) {
    const int64_t answer = probe.answers[rank].value_or(0);
    if (answer >= 0) continue;
    parts.push_back(absl::StrCat("rank ", rank, " has left after iteration ",
                                 left_after(answer)));
  }
  return absl::StrJoin(parts, ", ");
}

}  // namespace

ControlChannel::ControlChannel(c10::intrusive_ptr<c10d::ProcessGroup> group,
                               std::optional<ChannelIdentity> identity)
    : group_(std::move(group)),
      process_(getpid()),
      timeout_(group_timeout(*group_)),
      answers_(find_answers(*group_)) {
  if (has_peers(*group_) && !answers_) connect(identity);
}

void ControlChannel::connect(std::optional<ChannelIdentity> identity) {
  try {
    mesh_ = StatusMesh::of(group_);
  } catch (...) {
    throw_peer_error(
        absl::StrCat("control channel: rank ", group_->getRank(), " of ",
                     group_->getSize(), " could not connect to the others"),
        std::current_exception());
  }
  if (!identity) identity = ChannelIdentity::made_together(group_);
  number_ = identity->number();
  prefix_ = absl::StrCat(mesh_->prefix(), "channel/", number_, "/");
}

ControlChannel::~ControlChannel() {
  if (!mesh_) return;
  if (getpid() != process_) {
    // Connections are the parent's: never to be closed here.
    new std::shared_ptr<StatusMesh>(mesh_);
    return;
  }
  try {
    leave();
  } catch (const std::exception& error) {
    TORCH_WARN("control channel: while leaving: ", error.what());
  }
}

// Told in two ways: by the mesh, as long as it lives; later by the store.
void ControlChannel::leave() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [sequence, exchange] : in_flight_) exchange->abort();
  if (failure_) return;
  probe_liveness(group_, end_key(prefix_), left_after(last_.iteration),
                 milliseconds{0});
  mesh_->leave(number_, last_);
}

void ControlChannel::check_process() const {
  TORCH_CHECK(getpid() == process_, "ControlChannel: made in process ",
              process_, ", it can't be used in process ", getpid(),
              ", which was forked from that.\nMake the group and what uses it "
              "after the fork.");
}

PendingExchange ControlChannel::exchange(RankStatus own) {
  check_process();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  own.sequence = last_.sequence + 1;
  last_ = own;
  PendingExchange pending = {.own = own};
  if (mesh_) {
    pending.exchange = mesh_->begin(number_, own);
    in_flight_[own.sequence] = pending.exchange;
  } else if (answers_ != nullptr) {
    pending.exchange = answers_->exchange_status(own);
  } else {
    pending.exchange = std::make_shared<StatusExchange>();
    pending.exchange->finish_agreed(ToldAlike());
  }
  return pending;
}

std::optional<std::vector<RankStatus>> ControlChannel::await_difference(
    const PendingExchange& pending, std::optional<milliseconds> patience) {
  using enum StatusExchange::Outcome;
  check_process();
  const milliseconds limit = std::min(patience.value_or(timeout_), timeout_);
  const auto outcome = pending.exchange->wait_for_outcome(limit);
  if (outcome == kAgreed || outcome == kDiffer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    in_flight_.erase(pending.own.sequence);
  }
  if (outcome == kAgreed) return std::nullopt;
  if (outcome == kDiffer) return pending.exchange->received();
  try {
    pending.exchange->throw_why(outcome, limit);
  } catch (...) {
    fail(pending, outcome, std::current_exception());
  }
}

bool ControlChannel::is_over(const PendingExchange& pending) {
  return pending.exchange->outcome() != StatusExchange::Outcome::kPending;
}

ToldAlike ControlChannel::told_alike(const PendingExchange& pending) {
  return pending.exchange->alike();
}

std::vector<RankStatus> ControlChannel::await(
    const PendingExchange& pending, std::optional<milliseconds> patience) {
  auto different = await_difference(pending, patience);
  if (different) return *std::move(different);
  return std::vector<RankStatus>(group_->getSize(), pending.own);
}

std::optional<LivenessProbe> ControlChannel::find_survivors(
    const std::string& occasion) {
  if (!mesh_) return std::nullopt;
  return probe_liveness(group_, absl::StrCat(prefix_, "failed/", occasion), 1,
                        kAnswerPatience);
}

std::string ControlChannel::describe_wait(
    const PendingExchange& pending) const {
  return absl::StrCat("waiting for the other ranks' statuses on rank ",
                      group_->getRank(), ", which ",
                      describe_status(pending.own));
}

void ControlChannel::fail(const PendingExchange& pending,
                          StatusExchange::Outcome outcome,
                          const std::exception_ptr& cause) {
  using enum StatusExchange::Outcome;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
  }
  std::vector<Absence> absences;
  if (outcome == kBroken) absences = pending.exchange->absences();
  const auto has_left = [](const Absence& absence) {
    return absence.reason == AbsenceReason::kLeft;
  };
  std::string context = describe_wait(pending);
  if (!absences.empty() && std::ranges::all_of(absences, has_left)) {
    absl::StrAppend(&context, ": ", describe(absences));
    fail_with(context,
              std::make_exception_ptr(
                  std::runtime_error("nobody will answer in its place")),
              /*probe=*/nullptr);
  }
  if (outcome == kAborted || !mesh_) {
    fail_with(context, cause, /*probe=*/nullptr);
  }

  const std::string key = end_key(prefix_);
  probe_liveness(group_, key, pending.own.iteration, milliseconds{0});
  // The others are to notice it now, and answer.
  if (outcome == kTimedOut) mesh_->abort_exchanges(pending.own);
  const LivenessProbe probe =
      probe_liveness(group_, key, pending.own.iteration, kAnswerPatience,
                     [mesh = mesh_] { return mesh->closed_ranks(); });
  const std::string leavers = describe_leavers(probe);
  if (!leavers.empty()) absl::StrAppend(&context, ": ", leavers);
  fail_with(context, cause, leavers.empty() ? &probe : nullptr);
}

void ControlChannel::fail_with(const std::string& context,
                               const std::exception_ptr& cause,
                               const LivenessProbe* probe) {
  try {
    throw_peer_error(context, cause, probe);
  } catch (...) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_) failure_ = std::current_exception();
    std::rethrow_exception(failure_);
  }
}

}  // namespace brigade
