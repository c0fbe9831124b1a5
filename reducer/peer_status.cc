#include "brigade/reducer/peer_status.h"

#include <c10/util/Exception.h>

#include <exception>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/close_group.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/group_info.h"

namespace brigade {

void throw_if_apart(const StatusComparison& comparison,
                    const std::string& where) {
  if (comparison.status.ok()) return;
  std::string text(comparison.status.message());
  if (comparison.must_close) {
    absl::StrAppend(&text,
                    "\nThe process group can't be used any more.\nMake a new "
                    "process group on all ranks.");
  }
  if (absl::IsAborted(comparison.status)) {
    throw_peer_error(where, std::make_exception_ptr(std::runtime_error(text)));
  }
  TORCH_CHECK(false, where, ": ", text);
}

PeerStatus::PeerStatus(c10::intrusive_ptr<c10d::ProcessGroup> group,
                       bool has_channel)
    : group_(std::move(group)),
      has_channel_(has_channel),
      account_(group_, /*is_compared=*/has_channel && has_peers(*group_)) {}

void PeerStatus::connect() {
  if (is_connected()) return;
  channel_ = std::make_unique<StatusChannel>(group_, identity_);
}

void PeerStatus::connect_later() {
  identity_ = ChannelIdentity::made_alone(group_);
}

RankStatus PeerStatus::send(RankStatus own, bool ends_iteration) {
  if (account_.cannot_continue()) own.cannot_continue = 1;
  if (ends_iteration) own.others = account_.end();
  if (account_.has_others()) own.has_others = 1;
  return channel_ ? channel_->exchange(own) : own;
}

StatusComparison PeerStatus::await(
    const RankStatus& sent, std::optional<std::chrono::milliseconds> patience) {
  if (!channel_) return without_channel(sent);
  StatusComparison comparison = {.by_rank = channel_->await(sent, patience)};
  comparison.status = check_statuses(comparison.by_rank);
  comparison.must_close =
      !comparison.status.ok() && must_close_groups(comparison.by_rank);
  return comparison;
}

StatusComparison PeerStatus::without_channel(const RankStatus& own) const {
  if (own.kind != StatusKind::kFailed) return {};
  return {.status = absl::AbortedError(describe_status(own)),
          .must_close = group_->getSize() > 1};
}

bool PeerStatus::is_complete(const RankStatus& sent) const {
  return !channel_ || channel_->is_complete(sent);
}

void PeerStatus::close(std::string_view reason) {
  note_closed(reason.empty() ? "A collective failed." : reason);
  close_group(*group_);
}

void PeerStatus::leave(const RankStatus& last) {
  set_cannot_continue();
  try {
    send(last, /*ends_iteration=*/true);
  } catch (const std::exception&) {
    // The channel has failed as well, which peers notice by themselves.
  }
  close(words_of(last.text));
}

void PeerStatus::note_closed(std::string_view reason) {
  if (closed_because_.empty()) closed_because_ = reason;
}

void PeerStatus::require_open() const {
  if (!is_closed()) return;
  throw_peer_error(
      "Reducer: expected a process group that can be used, found one that was "
      "closed",
      std::make_exception_ptr(std::runtime_error(absl::StrCat(
          closed_because_, "\nMake a new process group on all ranks."))));
}

std::optional<LivenessProbe> PeerStatus::find_survivors(
    const std::string& occasion) {
  if (!channel_) return std::nullopt;
  return channel_->find_survivors(occasion);
}

}  // namespace brigade
