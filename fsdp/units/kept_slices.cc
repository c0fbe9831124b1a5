#include "brigade/fsdp/units/kept_slices.h"

#include <ATen/core/grad_mode.h>

#include <utility>

namespace brigade {

KeptSlices::KeptSlices(const std::vector<Unit>& units,
                       const ShardingStreams& streams, MemoryPool& pool)
    : units_(units), streams_(streams), pool_(pool), kept_(units.size()) {}

KeptSlices::~KeptSlices() { drop_all(); }

void KeptSlices::keep(size_t unit, int num_ranks, int64_t version,
                      std::span<const at::Tensor> memory) {
  Kept& kept = kept_[unit];
  if (kept.num_ranks == num_ranks && kept.version == version) return;
  drop(unit);
  const at::NoGradGuard no_grad;
  const ShardingStreams::Scope on_gathers = streams_.for_gathers();
  for (size_t i = 0; i < memory.size(); ++i) {
    const Segment& segment = *units_[unit].segments[i];
    const int64_t bytes = segment.whole_bytes() / num_ranks;
    Buffer slice = pool_.acquire(bytes, segment.use_for(Purpose::kSlice));
    slice.last_use.wait();
    slice.memory.narrow(0, 0, bytes)
        .view(segment.whole_dtype())
        .copy_(part_of(segment.whole_in(memory[i]), unit, i, num_ranks));
    kept.slices.push_back(std::move(slice));
  }
  kept.num_ranks = num_ranks;
  kept.version = version;
}

std::vector<int> KeptSlices::holders() const {
  std::vector<int> holders(kept_.size());
  for (size_t unit = 0; unit < kept_.size(); ++unit) {
    if (kept_[unit].version == version_of(units_[unit])) {
      holders[unit] = kept_[unit].num_ranks;
    }
  }
  return holders;
}

void KeptSlices::write_to(const at::Tensor& whole, size_t unit,
                          size_t segment) const {
  const at::NoGradGuard no_grad;
  const Kept& kept = kept_[unit];
  const at::Tensor part = part_of(whole, unit, segment, kept.num_ranks);
  const at::Tensor& slice = kept.slices[segment].memory;
  part.copy_(slice.narrow(0, 0, part.nbytes()).view(whole.scalar_type()));
}

at::Tensor KeptSlices::part_of(const at::Tensor& whole, size_t unit,
                               size_t segment, int num_ranks) const {
  const int64_t numel = whole.numel() / num_ranks;
  const int place = units_[unit].segments[segment]->rank() % num_ranks;
  return whole.narrow(0, place * numel, numel);
}

void KeptSlices::drop(size_t unit) {
  Kept dropped = std::exchange(kept_[unit], {});
  if (dropped.num_ranks == 0) return;
  const ShardingStreams::Scope on_gathers = streams_.for_gathers();
  const StreamPoint last_use = StreamPoint::now(pool_.device());
  for (Buffer& slice : dropped.slices) {
    slice.last_use = last_use;
    pool_.release(std::move(slice));
  }
}

void KeptSlices::drop_outdated() {
  const std::vector<int> now = holders();
  for (size_t unit = 0; unit < kept_.size(); ++unit) {
    if (now[unit] == 0) drop(unit);
  }
}

void KeptSlices::drop_all() {
  for (size_t unit = 0; unit < kept_.size(); ++unit) drop(unit);
}

}  // namespace brigade
