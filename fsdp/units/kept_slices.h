// What ranks keep of units from forward to backward, where a few neighbours
// hold all of one together: backward gathers among these.
//
// Of n neighbours each keeps the slice of the whole unit that is at its place
// among them, in the dtype of the whole. It is of one version of the shards,
// and of no use for another.
//
// On devices with streams slices are written and read on the gathers' stream
// alone.
//
// Thread safety: none.

#ifndef BRIGADE_FSDP_UNITS_KEPT_SLICES_H_
#define BRIGADE_FSDP_UNITS_KEPT_SLICES_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "brigade/fsdp/memory/memory_pool.h"
#include "brigade/fsdp/streams/sharding_streams.h"
#include "brigade/fsdp/units/unit.h"

namespace brigade {

class KeptSlices {
 public:
  // REQUIRES: all outlive this object.
  KeptSlices(const std::vector<Unit>& units, const ShardingStreams& streams,
             MemoryPool& pool);
  ~KeptSlices();
  KeptSlices(const KeptSlices&) = delete;
  KeptSlices& operator=(const KeptSlices&) = delete;

  // Keeps this rank's slice of what is whole of `version`, as one of
  // `num_ranks` neighbours; nothing if that is kept. `memory`: of the whole, by
  // segment. REQUIRES: the gathers' stream is behind who wrote it.
  void keep(size_t unit, int num_ranks, int64_t version,
            std::span<const at::Tensor> memory);

  // By unit: how many neighbours hold it as its shards are now; 0: none do.
  std::vector<int> holders() const;

  // `whole` of that segment gets the slice, in its place. REQUIRES: the
  // gathers' stream is the current one.
  void write_to(const at::Tensor& whole, size_t unit, size_t segment) const;

  int num_ranks(size_t unit) const { return kept_[unit].num_ranks; }

  // Gives the memory back.
  void drop(size_t unit);
  void drop_outdated();
  void drop_all();

 private:
  struct Kept {
    int num_ranks = 0;                // 0: nothing is kept
    int64_t version = 0;              // the sum of the segments'
    std::vector<Buffer> slices = {};  // by segment
  };

  at::Tensor part_of(const at::Tensor& whole, size_t unit, size_t segment,
                     int num_ranks) const;

  const std::vector<Unit>& units_;
  const ShardingStreams& streams_;
  MemoryPool& pool_;
  std::vector<Kept> kept_;  // by unit
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_UNITS_KEPT_SLICES_H_
