#include "brigade/engine/state/peer_status.h"

#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "brigade/comm/control/status_check.h"
#include "brigade/comm/group/has_peers.h"

namespace brigade {

PeerStatus::PeerStatus(
    std::span<const c10::intrusive_ptr<c10d::ProcessGroup>> groups,
    bool has_channel, bool counts_launches)
    : group_(groups.front()),
      has_channel_(has_channel),
      counts_launches_(counts_launches) {
  TORCH_CHECK_VALUE(groups.size() <= kMaxGroups, "expected at most ",
                    kMaxGroups, " process groups, got ", groups.size(),
                    ".\nUse one for several of them.");
  // Else there is nobody to compare with.
  const bool is_compared = has_channel && has_peers(*group_);
  for (const auto& group : groups) accounts_.emplace_back(group, is_compared);
}

void PeerStatus::connect() {
  if (is_connected()) return;
  channel_ = std::make_unique<ControlChannel>(group_, identity_);
  restart_counts();
}

void PeerStatus::connect_later() {
  identity_ = ChannelIdentity::made_alone(group_);
}

PendingExchange PeerStatus::begin_exchange(RankStatus own,
                                           bool tells_launches) {
  for (size_t group = 0; tells_launches && group < accounts_.size(); ++group) {
    const GroupAccount::Told told = accounts_[group].take();
    if (counts_launches_ || told.counts.launches == kAbortedGroup) {
      own.by_group[group] = told.counts;
    }
    if (group == 0) own.opening = told.opening;
    if (told.others != 0) {
      own.others = c10::hash_combine(own.others, told.others);
    }
  }
  if (!channel_) return {.own = own};
  return channel_->exchange(own);
}

PendingExchange PeerStatus::begin_again(const PendingExchange& before) {
  if (!channel_) return before;
  return channel_->exchange(before.own);
}

StatusComparison PeerStatus::await(
    const PendingExchange& pending,
    std::optional<std::chrono::milliseconds> patience) {
  if (!channel_) return without_channel(pending.own);
  auto by_rank = channel_->await_difference(pending, patience);
  if (!by_rank) {
    return {.status = absl::OkStatus(),
            .deficit = LaunchDeficit{},
            .iteration = pending.own.iteration,
            .alike = ControlChannel::told_alike(pending)};
  }
  StatusComparison comparison = {.status = check_statuses(*by_rank),
                                 .deficit = LaunchDeficit{}};
  for (const RankStatus& rank_status : *by_rank) {
    comparison.iteration =
        std::max(comparison.iteration, rank_status.iteration);
  }
  if (!comparison.status.ok()) {
    comparison.deficit = launch_deficit(*by_rank, group_->getRank());
    comparison.opening = lacked_opening(*by_rank, group_->getRank());
  }
  comparison.by_rank = *std::move(by_rank);
  return comparison;
}

bool PeerStatus::is_over(const PendingExchange& pending) const {
  return !channel_ || ControlChannel::is_over(pending);
}

StatusComparison PeerStatus::without_channel(const RankStatus& own) const {
  StatusComparison comparison = {.status = absl::OkStatus(),
                                 .deficit = LaunchDeficit{},
                                 .iteration = own.iteration,
                                 .alike = ToldAlike()};
  if (own.kind != StatusKind::kFailed) return comparison;
  comparison.status = absl::AbortedError(describe_status(own));
  if (group_->getSize() > 1) {
    comparison.deficit = absl::FailedPreconditionError(
        "There is no control channel that would tell the other ranks, so that "
        "the group's connections are closed.\nMake a new group.");
  }
  return comparison;
}

bool PeerStatus::has_gone_on() {
  return std::ranges::any_of(accounts_, [](GroupAccount& account) {
    return account.foreign().value_or(0) != account.opening().num_collectives;
  });
}

void PeerStatus::compare_others(bool value) {
  for (GroupAccount& account : accounts_) account.compare_others(value);
}

void PeerStatus::restart_counts() {
  for (GroupAccount& account : accounts_) account.restart();
}

void PeerStatus::tell_of_abort(RankStatus own) noexcept {
  restart_counts();
  for (GroupCounts& counts : own.by_group) counts.launches = kAbortedGroup;
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
