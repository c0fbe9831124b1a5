// Makes units whole when they are needed, and takes their memory back.
//
// Launches what schedule/gather_schedule.h says. A unit that is whole already
// is gathered into memory that nobody reads, for the peers' sake.
//
// On devices with streams all is launched on the gathers' stream, behind who
// had the memory before, and each stream that needs a unit waits for its
// gather. Streams that use a unit are remembered until it is released.
//
// Units that stay in slices behind forward are gathered from these in the next
// backward, as often as it expects them.
//
// Thread safety: none; one pass at a time, and needs from one thread at a time.

#ifndef BRIGADE_FSDP_UNITS_UNIT_GATHERS_H_
#define BRIGADE_FSDP_UNITS_UNIT_GATHERS_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "brigade/engine/observing/progress.h"
#include "brigade/fsdp/memory/memory_pool.h"
#include "brigade/fsdp/schedule/gather_schedule.h"
#include "brigade/fsdp/schedule/memory_uses.h"
#include "brigade/fsdp/streams/stream_point.h"
#include "brigade/fsdp/streams/stream_uses.h"
#include "brigade/fsdp/transport/shard_transport.h"
#include "brigade/fsdp/units/gather_recorder.h"
#include "brigade/fsdp/units/kept_slices.h"
#include "brigade/fsdp/units/mesh_transports.h"
#include "brigade/fsdp/units/unit.h"

namespace brigade {

class UnitGathers {
 public:
  // REQUIRES: all outlive this object.
  UnitGathers(std::vector<Unit>& units, MeshTransports& transports,
              MemoryPool& pool, size_t depth);

  // Memory that collectives in flight write to is kept for ever.
  ~UnitGathers();
  UnitGathers(const UnitGathers&) = delete;
  UnitGathers& operator=(const UnitGathers&) = delete;

  // A pass begins; what an earlier one has left is released. `pass`: whose
  // planned memory its gathers get. Errors: as need().
  void begin(std::vector<size_t> expected,
             GatheredIn pass = GatheredIn::kOther);
  // What the last pass has gathered and nobody here has needed; begin() does it
  // too.
  void release_unneeded();

  // The calling thread's current stream has written the shards. Gathers that
  // are launched from here on are behind it.
  void shards_are_written();

  // Returns when `unit` is whole, for the calling thread and its current
  // stream. `ahead`: of GatherSchedule::needs(). `ask` is called where the unit
  // is not expected, and makes all ranks give() it, or throws.
  // Errors: what a gather fails with.
  void need(size_t unit, std::span<const size_t> ahead,
            const std::function<void()>& ask);

  // The same, but that it does not wait: need() does. Whole parameters read
  // what is being written until then.
  void request(size_t unit, std::span<const size_t> ahead,
               const std::function<void()>& ask);

  // Gathers units that some ranks need and none expects; of these this rank
  // needs `wanted`, or -1. The same units on all ranks, where all are behind
  // what their passes expect.
  void give(std::span<const int64_t> units, int64_t wanted);
  // Of how often each unit's shards were written since the pass began. Where
  // ranks began with the same, and this is equal, they give the same.
  uint64_t digest_of_writes() const;

  // The calling thread's current stream is behind some use of the unit.
  void record_use(size_t unit) { uses_[unit].note(); }
  // These streams of the root's device are.
  void record_uses(size_t unit, std::span<const c10::Stream> streams) {
    for (const c10::Stream& stream : streams) uses_[unit].note(stream);
  }

  // The unit, if it is there, stays in slices on `num_ranks` neighbours: called
  // on all ranks before a pass ends. Errors: as need().
  void keep_slices(size_t unit, int num_ranks);
  // On all ranks: no backward is to come to the unit.
  void drop_slices_of(size_t unit) { slices_.drop(unit); }
  // As after a failure, of which all ranks know.
  void drop_slices();
  // By unit: on how many neighbours it is in slices; 0: on none. Equal on all
  // ranks where a pass begins.
  std::vector<int> in_slices() const { return slices_.holders(); }

