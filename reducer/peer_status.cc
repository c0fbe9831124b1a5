#include "brigade/reducer/peer_status.h"

#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include <exception>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/group_info.h"
#include "brigade/comm/ordered/host_sums.h"
#include "brigade/comm/process_group.h"

namespace brigade {

void throw_unless_agreed(const StatusComparison& comparison,
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

PeerStatus::PeerStatus(c10::intrusive_ptr<c10d::ProcessGroup> group)
    : group_(std::move(group)), group_counts_(has_peers(*group_)) {}

std::optional<int64_t> PeerStatus::group_count() {
  if (!group_counts_) return std::nullopt;
  const std::optional<int64_t> count = count_collectives(*group_);
  group_counts_ = count.has_value();  // asking again would be slow
  return count;
}

void PeerStatus::backward_begins() {
  last_count_ = group_count();
  num_launches_ = 0;
  has_others_ = false;
  hash_ = 0;
}

// Returns 0 if there is nothing to compare.
uint64_t PeerStatus::hash_of_others() {
  // Not hashed: the number of launches by continuations depends on timing.
  if (last_count_) note_if_others(group_count());
  last_count_.reset();
  const uint64_t hash = std::exchange(hash_, 0);
  // A single launch may count the launches of its own continuation.
  const bool has_order = std::exchange(num_launches_, 0) > 1;
  return has_order ? hash : 0;
}

// Hashes nothing before the first launch: ranks may run different numbers of
// forwards.
void PeerStatus::note_others(std::optional<int64_t> count) {
  if (!count || !last_count_) return;
  note_if_others(count);
  if (num_launches_ > 0) add_to_hash(*count - *last_count_);
}

void PeerStatus::note_if_others(std::optional<int64_t> count) {
  has_others_ |= count && *count != *last_count_;
}

void PeerStatus::add_to_hash(int64_t num_collectives) {
  if (!compares_others_) return;
  hash_ = c10::hash_combine(hash_, num_collectives + 1);
}

void PeerStatus::connect() {
  channel_ = std::make_unique<StatusChannel>(group_);
}

RankStatus PeerStatus::send(RankStatus own, bool ends_iteration) {
  if (cannot_continue_) own.cannot_continue = 1;
  if (ends_iteration) own.others = hash_of_others();
  if (has_others_) own.has_others = 1;
  return channel_ ? channel_->exchange(own) : own;
}

StatusComparison PeerStatus::await(
    const RankStatus& sent, std::optional<std::chrono::milliseconds> timeout) {
  StatusComparison comparison = {.by_rank = channel_->await(sent, timeout)};
  comparison.status = check_statuses(comparison.by_rank);
  comparison.must_close =
      !comparison.status.ok() && must_close_groups(comparison.by_rank);
  return comparison;
}

bool PeerStatus::is_complete(const RankStatus& sent) const {
  return channel_->is_complete(sent);
}

void PeerStatus::close(std::string_view reason) {
  note_closed(reason.empty() ? "A collective failed." : reason);
  close_group(*group_);
}

void PeerStatus::send_and_close(const RankStatus& last) {
  set_cannot_continue();
  try {
    send(last, /*ends_iteration=*/true);
  } catch (const std::exception&) {
    // Peers notice a failed channel themselves.
  }
  close(words_of(last.text));
}

void PeerStatus::note_closed(std::string_view reason) {
  if (closed_because_.empty()) closed_because_ = reason;
}

void PeerStatus::require_open() const {
  if (!is_closed()) return;
  throw_peer_error(
      "Reducer: expected an open process group, found one that was closed",
      std::make_exception_ptr(std::runtime_error(absl::StrCat(
          closed_because_, "\nMake a new process group on all ranks."))));
}

std::optional<LivenessProbe> PeerStatus::find_survivors(
    const std::string& key) {
  if (!channel_) return std::nullopt;
  return channel_->find_survivors(key);
}

}  // namespace brigade
