// Carries out one segment: one forward or backward of a sharded model.
//
// Issues the cursor's actions (fsdp/schedule.h), waits for the units that an
// operator needs, and takes part in rounds. Owns the reductions under way;
// units own their buffers.
//
// Thread safety: none; the model serialises calls.

#ifndef BRIGADE_FSDP_SEGMENT_RUN_H_
#define BRIGADE_FSDP_SEGMENT_RUN_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "brigade/fsdp/schedule.h"
#include "brigade/fsdp/segment_exchange.h"
#include "brigade/fsdp/sharded_unit.h"
#include "brigade/fsdp/sharding_recorder.h"
#include "brigade/fsdp/unshard_buffers.h"
#include "brigade/observing/stall_watch.h"

namespace brigade {

class SegmentRun {
 public:
  // Parts of the model; all outlive the run.
  struct Model {
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
    bool has_grad = false;
    UnitRules rules = {};
    const RecordedSchedule* schedule = nullptr;  // null: learn
    std::vector<char> unsharded = {};            // by unit, at the start
    std::vector<uint32_t> expected = {};         // by unit, accumulations
    bool has_slices = false;  // all-gathers are among neighbours where it can
    bool keeps_slices = false;
    size_t max_reducing = 1;   // see ShardedModel::set_max_reducing()
    bool may_go_on = false;    // does not await the end of a recorded segment
    int64_t buffer_bytes = 0;  // of the model, at the start
  };

  SegmentRun(Model model, Plan plan);

  void begin();

  // One operator is about to use these units: they are unsharded and bound when
  // it returns. Throws PeerError if a rank has failed or is lost.
  void use(std::span<const size_t> units);

  // A gradient has come, in backward. `counts`: of a unit that this segment
  // reduces.
  void accumulate(size_t unit, FlatShard& flat, size_t parameter,
                  const at::Tensor& gradient, bool counts);
  // Acquires memory for the unit's gradients.
  void prepare_gradients(size_t unit);
  // Gradients of an earlier segment are to be reduced, too.
  void add_held_gradients(size_t unit);

  // Issues the rest and agrees with all ranks that the segment has ended.
  // `used`: by parameter of the model; `has_used_all`: of those that are
  // reduced. Afterwards flats have sums, unless it throws PeerError.
  void finish(const std::vector<char>& used, bool has_used_all);
  // In place of finish(), after an error on this rank. Does not throw.
  void fail(const std::string& error) noexcept;

  // After finish(): by parameter, used on any rank.
  const std::vector<char>& used_anywhere() const { return used_anywhere_; }
  const SegmentCursor& cursor() const { return cursor_; }
  const Plan& plan() const { return plan_; }
  // A collective has failed, or a peer is lost: nothing more can be launched.
  bool is_broken() const { return is_broken_; }

  // Gathers a unit outside of the schedule, on all ranks alike; binds it.
  void all_gather(size_t unit);
  void wait_for(size_t unit);
  // The segment fails by the current exception, at the next call.
  void note_error(const std::string& doing = {});
  void throw_noted();
  // Releases a unit's memory, unless it is unsharded by hand.
  void release(size_t unit);

 private:
  struct Sum {
    FlatShard* flat;
    at::Tensor sum = {};
    ShardedUnit::FuturePtr future = {};
  };
  struct Reducing {
    size_t unit;
    Lease lease = {};  // of its gradients
    std::vector<Sum> sums = {};
  };

  c10::Device device() const { return model_.meshes.streams().device(); }
  bool has_failed() const { return error_ != nullptr || !words_.empty(); }
  void perform(CursorActions& actions);
  void wait(const ShardedUnit::FuturePtr& future, const ShardedUnit& unit);
  void count_gradient(size_t unit);
  ShardedUnit::Gathered gather_into(size_t unit, Lease lease);
  void reduce(size_t unit);
  Sum reduce_flat(const ShardedUnit& unit, FlatShard& flat);
  void wait_for_sum(const ShardedUnit& unit, const Sum& sum);
  ShardedUnit::FuturePtr launch_sum(const ShardedUnit& unit, FlatShard& flat,
                                    const at::Tensor& whole,
                                    const at::Tensor& sum);
  void end_oldest_reduction();
  void wait_for_reductions();
  RoundResult round(std::optional<size_t> need, CursorActions& actions);
  Lease acquire(int64_t bytes);
  void throw_told();
  void drop_gradients();
  void end_gathers();
  void keep_slices(ShardedUnit& unit);

  Model model_;
  Plan plan_;
  SegmentCursor cursor_;
  StreamPoint shards_written_;  // until the first all-gather waits for it
  bool has_gathered_ = false;
  std::deque<Reducing> reducing_;
  std::vector<Sum> reduced_;  // whose memory is released
  // For peers, of units that this rank holds already.
  std::vector<ShardedUnit::Gathered> for_peers_;
  std::exception_ptr error_;
  std::string words_;  // of an error that peers are told, once fail() is called
  std::vector<char> used_;
  std::vector<char> used_anywhere_;
  bool is_over_ = false;
  bool is_broken_ = false;
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_SEGMENT_RUN_H_
