#include "brigade/reducer/peer_signatures.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/collective_count.h"

namespace brigade {
namespace {

// Survivors learn of a death within milliseconds of each other on one host.
constexpr std::chrono::milliseconds kAnswerPatience{3000};

// How many reducers this rank has made on the group, itself included: ranks
// make theirs in the same order.
int64_t count_reducer(c10d::Store& store, int rank) {
  return store.add(absl::StrCat("brigade/num_reducers/", rank), 1);
}

}  // namespace

PeerSignatures::PeerSignatures(c10::intrusive_ptr<c10d::ProcessGroup> group)
    : group_(std::move(group)) {
  const c10::intrusive_ptr<c10d::Store> store = group_->getStore();
  if (store && group_->getSize() > 1) {
    prefix_ = absl::StrCat("brigade/reducer_",
                           count_reducer(*store, group_->getRank()), "/");
  }
  group_counts_ = !prefix_.empty();  // else there is nobody to compare with
}

SignatureChannel& PeerSignatures::channel() {
  if (!channel_) channel_ = std::make_unique<SignatureChannel>(group_);
  return *channel_;
}

Verdict PeerSignatures::exchange(RankSignature own) {
  SignatureChannel& to_all = channel();
  own.launches = std::exchange(launches_, 0);
  own.own_collectives = std::exchange(own_collectives_, 0);
  const std::vector<RankSignature> by_rank = to_all.await(to_all.exchange(own));
  Verdict verdict = {.status = check_signatures(by_rank), .owed = 0};
  for (const RankSignature& signature : by_rank) {
    verdict.iteration = std::max(verdict.iteration, signature.iteration);
  }
  if (!verdict.status.ok()) {
    verdict.owed = launches_owed(by_rank, group_->getRank());
  } else {
    is_at_meeting_point_ = true;
  }
  return verdict;
}

std::optional<int64_t> PeerSignatures::group_count() {
  if (!group_counts_) return std::nullopt;
  const std::optional<int64_t> count = count_collectives(*group_);
  group_counts_ = count.has_value();  // not to be asked again: slow
  return count;
}

void PeerSignatures::met() {
  channel().count_from_here();
  launches_ = 0;
  own_collectives_ = 0;
  is_at_meeting_point_ = true;
}

void PeerSignatures::tell_of_loss(RankSignature own) noexcept {
  own.launches = kLostGroup;
  launches_ = 0;
  own_collectives_ = 0;
  try {
    if (channel_) last_words_ = channel_->exchange(own);
  } catch (const std::exception&) {
    // The channel is lost as well, which peers notice by themselves.
  }
}

std::optional<RollCall> PeerSignatures::call_survivors(
    const std::string& occasion) {
  if (prefix_.empty()) return std::nullopt;
  return call_roll(group_, absl::StrCat(prefix_, "failed/", occasion), 1,
                   kAnswerPatience);
}

}  // namespace brigade
