#include "brigade/comm/signature_channel.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/collective_count.h"
#include "brigade/comm/gloo_signature_backend.h"
#include "brigade/comm/group_timeout.h"
#include "brigade/comm/peer_error.h"
#include "brigade/comm/roll_call.h"
#include "brigade/comm/signature_answers.h"

namespace brigade {
namespace {

using std::chrono::milliseconds;

// Survivors learn of a death within milliseconds of each other on one host.
constexpr milliseconds kAnswerPatience{3000};

// Ranks whose signatures are not of one size must not meet.
constexpr const char* kPrefix = "brigade/signatures_256/";

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

void fill(at::Tensor& tensor, const std::vector<RankSignature>& by_rank) {
  std::memcpy(tensor.mutable_data_ptr(), by_rank.data(),
              by_rank.size() * sizeof(RankSignature));
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
      answers_(find_answers(*group_)),
      group_count_(count_collectives(*group_)) {
  if (group_->getSize() > 1 && group_->getStore() && !answers_) connect();
}

void SignatureChannel::connect() {
  const c10::intrusive_ptr<c10d::Store> store = group_->getStore();
  try {
    // Every rank counts its own, since several ranks may live in one process.
    const int64_t nth =
        store->add(absl::StrCat(kPrefix, "channels/", group_->getRank()), 1);
    const std::string prefix = absl::StrCat(kPrefix, nth);
    roll_key_ = absl::StrCat(prefix, "/end");
    backend_ = make_gloo_signature_backend(
        *group_, c10::make_intrusive<c10d::PrefixStore>(prefix, store),
        group_timeout(*group_));
    // A rank that is done at once must not leave while others connect.
    Buffers& hello = free_buffers();
    hello.sent.zero_();
    backend_->_allgather_base(hello.received, hello.sent)->wait();
  } catch (...) {
    throw_peer_error(
        absl::StrCat("signature channel: rank ", group_->getRank(), " of ",
                     group_->getSize(), " could not connect to the others"),
        std::current_exception());
  }
}

SignatureChannel::~SignatureChannel() {
  if (!backend_) return;
  if (getpid() != process_) {
    // The threads that its destructor would join are the parent's.
    backend_.release();
    return;
  }
  try {
    leave();
  } catch (const std::exception& error) {
    TORCH_WARN("signature channel: while leaving: ", error.what());
  }
}

void SignatureChannel::leave() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!failure_) {
    call_roll(group_, roll_key_, left_after(last_.iteration), milliseconds{0});
  }
  // One thread executes exchanges in order.
  if (last_work_ && !last_work_->isCompleted()) backend_->abort();
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

  Buffers& buffers = free_buffers();
  SignatureTicket ticket = {.own = own, .received = buffers.received};
  if (!backend_) {
    fill(ticket.received,
         answers_ ? answers_->answer_signature(own)
                  : std::vector<RankSignature>(group_->getSize(), own));
    return ticket;
  }
  std::memcpy(buffers.sent.mutable_data_ptr(), &own, sizeof(own));
  ticket.work = backend_->_allgather_base(buffers.received, buffers.sent);
  last_work_ = ticket.work;
  return ticket;
}

SignatureChannel::Buffers& SignatureChannel::free_buffers() {
  for (Buffers& buffers : buffers_) {
    if (buffers.sent.use_count() == 1 && buffers.received.use_count() == 1) {
      return buffers;
    }
  }
  const auto make = [](int64_t count) {
    return at::empty({count, sizeof(RankSignature)}, at::kByte);
  };
  return buffers_.emplace_back(
      Buffers{.sent = make(1), .received = make(group_->getSize())});
}

bool SignatureChannel::arrived(const SignatureTicket& ticket) const {
  return !ticket.work || ticket.work->isCompleted();
}

std::vector<RankSignature> SignatureChannel::await(
    const SignatureTicket& ticket) {
  if (ticket.work) {
    check_process();
    try {
      ticket.work->wait();
    } catch (...) {
      fail(ticket, std::current_exception());
    }
  }
  std::vector<RankSignature> by_rank(group_->getSize());
  std::memcpy(by_rank.data(), ticket.received.const_data_ptr(),
              by_rank.size() * sizeof(RankSignature));
  return by_rank;
}

void SignatureChannel::count_from_here() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (group_count_) group_count_ = count_collectives(*group_);
}

void SignatureChannel::fail(const SignatureTicket& ticket,
                            const std::exception_ptr& cause) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
  }
  // Its end is what ranks notice that do not wait for the lost one.
  backend_->abort();
  const RollCall roll =
      call_roll(group_, roll_key_, ticket.own.iteration, kAnswerPatience);
  const std::string leavers = describe_leavers(roll);
  std::string context = absl::StrCat(
      "waiting for the other ranks' signatures on rank ", group_->getRank(),
      ", which ", describe_signature(ticket.own));
  if (!leavers.empty()) absl::StrAppend(&context, ": ", leavers);
  try {
    throw_peer_error(context, cause, leavers.empty() ? &roll : nullptr);
  } catch (...) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_) failure_ = std::current_exception();
    std::rethrow_exception(failure_);
  }
}

}  // namespace brigade
