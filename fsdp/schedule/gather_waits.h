// Which sums the gathers of a backward may be behind, on devices with streams.
//
// Memory is limited, so what is computed waits for the sum whose memory it
// gets, and a gather for a computation whose memory it gets. No host waits for
// either, and none can call a wait off. A sum is launched when this rank's
// gradients are there, which may take units that are to be gathered; so if a
// peer's gather of one of these is behind that sum, both wait for ever.
//
// Hence one order of gathers and sums, alike on all ranks: of the sums only the
// first so many come before a gather. Each rank
//
//   - computes behind these alone until it has launched the gather;
//   - has launched these before it waits for the gather, or asks all ranks
//     whether they are where it is.
//
// Then whatever waits, on any rank, waits for what comes before in that order.
// The number for each gather is the largest that a rank which does what was
// expected may come to, so that it never has to ask; nor does it take more
// memory, where it launches as far ahead as the depth says.
//
// Example: units 3, 2, 1 and 0 are gathered, and then summed, in this order,
// without prefetching; two sums may have their memory.
//
//   waits.sums_before(3);  // of unit 0: 2, those of units 3 and 2
//
// Thread safety: immutable; any thread may read.

#ifndef BRIGADE_FSDP_SCHEDULE_GATHER_WAITS_H_
#define BRIGADE_FSDP_SCHEDULE_GATHER_WAITS_H_

#include <cstddef>
#include <limits>
#include <span>
#include <vector>

namespace brigade {

class GatherWaits {
 public:
  // No gathers.
  GatherWaits() = default;

  // `gathers`: units, in the order of their launches; `sums`: whose each is, in
  // the order of theirs. `prefetch_depth`, `max_reducing`: of ShardingOptions.
  GatherWaits(std::span<const size_t> gathers, std::span<const size_t> sums,
              size_t prefetch_depth, size_t max_reducing);

  // By its place; behind all gathers: as for the last one.
  size_t sums_before(size_t gather) const;

  // How many of the sums may be waited for by whoever has launched so many
  // gathers.
  size_t num_lendable(size_t num_gathers_launched) const {
    return num_gathers_launched < sums_before_.size()
               ? sums_before_[num_gathers_launched]
               : std::numeric_limits<size_t>::max();
  }

 private:
  std::vector<size_t> sums_before_;  // by gather; never less than before
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_SCHEDULE_GATHER_WAITS_H_
