#include "brigade/engine/peer_status.h"

#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/collective_count.h"
#include "brigade/comm/peer_error.h"

namespace brigade {

// All ranks throw alike, with the same words.
void throw_if_apart(const StatusComparison& comparison,
                    const std::string& name) {
  if (comparison.status.ok()) return;
  std::string text(comparison.status.message());
  if (!comparison.deficit.ok()) {
    absl::StrAppend(&text, "\n", comparison.deficit.status().message());
  }
  if (absl::IsAborted(comparison.status)) {
    throw_peer_error(name, std::make_exception_ptr(std::runtime_error(text)));
  }
  TORCH_CHECK(false, name, ": ", text);
}

PeerStatus::PeerStatus(c10::intrusive_ptr<c10d::ProcessGroup> group,
                       bool has_channel)
    : group_(std::move(group)),
      has_channel_(has_channel),
      // Else there is nobody to compare with.
      group_counts_(has_channel && group_->getSize() > 1 &&
                    group_->getStore()) {}

void PeerStatus::connect() {
  if (is_connected()) return;
  channel_ = std::make_unique<ControlChannel>(group_, identity_);
}

void PeerStatus::connect_later() {
  identity_ = ChannelIdentity::made_alone(group_);
}

PendingExchange PeerStatus::begin_exchange(RankStatus own) {
  // One launch has but one order.
  const uint64_t others = std::exchange(others_, 0);
  own.others = launches_ > 1 ? others : 0;
  own.launches = std::exchange(launches_, 0);
  own.own_collectives = std::exchange(own_collectives_, 0);
  last_count_.reset();
  if (!channel_) return {.own = own};
  return channel_->exchange(own);
}

StatusComparison PeerStatus::await(
    const PendingExchange& pending,
    std::optional<std::chrono::milliseconds> patience) {
  if (!channel_) return without_channel(pending.own);
  const auto by_rank = channel_->await_difference(pending, patience);
  if (!by_rank) {
    return {.status = absl::OkStatus(),
            .deficit = 0,
            .iteration = pending.own.iteration};
  }
  StatusComparison comparison = {.status = check_statuses(*by_rank),
                                 .deficit = 0};
  for (const RankStatus& rank_status : *by_rank) {
    comparison.iteration =
        std::max(comparison.iteration, rank_status.iteration);
  }
  if (!comparison.status.ok()) {
    comparison.deficit = launch_deficit(*by_rank, group_->getRank());
  }
  return comparison;
}

StatusComparison PeerStatus::without_channel(const RankStatus& own) const {
  StatusComparison comparison = {
      .status = absl::OkStatus(), .deficit = 0, .iteration = own.iteration};
  if (own.kind != StatusKind::kFailed) return comparison;
  comparison.status = absl::AbortedError(describe_status(own));
  if (group_->getSize() > 1) {
    comparison.deficit = absl::FailedPreconditionError(
        "There is no control channel that would tell the other ranks, so that "
        "the group's connections are closed.\nMake a new group.");
  }
  return comparison;
}

std::optional<int64_t> PeerStatus::group_count() {
  if (!group_counts_) return std::nullopt;
  const std::optional<int64_t> count = count_collectives(*group_);
  group_counts_ = count.has_value();  // not to be asked again: slow
  return count;
}

// Nothing before the first launch counts: forwards may be unequally many.
void PeerStatus::note_others(std::optional<int64_t> count) {
  if (count && last_count_) add_to_digest(*count - *last_count_);
}

void PeerStatus::add_to_digest(int64_t num_collectives) {
  if (!compares_others_) return;
  others_ = c10::hash_combine(others_, num_collectives + 1);
}

void PeerStatus::met() {
  if (channel_) channel_->count_from_here();
  launches_ = 0;
  own_collectives_ = 0;
}

void PeerStatus::tell_of_loss(RankStatus own) noexcept {
  own.launches = kLostGroup;
  launches_ = 0;
  own_collectives_ = 0;
  try {
    if (channel_) last_words_ = channel_->exchange(own);
  } catch (const std::exception&) {
    // The channel is lost as well, which peers notice by themselves.
  }
}

std::optional<LivenessProbe> PeerStatus::find_survivors(
    const std::string& occasion) {
  if (!channel_) return std::nullopt;
  return channel_->find_survivors(occasion);
}

}  // namespace brigade
