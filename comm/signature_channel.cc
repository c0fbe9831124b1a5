#include "brigade/comm/signature_channel.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/collective_count.h"
#include "brigade/comm/group_timeout.h"
#include "brigade/comm/peer_error.h"
#include "brigade/comm/roll_call.h"
#include "brigade/comm/signature_answers.h"
#include "brigade/comm/signature_check.h"

namespace brigade {
namespace {

using std::chrono::milliseconds;

// Survivors learn of a death within milliseconds of each other on one host.
constexpr milliseconds kAnswerPatience{3000};

std::string end_key(const std::string& prefix) {
  return absl::StrCat(prefix, "end");
}

// What a rank that has left answers to a roll call; >= 0 is a rank that is
// there.
int64_t left_after(int64_t iteration) { return -1 - iteration; }

AnswersSignatures* find_answers(c10d::ProcessGroup& group) {
  try {
    return dynamic_cast<AnswersSignatures*>(group.getBackend(at::kCPU).get());
  } catch (const std::exception&) {
    return nullptr;  // no backend for CPU tensors
  }
}

// "rank 1 has left after iteration 7"; empty if none has.
std::string describe_leavers(const RollCall& roll) {
  std::vector<std::string> parts;
  for (size_t rank = 0; rank < roll.answers.size(); ++rank) {
    const int64_t answer = roll.answers[rank].value_or(0);
    if (answer >= 0) continue;
    parts.push_back(absl::StrCat("rank ", rank, " has left after iteration ",
                                 left_after(answer)));
  }
  return absl::StrJoin(parts, ", ");
}

}  // namespace

SignatureChannel::SignatureChannel(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                   std::optional<ChannelIdentity> identity)
    : group_(std::move(group)),
      process_(getpid()),
      timeout_(group_timeout(*group_)),
      answers_(find_answers(*group_)),
      group_count_(count_collectives(*group_)) {
  if (group_->getSize() > 1 && group_->getStore() && !answers_) {
    connect(identity);
  }
}

void SignatureChannel::connect(std::optional<ChannelIdentity> identity) {
  try {
    mesh_ = SignatureMesh::of(group_);
  } catch (...) {
    throw_peer_error(
        absl::StrCat("signature channel: rank ", group_->getRank(), " of ",
                     group_->getSize(), " could not connect to the others"),
        std::current_exception());
  }
  if (!identity) identity = ChannelIdentity::made_together(group_);
  number_ = identity->number();
  prefix_ = absl::StrCat(mesh_->prefix(), "channel/", number_, "/");
}

SignatureChannel::~SignatureChannel() {
  if (!mesh_) return;
  if (getpid() != process_) {
    // Connections are the parent's: never to be closed here.
    new std::shared_ptr<SignatureMesh>(mesh_);
    return;
  }
  try {
    leave();
  } catch (const std::exception& error) {
    TORCH_WARN("signature channel: while leaving: ", error.what());
  }
}

// Told in two ways: by the mesh, as long as it lives; later by the store.
void SignatureChannel::leave() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [sequence, exchange] : in_flight_) exchange->abort();
  if (failure_) return;
  call_roll(group_, end_key(prefix_), left_after(last_.iteration),
            milliseconds{0});
  mesh_->leave(number_, last_);
}

void SignatureChannel::check_process() const {
  TORCH_CHECK(getpid() == process_, "SignatureChannel: made in process ",
              process_, ", it can't be used in process ", getpid(),
              ", which was forked from that.\nMake the group and what uses it "
              "after the fork.");
}

SignatureTicket SignatureChannel::exchange(RankSignature own) {
  check_process();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  own.sequence = last_.sequence + 1;
  if (group_count_) {
    const std::optional<int64_t> count = count_collectives(*group_);
    if (count) own.group_launches = *count - *group_count_;
    group_count_ = count;
  }
  last_ = own;
  SignatureTicket ticket = {.own = own};
  if (mesh_) {
    ticket.exchange = mesh_->begin(number_, own);
    in_flight_[own.sequence] = ticket.exchange;
  } else if (answers_ != nullptr) {
    ticket.answers = answers_->answer_signature(own);
  } else {
    ticket.answers.assign(group_->getSize(), own);
  }
  return ticket;
}