  // Sharded again. Nothing if it is sharded. Waits for a gather in flight. Who
  // gets the memory is behind the streams that have used it.
  void release(size_t unit);

  // Launches what the pass expects up to the next gather of `unit`.
  void launch_through(size_t unit) {
    launch_all(schedule_.launch_through(unit));
  }

  // Launches the next of what is left of the pass.
  void launch_next() { launch_all(schedule_.next()); }

  // Launches what is left of the pass, and does not wait for it.
  void launch_expected() { launch_all(schedule_.rest()); }

  // The same. But the calling thread's current stream, on which shards may be
  // written from here on, is behind what gathers read of them. May be called
  // again.
  void launch_rest();

  // It is whole, and of what its shards hold now.
  bool is_current(size_t unit) const;
  bool is_claimed(size_t unit) const { return schedule_.is_claimed(unit); }

  // Waits for peers are noted there from here on.
  void note_waits_in(std::shared_ptr<Progress> progress) {
    progress_ = std::move(progress);
  }
  // "; its last gather was that of unit 'a'", for who asks what this rank does;
  // empty: there was none. Any thread.
  std::string describe_last() const;

  GatherRecorder& recorder() { return recorder_; }
  const GatherRecorder& recorder() const { return recorder_; }

  const GatherSchedule& schedule() const { return schedule_; }
  int64_t num_near() const { return num_near_; }  // gathers among neighbours

 private:
  using FuturePtr = ShardTransport::FuturePtr;
  struct Gather {
    Buffer buffer;
    int64_t version = 0;  // of the shard
    int64_t num_possible_steps = 0;
    int num_ranks = 0;     // that gather it
    FuturePtr future;      // null: it is there, for any stream
    bool is_read = false;  // whoever has used it has waited for it
    std::optional<std::pair<size_t, size_t>> kept_by = std::nullopt;  // own_
  };

  void launch_all(const std::vector<size_t>& units);
  void launch(size_t unit);
  void launch_into(std::vector<Gather>& gathers, size_t unit, GatheredIn pass);
  Buffer memory_for(const Gather& gather, const Segment& segment,
                    GatheredIn pass);
  FuturePtr gather(size_t unit, size_t segment, const at::Tensor& whole);
  FuturePtr gather_near(size_t unit, size_t segment, const at::Tensor& whole);
  [[noreturn]] void throw_lost(size_t unit, const Gather& gather) const;
  void bind(size_t unit);
  void join(size_t unit);
  void wait_for(size_t unit, c10::ivalue::Future& future);
  void reclaim_unread();
  void reclaim_unread(Gather gather);
  void reclaim(Gather gather, StreamPoint last_use);
  void release_own_unless_kept();

  std::vector<Unit>& units_;
  MeshTransports& transports_;
  const ShardingStreams& streams_;
  MemoryPool& pool_;
  GatherSchedule schedule_;
  GatheredIn pass_ = GatheredIn::kOther;
  std::vector<int64_t> versions_;  // by unit, where it began

  // By unit, then by segment. Bound when they are needed.
  std::vector<std::vector<Gather>> gathers_;
  std::vector<Gather> unread_;  // for the peers' sake
  // By unit that keeps_storage, then by segment: while it is sharded.
  std::vector<std::vector<Buffer>> own_;
  std::vector<StreamUses> uses_;  // of whole units
  KeptSlices slices_;
  std::vector<int> num_from_slices_;  // gathers that this pass is to launch
  int64_t num_near_ = 0;
  GatherRecorder recorder_;
  std::vector<std::string> gather_names_;  // by unit: "the gather of unit 'a'"
  std::shared_ptr<Progress> progress_;     // null: not yet
  std::atomic<int64_t> last_launched_ = -1;  // a unit; read by any thread
  StreamUses shard_writers_;
  bool reads_shards_ = false;  // since somebody waited for that
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_UNITS_UNIT_GATHERS_H_
