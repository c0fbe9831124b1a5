#include "brigade/reducer/failure_channel.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/group_timeout.h"

namespace brigade {
namespace {

using std::chrono::milliseconds;

// Survivors learn of a death within milliseconds of each other on one host.
constexpr milliseconds kAnswerPatience{3000};

// How many reducers this rank has made on the group, itself included.
int64_t count_reducer(c10d::Store& store, int rank) {
  return store.add(absl::StrCat("brigade/num_reducers/", rank), 1);
}

}  // namespace

FailureChannel::FailureChannel(c10::intrusive_ptr<c10d::ProcessGroup> group)
    : group_(std::move(group)) {
  const c10::intrusive_ptr<c10d::Store> store = group_->getStore();
  if (store && group_->getSize() > 1) {
    prefix_ = absl::StrCat("brigade/reducer_",
                           count_reducer(*store, group_->getRank()), "/");
  }
}

void FailureChannel::announce(int64_t iteration, size_t num_launched) {
  if (prefix_.empty()) return;
  call_roll(group_, abandoned_key(iteration),
            static_cast<int64_t>(num_launched), milliseconds{0});
}

void FailureChannel::require_realignment(int64_t iteration,
                                         size_t num_launched) {
  abandoned_ = {.iteration = iteration, .num_launched = num_launched};
  announce(iteration, num_launched);
}

FailureChannel::LaunchRange FailureChannel::agree_on_launches() {
  const auto [iteration, num_launched] = *abandoned_;
  if (prefix_.empty()) return {.begin = num_launched, .end = num_launched};
  const RollCall roll =
      call_roll(group_, abandoned_key(iteration),
                static_cast<int64_t>(num_launched), group_timeout(*group_));
  size_t end = num_launched;
  for (const std::optional<int64_t>& answer : roll.answers) {
    if (!answer.has_value()) {
      C10_THROW_ERROR(
          DistBackendError,
          absl::StrCat(
              "Reducer: rank ", group_->getRank(), " gave up iteration ",
              iteration, " after ", num_launched,
              " launched buckets, its peers did not: ", roll.describe(),
              ".\nThey wait for the rest of its buckets; make a new "
              "process group on all ranks."));
    }
    end = std::max(end, static_cast<size_t>(*answer));
  }
  return {.begin = num_launched, .end = end};
}

std::optional<RollCall> FailureChannel::call_survivors(
    const std::string& occasion) {
  if (prefix_.empty()) return std::nullopt;
  return call_roll(group_, absl::StrCat(prefix_, "failed/", occasion), 1,
                   kAnswerPatience);
}

std::string FailureChannel::abandoned_key(int64_t iteration) const {
  return absl::StrCat(prefix_, "abandoned/", iteration);
}

}  // namespace brigade