std::optional<std::vector<RankSignature>> SignatureChannel::await_difference(
    const SignatureTicket& ticket, std::optional<milliseconds> patience) {
  if (!ticket.exchange) {
    if (check_signatures(ticket.answers).ok()) return std::nullopt;
    return ticket.answers;
  }
  using enum SignatureExchange::Outcome;
  check_process();
  const milliseconds limit = std::min(patience.value_or(timeout_), timeout_);
  const auto outcome = ticket.exchange->wait_for_outcome(limit);
  if (outcome == kAgreed || outcome == kDiffer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    in_flight_.erase(ticket.own.sequence);
  }
  if (outcome == kAgreed) return std::nullopt;
  if (outcome == kDiffer) return ticket.exchange->received();
  try {
    ticket.exchange->throw_why(outcome, limit);
  } catch (...) {
    fail(ticket, outcome, std::current_exception());
  }
}

std::vector<RankSignature> SignatureChannel::await(
    const SignatureTicket& ticket, std::optional<milliseconds> patience) {
  if (!ticket.exchange) return ticket.answers;
  auto different = await_difference(ticket, patience);
  if (different) return *std::move(different);
  return std::vector<RankSignature>(group_->getSize(), ticket.own);
}

void SignatureChannel::count_from_here() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (group_count_) group_count_ = count_collectives(*group_);
}

std::optional<RollCall> SignatureChannel::call_survivors(
    const std::string& occasion) {
  if (!mesh_) return std::nullopt;
  return call_roll(group_, absl::StrCat(prefix_, "failed/", occasion), 1,
                   kAnswerPatience);
}

std::string SignatureChannel::describe_wait(
    const SignatureTicket& ticket) const {
  return absl::StrCat("waiting for the other ranks' signatures on rank ",
                      group_->getRank(), ", which ",
                      describe_signature(ticket.own));
}

void SignatureChannel::fail(const SignatureTicket& ticket,
                            SignatureExchange::Outcome outcome,
                            const std::exception_ptr& cause) {
  using enum SignatureExchange::Outcome;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
  }
  std::vector<Absence> absences;
  if (outcome == kBroken) absences = ticket.exchange->absences();
  const auto has_left = [](const Absence& absence) {
    return absence.reason == AbsenceReason::kLeft;
  };
  std::string context = describe_wait(ticket);
  if (!absences.empty() && std::ranges::all_of(absences, has_left)) {
    absl::StrAppend(&context, ": ", describe(absences));
    fail_with(context,
              std::make_exception_ptr(
                  std::runtime_error("nobody will answer in its place")),
              /*roll=*/nullptr);
  }
  if (outcome == kAborted) fail_with(context, cause, /*roll=*/nullptr);

  const std::string key = end_key(prefix_);
  call_roll(group_, key, ticket.own.iteration, milliseconds{0});
  // The others are to notice it now, and answer.
  if (outcome == kTimedOut) mesh_->give_up(ticket.own);
  const RollCall roll =
      call_roll(group_, key, ticket.own.iteration, kAnswerPatience,
                [mesh = mesh_] { return mesh->closed_ranks(); });
  const std::string leavers = describe_leavers(roll);
  if (!leavers.empty()) absl::StrAppend(&context, ": ", leavers);
  fail_with(context, cause, leavers.empty() ? &roll : nullptr);
}

void SignatureChannel::fail_with(const std::string& context,
                                 const std::exception_ptr& cause,
                                 const RollCall* roll) {
  try {
    throw_peer_error(context, cause, roll);
  } catch (...) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_) failure_ = std::current_exception();
    std::rethrow_exception(failure_);
  }
}

}  // namespace brigade
