#include "brigade/fsdp/schedule/gather_waits.h"

#include <algorithm>
#include <unordered_map>

namespace brigade {
namespace {

// Where the first sum is of any unit that is still to be gathered: no sum from
// there on has been launched before the need of that gather.
std::vector<size_t> first_open_sums(std::span<const size_t> gathers,
                                    std::span<const size_t> sums) {
  std::unordered_map<size_t, size_t> first;  // by unit
  for (size_t i = 0; i < sums.size(); ++i) first.try_emplace(sums[i], i);
  std::vector<size_t> open(gathers.size());
  size_t least = sums.size();
  for (size_t i = gathers.size(); i-- > 0;) {
    const auto found = first.find(gathers[i]);
    if (found != first.end()) least = std::min(least, found->second);
    open[i] = least;
  }
  return open;
}

}  // namespace

// A gather is launched so many needs ahead, but not while its unit is there
// from an earlier one, behind which the next need is.
GatherWaits::GatherWaits(std::span<const size_t> gathers,
                         std::span<const size_t> sums, size_t prefetch_depth,
                         size_t max_reducing)
    : sums_before_(gathers.size()) {
  const std::vector<size_t> open = first_open_sums(gathers, sums);
  std::unordered_map<size_t, size_t> last;  // place, by unit
  size_t earliest = 0;                      // need that it is launched with
  for (size_t i = 0; i < gathers.size(); ++i) {
    if (const auto found = last.find(gathers[i]); found != last.end()) {
      earliest = std::max(earliest, found->second + 1);
    }
    last[gathers[i]] = i;
    if (i < prefetch_depth && earliest == 0) continue;  // as backward begins
    const size_t need =
        std::max(earliest, i > prefetch_depth ? i - prefetch_depth : 0);
    const size_t num_launched = open[std::min(need, i)];
    sums_before_[i] = num_launched - std::min(num_launched, max_reducing - 1);
  }
}

size_t GatherWaits::sums_before(size_t gather) const {
  if (sums_before_.empty()) return 0;
  return sums_before_[std::min(gather, sums_before_.size() - 1)];
}

}  // namespace brigade
