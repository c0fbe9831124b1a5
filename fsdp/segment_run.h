// One open segment: a forward or backward of a sharded model.
//
// Carries out the cursor's actions (fsdp/schedule.h), waits for the units that
// an operator needs, and takes part in rounds. Owns the reductions in flight;
// units own their buffers.
//
// Errors: an error of a launch is recorded, and thrown after the call's
// launches or by the next call. fail() then issues the remaining collectives on
// zeros, since peers wait for them.
//
// Thread safety: none; the model serializes calls.

#ifndef BRIGADE_FSDP_SEGMENT_RUN_H_
#define BRIGADE_FSDP_SEGMENT_RUN_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "brigade/fsdp/schedule.h"
#include "brigade/fsdp/segment_exchange.h"
#include "brigade/fsdp/sharded_unit.h"
#include "brigade/fsdp/unshard_buffers.h"
#include "brigade/observing/stall_watch.h"
#include "brigade/observing/timeline_recorder.h"

namespace brigade {

class SegmentRun {
 public:
  struct Model {  // outlives the run
    std::vector<ShardedUnit>& units;
    const ShardMeshes& meshes;
    UnshardBuffers& memory;
    SegmentExchange& exchange;
    Progress& progress;
    ShardingRecorder& recorder;
  };

  struct Plan {
    SegmentKind kind = SegmentKind::kForward;
    uint64_t tag = 0;
    std::set<uint64_t> tags = {};  // of ranks with data, if awaited
    bool has_grad = false;
    UnitRules rules = {};
    const RecordedSchedule* schedule = nullptr;  // null: learn
    std::vector<char> unsharded = {};            // by unit, at the start
    std::vector<uint32_t> expected = {};         // by unit: gradients
    bool has_slices = false;           // gather units from their slices, if any
    bool keeps_slices = false;         // keep slices of released units
    size_t max_reducing = 1;           // see ShardedModel::set_max_reducing()
    bool may_end_unconfirmed = false;  // do not await the last round
    int64_t buffer_bytes = 0;          // allocated at the start
  };

  SegmentRun(Model model, Plan plan);

  void begin();

  // Unshards and binds the units of one operator. Throws PeerError.
  void use(std::span<const size_t> units);

  // `is_reduced`: this segment reduces the unit.
  void accumulate(size_t unit, FlatShard& flat, size_t parameter,
                  const at::Tensor& gradient, bool is_reduced);
  void prepare_gradients(size_t unit);
  // Counts the unit's gradients of earlier backwards as one accumulation.
  void add_held_gradients(size_t unit);

  // Issues the rest of the schedule, and takes part in rounds until all ranks
  // have ended. The flat shards then hold their reduced gradients. `used`: by
  // parameter, has a gradient. `has_used_all`: all reduced parameters have one.
  // Throws PeerError.
  void finish(const std::vector<char>& used, bool has_used_all);
  // Replaces finish() after an error on this rank.
  void fail(const std::string& error) noexcept;

  // By parameter: has a gradient on any rank. REQUIRES: finish() returned.
  const std::vector<char>& used_anywhere() const { return used_anywhere_; }
  const SegmentCursor& cursor() const { return cursor_; }
  const Plan& plan() const { return plan_; }
  // A collective failed or a peer is lost; nothing more is launched.
  bool is_broken() const { return is_broken_; }

  // True once finish() has returned, equally on all ranks.
  bool has_finished() const { return has_finished_; }

  // Launches an all-gather outside the schedule, on all ranks.
  void all_gather(size_t unit);
  // Waits for the all-gather, and binds the unit's parameters.
  void wait_for(size_t unit);
  // Records the current exception, if it is the first. `context`: for failures
  // of a peer or the network.
  void record_error(const std::string& context = {});
  void throw_recorded_error();
  // Releases a unit's memory unless unshard() holds it.
  void release(size_t unit);
  void drop_gradients();  // of all units

 private:
  struct FlatReduction {
    FlatShard* flat;
    at::Tensor sum = {};
    ShardedUnit::FuturePtr future = {};
  };
  struct UnitReduction {
    size_t unit;
    Lease gradients = {};
    std::vector<FlatReduction> flats = {};
  };

  c10::Device device() const { return model_.meshes.streams().device(); }
  bool has_failed() const { return error_ != nullptr || !error_text_.empty(); }
  void perform_all(CursorActions& actions);
  void wait(const ShardedUnit::FuturePtr& future, const ShardedUnit& unit);
  void count_gradient(size_t unit);
  ShardedUnit::Gathered gather_into(size_t unit, Lease lease);
  void reduce(size_t unit);
  FlatReduction reduce_flat(const ShardedUnit& unit, FlatShard& flat);
  // Sets `launched` when the reduction is launched.
  ShardedUnit::FuturePtr launch_reduction(
      const ShardedUnit& unit, FlatShard& flat, const at::Tensor& gradients,
      const at::Tensor& sum,
      const std::shared_ptr<ShardedUnit::FuturePtr>& launched);
  void finish_oldest_reduction();
  void wait_for_reductions();
  RoundResult round(std::optional<size_t> need, CursorActions& actions);
  Lease acquire(int64_t bytes);
  void throw_failure_of_peers();
  void finish_all_gathers();

  Model model_;
  Plan plan_;
  SegmentCursor cursor_;
  StreamPoint shards_written_;  // until the first all-gather waits for it
  bool has_gathered_ = false;
  std::deque<UnitReduction> reducing_;
  std::vector<FlatReduction> reduced_;  // gradient memory is released
  // For peers only: this rank already holds the units.
  std::vector<ShardedUnit::Gathered> surplus_gathers_;
  std::exception_ptr error_;
  std::string error_text_;  // sent to the peers by fail()
  std::vector<char> used_;
  std::vector<char> used_anywhere_;
  bool is_over_ = false;
  bool has_finished_ = false;
  bool is_broken_ = false;
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_SEGMENT_RUN_H_
