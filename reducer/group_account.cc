#include "brigade/reducer/group_account.h"

#include <c10/util/hash.h>

#include <utility>

#include "brigade/comm/ordered/host_sums.h"

namespace brigade {

GroupAccount::GroupAccount(c10::intrusive_ptr<c10d::ProcessGroup> group,
                           bool is_compared)
    : group_(std::move(group)), group_counts_(is_compared) {}

std::optional<int64_t> GroupAccount::group_count() {
  if (!group_counts_) return std::nullopt;
  const std::optional<int64_t> count = count_collectives(*group_);
  group_counts_ = count.has_value();  // not to be asked again: slow
  return count;
}

void GroupAccount::begin() {
  last_count_ = group_count();
  num_launches_ = 0;
  has_others_ = false;
  hash_ = 0;
}

uint64_t GroupAccount::end() {
  // What continuations have launched by now depends on timing.
  if (last_count_) note_if_others(group_count());
  last_count_.reset();
  const uint64_t hash = std::exchange(hash_, 0);
  return std::exchange(num_launches_, 0) > 1 ? hash : 0;  // one has one order
}

// Before the first launch nothing is compared: forwards may differ in number.
void GroupAccount::note_others(std::optional<int64_t> count) {
  if (!count || !last_count_) return;
  note_if_others(count);
  if (num_launches_ > 0) add_to_hash(*count - *last_count_);
}

void GroupAccount::note_if_others(std::optional<int64_t> count) {
  has_others_ |= count && *count != *last_count_;
}

void GroupAccount::add_to_hash(int64_t num_collectives) {
  if (!compares_others_) return;
  hash_ = c10::hash_combine(hash_, num_collectives + 1);
}

}  // namespace brigade
