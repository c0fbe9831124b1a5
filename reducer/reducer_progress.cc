// What a reducer tells of itself while others wait for it.

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/reducer/reducer.h"

namespace brigade {

// Called on another thread; never waits for the lock, which a reducer that
// waits for its peers holds.
std::string Reducer::describe_progress() const {
  const Progress& progress = *observations_.progress;
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) {
    const std::string how_far =
        absl::StrCat("has launched ", progress.launched.load(), " of ",
                     progress.num_buckets.load(), " buckets of iteration ",
                     progress.iteration.load());
    return progress.is_waiting()
               ? absl::StrCat(how_far, " and waits for its peers")
               : absl::StrCat(how_far, " and is inside a hook");
  }
  if (!iteration_) {
    return absl::StrCat("has prepared nothing since iteration ",
                        observations_.prepared);
  }
  if (iteration_->phase == Phase::kPrepared) {
    return absl::StrCat("has prepared iteration ", iteration_->iteration,
                        ", whose backward has reached no parameter");
  }
  const std::vector<size_t> missing = iteration_->order.missing();
  std::string words = absl::StrCat(
      "has launched ", iteration_->launches.size(), " of ",
      bound_.buckets.size(), " buckets of iteration ", iteration_->iteration);
  if (!missing.empty()) {
    absl::StrAppend(&words, " and waits for the gradients of ",
                    table_.name_of(missing));
  }
  return words;
}

}  // namespace brigade
