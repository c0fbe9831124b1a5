#include "brigade/engine/state/peer_status.h"

#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <exception>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/has_peers.h"

namespace brigade {

void throw_if_apart(const StatusComparison& comparison,
                    const std::string& name) {
  if (comparison.status.ok()) return;
  std::string text(comparison.status.message());
  if (comparison.must_close) {
    absl::StrAppend(&text,
                    "\nThe process group can't be used any more.\nMake a new "
                    "process group on all ranks.");
  }
  if (absl::IsAborted(comparison.status)) {
    throw_peer_error(name, std::make_exception_ptr(std::runtime_error(text)));
  }
  TORCH_CHECK(false, name, ": ", text);
}

PeerStatus::PeerStatus(
    std::span<const c10::intrusive_ptr<c10d::ProcessGroup>> groups,
    bool has_channel, bool owns_groups)
    : group_(groups.front()), has_channel_(has_channel) {
  TORCH_CHECK_VALUE(groups.size() <= kMaxGroups, "expected at most ",
                    kMaxGroups, " process groups, got ", groups.size(),
                    ".\nUse one for several of them.");
  const bool is_compared = has_channel && has_peers(*group_);
  for (const auto& group : groups) {
    accounts_.emplace_back(group, is_compared, /*is_shared=*/!owns_groups);
  }
}

void PeerStatus::connect() {
  if (is_connected()) return;
  channel_ = std::make_unique<StatusChannel>(group_, identity_);
}

void PeerStatus::connect_later() {
  identity_ = ChannelIdentity::made_alone(group_);
}

void PeerStatus::backward_begins() {
  for (GroupAccount& account : accounts_) account.begin();
}

void PeerStatus::compare_others(bool value) {
  for (GroupAccount& account : accounts_) account.compare_others(value);
}

bool PeerStatus::can_continue() const {
  return std::ranges::none_of(accounts_, &GroupAccount::cannot_continue);
}

void PeerStatus::set_cannot_continue() {
  for (GroupAccount& account : accounts_) account.set_cannot_continue();
}

RankStatus PeerStatus::send(RankStatus own, bool ends_iteration) {
  for (GroupAccount& account : accounts_) {
    if (account.cannot_continue()) own.cannot_continue = 1;
    if (ends_iteration) {
      if (const uint64_t others = account.end()) {
        own.others = c10::hash_combine(own.others, others);
      }
    }
    if (account.has_others()) own.has_others = 1;
  }
  return channel_ ? channel_->exchange(own) : own;
}

StatusComparison PeerStatus::await(
    const RankStatus& sent, std::optional<std::chrono::milliseconds> patience) {
  if (!channel_) return without_channel(sent);
  StatusComparison comparison = {.by_rank = channel_->await(sent, patience)};
  comparison.status = check_statuses(comparison.by_rank);
  comparison.must_close =
      !comparison.status.ok() && must_close_groups(comparison.by_rank);
  comparison.alike = comparison.status.ok()
                         ? told_alike(comparison.by_rank)
                         : ToldAlike{.proposals = false, .orders = false};
  return comparison;
}

StatusComparison PeerStatus::without_channel(const RankStatus& own) const {
  if (own.kind != StatusKind::kFailed) return {};
  return {.status = absl::AbortedError(describe_status(own)),
          .must_close = group_->getSize() > 1,
          .alike = {.proposals = false, .orders = false}};
}

bool PeerStatus::is_complete(const RankStatus& sent) const {
  return !channel_ || channel_->is_complete(sent);
}

void PeerStatus::note_closed(std::string_view reason) {
  if (closed_because_.empty()) closed_because_ = reason;
}

void PeerStatus::require_open(const std::string& name) const {
  if (!is_closed()) return;
  throw_peer_error(
      absl::StrCat(name,
                   ": expected a process group that can be used, found "
                   "one that was closed"),
      std::make_exception_ptr(std::runtime_error(absl::StrCat(
          closed_because_, "\nMake a new process group on all ranks."))));
}

std::optional<LivenessProbe> PeerStatus::find_survivors(
    const std::string& occasion) {
  if (!channel_) return std::nullopt;
  return channel_->find_survivors(occasion);
}

}  // namespace brigade
