// The memory of whole gradients: taken by a unit with its first gradient, and
// given back behind its reduction.
//
// So many reductions keep memory at once: whoever needs some then waits for the
// oldest, so that a backward that is faster than the network does not pile up
// gradients. What waits for its turn to be launched is not waited for. Nor is
// anything for long: a peer whose program takes another branch may launch its
// part only when this rank has gone on, so there is more memory then.
//
// On devices with streams a reduction counts as over for the host when it is
// launched: whoever gets its memory is behind it by that memory's point, and
// the host does not wait. There some sums may not be waited for before more is
// gathered (schedule/gather_waits.h): until then there is more memory, too.
//
// Thread safety: none; one backward at a time.

#ifndef BRIGADE_FSDP_MEMORY_GRADIENT_MEMORY_H_
#define BRIGADE_FSDP_MEMORY_GRADIENT_MEMORY_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "brigade/fsdp/memory/memory_pool.h"
#include "brigade/fsdp/schedule/memory_uses.h"
#include "brigade/fsdp/streams/sharding_streams.h"
#include "brigade/fsdp/streams/stream_point.h"

namespace brigade {

class GradientMemory {
 public:
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

  // `max_reducing`: at least 1. REQUIRES: both outlive this object.
  GradientMemory(MemoryPool& pool, const ShardingStreams& streams,
                 size_t max_reducing)
      : pool_(pool), streams_(streams), max_reducing_(max_reducing) {}
  // Memory of reductions that are not over is dropped.
  ~GradientMemory();
  GradientMemory(const GradientMemory&) = delete;
  GradientMemory& operator=(const GradientMemory&) = delete;

  // At least 1.
  void set_max_reducing(size_t value) { max_reducing_ = value; }
  size_t max_reducing() const { return max_reducing_; }

  // A backward begins: `num_lendable()`, asked whenever memory is, says how
  // many of its first reductions may be waited for now; of those before, all
  // may. Unset: any number.
  void begin_backward(std::function<size_t()> num_lendable);
  // Since the backward began.
  size_t num_launched() const { return num_launched_; }

  // uint8, at least [bytes]. `use`: of MemoryPool::acquire().
  Buffer acquire(int64_t bytes, std::optional<MemoryUse> use = std::nullopt);

  // No reduction reads it. Without memory: nothing.
  void release(Buffer buffer);

  // When the reduction that reads it is done.
  void release_behind(Buffer buffer, FuturePtr reduction);

  // REQUIRES: all reductions are over. Whoever gets their memory is behind
  // them.
  void reclaim_all() { reclaim(0); }

  // Reductions may never end. Returns what they read, which is not lent again.
  std::vector<at::Tensor> abandon();

 private:
  struct Reducing {
    Buffer buffer;
    FuturePtr reduction;
  };

  void reclaim(size_t max_left);
  void end_uses(size_t max_left);
  bool may_wait_for_oldest_of(size_t num_reductions) const;
  void give_back(Reducing reducing);
  bool is_over(const Reducing& oldest, size_t max_left);
  StreamPoint end_of(c10::ivalue::Future& reduction) const;

  MemoryPool& pool_;
  const ShardingStreams& streams_;
  size_t max_reducing_;
  std::deque<Reducing> reducing_;  // in the order of their launches
  // Uses of their memory, for the record: they end where a network that takes
  // as long as it may lets it go, so that steps are alike.
  std::deque<std::optional<size_t>> uses_;
  bool waits_ = true;  // false: was in vain since all were done

  std::function<size_t()> num_lendable_;
  size_t num_launched_ = 0;  // since the backward began
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_MEMORY_GRADIENT_MEMORY_H_
