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

namespace brigade {
namespace {

using std::chrono::milliseconds;

// Survivors learn of a death within milliseconds of each other on one host.
constexpr milliseconds kAnswerPatience{3000};

// Peers may still be reading what was sent in an exchange while its answers are
// all here, but no longer once the next one's are.
constexpr int64_t kSafeDistance = 1;

constexpr int kSequenceBits = 40;

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

SignatureChannel::SignatureChannel(c10::intrusive_ptr<c10d::ProcessGroup> group)
    : group_(std::move(group)),
      process_(getpid()),
      timeout_(group_timeout(*group_)),
      answers_(find_answers(*group_)),
      group_count_(count_collectives(*group_)) {
  if (group_->getSize() > 1 && group_->getStore() && !answers_) connect();
}

void SignatureChannel::connect() {
  try {
    mesh_ = SignatureMesh::of(group_);
  } catch (...) {
    throw_peer_error(
        absl::StrCat("signature channel: rank ", group_->getRank(), " of ",
                     group_->getSize(), " could not connect to the others"),
        std::current_exception());
  }
  number_ = mesh_->add_channel();
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

// Told in two ways: peers that wait, or will, get a message in place of a
// signature, as long as the mesh lives; later the store tells.
void SignatureChannel::leave() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const KeptExchange& kept : exchanges_) {
    if (kept.sequence <= last_awaited_) continue;
    kept.exchange->abort();
    mesh_->keep(kept.exchange);  // peers may come to it
  }
  if (failure_) return;
  call_roll(group_, end_key(prefix_), left_after(last_.iteration),
            milliseconds{0});
  const RankSignature farewell = {.kind = SignatureKind::kGone,
                                  .sequence = last_.sequence + 1,
                                  .iteration = last_.iteration};
  const auto exchange = mesh_->make_exchange();
  exchange->begin(place_of(farewell.sequence), farewell);
  mesh_->keep(exchange);
}

void SignatureChannel::check_process() const {
  TORCH_CHECK(getpid() == process_, "SignatureChannel: made in process ",
              process_, ", it can't be used in process ", getpid(),
              ", which was forked from that.\nMake the group and what uses it "
              "after the fork.");
}

uint64_t SignatureChannel::place_of(int64_t sequence) const {
  return (number_ << kSequenceBits) | static_cast<uint64_t>(sequence);
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
    ticket.exchange = free_exchange(own.sequence);
    ticket.exchange->begin(place_of(own.sequence), own);
  } else if (answers_ != nullptr) {
    ticket.answers = answers_->answer_signature(own);
  } else {
    ticket.answers.assign(group_->getSize(), own);
  }
  return ticket;
}

std::shared_ptr<SignatureExchange> SignatureChannel::free_exchange(
    int64_t sequence) {
  for (KeptExchange& kept : exchanges_) {
    if (kept.exchange.use_count() > 1) continue;
    if (kept.sequence + kSafeDistance > last_awaited_) continue;
    kept.sequence = sequence;
    return kept.exchange;
  }
  exchanges_.push_back(
      {.exchange = mesh_->make_exchange(), .sequence = sequence});
  return exchanges_.back().exchange;
}

std::vector<RankSignature> SignatureChannel::await(
    const SignatureTicket& ticket, std::optional<milliseconds> patience) {
  if (!ticket.exchange) return ticket.answers;
  check_process();
  try {
    ticket.exchange->wait(std::min(patience.value_or(timeout_), timeout_));
  } catch (...) {
    fail(ticket, std::current_exception());
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    last_awaited_ = std::max(last_awaited_, ticket.own.sequence);
  }
  require_nobody_left(ticket);
  return ticket.exchange->received();
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

void SignatureChannel::require_nobody_left(const SignatureTicket& ticket) {
  RollCall told;
  for (const RankSignature& signature : ticket.exchange->received()) {
    const bool has_left = signature.kind == SignatureKind::kGone;
    told.answers.emplace_back(has_left ? left_after(signature.iteration) : 0);
  }
  const std::string leavers = describe_leavers(told);
  if (leavers.empty()) return;
  fail_with(absl::StrCat(describe_wait(ticket), ": ", leavers),
            std::make_exception_ptr(
                std::runtime_error("nobody will answer in its place")),
            /*roll=*/nullptr);
}

void SignatureChannel::fail(const SignatureTicket& ticket,
                            const std::exception_ptr& cause) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
  }
  const std::vector<int> lost = ticket.exchange->lost_peers();
  const std::string key = end_key(prefix_);
  call_roll(group_, key, ticket.own.iteration, milliseconds{0});
  // Its end is what ranks notice that do not wait for the lost one.
  mesh_->close();
  const RollCall roll =
      call_roll(group_, key, ticket.own.iteration, kAnswerPatience, lost);
  const std::string leavers = describe_leavers(roll);
  std::string context = describe_wait(ticket);
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
