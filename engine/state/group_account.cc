#include "brigade/engine/state/group_account.h"

#include <c10/util/hash.h>

#include <utility>

#include "brigade/comm/collective_count.h"

namespace brigade {

GroupAccount::GroupAccount(c10::intrusive_ptr<c10d::ProcessGroup> group,
                           bool is_compared)
    : group_(std::move(group)),
      is_compared_(is_compared),
      group_counts_(is_compared) {}

std::optional<int64_t> GroupAccount::group_count() {
  if (!group_counts_) return std::nullopt;
  const std::optional<int64_t> count = count_collectives(*group_);
  group_counts_ = count.has_value();  // not to be asked again: slow
  return count;
}

std::optional<int64_t> GroupAccount::foreign() {
  if (!counted_from_) return std::nullopt;
  const std::optional<int64_t> count = group_count();
  if (!count) return std::nullopt;
  return *count - *counted_from_;
}

GroupAccount::Told GroupAccount::take() {
  Told told = {.counts = {.launches = std::exchange(launches_, 0)},
               .opening = std::exchange(opening_, {})};
  const uint64_t others = std::exchange(others_, 0);
  // One launch has but one order.
  if (told.counts.launches > 1) told.others = others;
  last_count_.reset();
  if (const std::optional<int64_t> count = foreign()) {
    told.counts.foreign = static_cast<int32_t>(*count);
    *counted_from_ += *count;
  }
  return told;
}

void GroupAccount::restart() {
  take();
  counted_from_ = group_count();
}

// Nothing before the first launch counts: forwards may be unequally many.
void GroupAccount::note_others(std::optional<int64_t> count) {
  if (count && last_count_) add_to_digest(*count - *last_count_);
}

void GroupAccount::add_to_digest(int64_t num_collectives) {
  if (!compares_others_) return;
  others_ = c10::hash_combine(others_, num_collectives + 1);
}

}  // namespace brigade
