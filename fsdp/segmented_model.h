// The implementation of ShardedModel (fsdp/sharded_model.h): runs forwards and
// backwards as segments, one at a time.
//
// Opens a segment with the peers (fsdp/segment_exchange.h), chooses its
// schedule and rules, lets a SegmentRun carry it out, and sets `.grad` at the
// end of a backward. Memory of unsharded units and gradients:
// fsdp/unshard_buffers.h.
//
// segmented_model_forward_backward.cc: forwards, backwards and their segments.
// segmented_model.cc: all other calls.
//
// Thread safety: as ShardedModel.

#ifndef BRIGADE_FSDP_SEGMENTED_MODEL_H_
#define BRIGADE_FSDP_SEGMENTED_MODEL_H_

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/comm/errors/error_texts.h"
#include "brigade/fsdp/segment_run.h"
#include "brigade/fsdp/sharded_model.h"
#include "brigade/hooks/autograd_hooks.h"
#include "brigade/observing/stall_watch.h"

namespace brigade {

class SegmentedModel final : public ShardedModel, public ParameterOwner {
 public:
  // Collective. Throws as connect_units(), which leaves `units` unchanged.
  SegmentedModel(std::vector<ShardedUnit>&& units,
                 c10::intrusive_ptr<c10d::ProcessGroup> group,
                 FullyShardOptions options = {});
  ~SegmentedModel() override;

  const std::vector<ShardedUnit>& units() const { return units_; }
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }
  bool is_in_forward() const { return is_in_forward_; }
  // `check` runs at the begin of each forward; its exception fails the forward.
  void set_forward_check(std::function<void()> check) {
    forward_check_ = std::move(check);
  }

  // ShardedModel.
  void begin_forward() override;
  void end_forward(const std::vector<at::Tensor>& outputs) override;
  void forward_failed(const std::exception_ptr& error) noexcept override;
  std::vector<size_t> unshard(const std::vector<size_t>& units,
                              bool may_write = false) override;
  void reshard(const std::vector<size_t>& units,
               bool drop_writes = false) override;
  void reduce() override;
  double clip_grad_norm(double max_norm, double p = 2.0) override;
  int64_t num_ranks_with(bool has_data) override;
  void step_without_data() override;
  void barrier() override;
  void set_max_reducing(size_t value) override;
  UnitSettings& settings(size_t unit) override {
    require_units({unit});
    return units_[unit].settings;
  }
  std::vector<std::string> unit_names() const override;
  at::Tensor gradient_slot(const at::Tensor& parameter) override;
  bool can_continue() const override;
  ShardedModelStatistics statistics() const override;
  std::string explain() const override;
  ShardingTimeline timeline() const override;
  // As the function in sharded_model.h.
  std::vector<size_t> units_to_keep(int64_t max_bytes);
  void set_timeline_sample_rate(int64_t rate) override {
    recorder_.set_sample_rate(rate);
  }
  void set_stall_report_after(std::chrono::milliseconds time) override;

  // Accumulates an unsharded gradient of `parameter`, as from
  // autograd::grad(), for the next synchronized backward or reduce(). Not
  // collective. REQUIRES: no synchronization of the parameter's unit.
  void add_gradient(const at::Tensor& parameter, const at::Tensor& gradient);

  // ParameterOwner.
  ParameterState use(std::span<const Shard* const> parameters) override;
  bool use_after_forward(std::span<const Shard* const> parameters) override;
  void end_use_after_forward(size_t unit) override;
  void written(size_t unit) override;
  void await_statuses() override;

 private:
  // Gradients that a forward leads to. Lives as long as its outputs' graph.
  struct ForwardRecord {
    std::vector<char> used;  // by parameter number, if trained then
    bool is_done = false;    // a backward reached it
  };

  struct Parameter {
    size_t unit;
    FlatShard* flat;
    size_t in_flat;

    bool is_trained() const { return flat->is_trained(in_flat); }
  };

  SegmentRun::Model parts() {
    return {units_, *meshes_, memory_, exchange_, *progress_, recorder_};
  }
  bool is_cpu() const { return meshes_->streams().device().is_cpu(); }
  bool is_open() const { return run_.has_value(); }
  // An exception in `part` fails the open segment.
  template <typename Part>
  void run_or_abandon(const Part& part) {
    try {
      part();
    } catch (...) {
      abandon(message_of(std::current_exception()));
      throw;
    }
  }
  void check_usable() const;
  // Throws ValueError unless all units exist.
  void require_units(const std::vector<size_t>& units) const;
  // Closes the groups if `call` breaks exchange_.
  template <typename F>
  auto run_exchange(F call) {
    try {
      return call();
    } catch (...) {
      if (exchange_.is_broken()) close_groups();
      throw;
    }
  }
  // An exception in `call` is also thrown on the peers, by their next open() or
  // compare().
  template <typename F>
  auto run_or_fail_on_peers(F call) {
    try {
      return call();
    } catch (...) {
      const std::string error = message_of(std::current_exception());
      run_exchange([&] { exchange_.fail(error); });
      throw;
    }
  }
  [[nodiscard]] std::unique_lock<std::recursive_mutex> lock_between_segments()
      const;
  std::vector<int64_t> compare(const std::string& text, uint64_t hash,
                               int64_t number = 0);
  void make_hooks();
  void gradient_ready(VariableIndex variable, const at::Tensor& gradient);
  // Throws ValueError unless `parameter` is one of this model.
  const Shard& own_shard_of(const at::Tensor& parameter) const;
  void show_compute_dtypes(bool value);
  void check_reshard_sizes() const;
  void adopt_pieces();
  void prepare();
  void release_stale();
  template <typename Visit>
  void visit_settings(const Visit& visit) const;
  uint64_t settings_hash() const;
  void require_equal_settings() const;
  bool stays_unsharded_after(const SegmentRun::Plan& plan, size_t unit) const;
  UnitRules rules_for(const SegmentRun::Plan& plan) const;
  size_t prefetch_depth_of(const ShardedUnit& unit, SegmentKind kind) const;
  // Null: none is recorded. Valid until the next call.
  const RecordedSchedule* schedule_for(uint64_t tag, SegmentKind kind);
  PlannedSegment planned_segment(SegmentKind kind) const;
  OpeningMessage opening_of(SegmentKind kind);
  OpeningMessage exchange_opening(const OpeningMessage& opening);
  // `reached`: the forward whose outputs backward reached; null: unknown.
  void open(SegmentKind kind, const ForwardRecord* reached = nullptr);
  void open_backward(const ForwardRecord* reached = nullptr);
  std::vector<uint32_t> expected_gradients(const ForwardRecord* reached) const;
  bool leave_forward();
  void finish(const std::vector<char>& used, bool has_used_all);
  void close();
  void end_run() noexcept;
  void abandon(const std::string& error) noexcept;
  void end_backward();
  void deliver(std::vector<at::Tensor>& hooked);
  void close_groups() noexcept;
  // Called by the stall watch's thread. Never blocks on mutex_.
  std::string describe_progress() const;
  bool reduces(const ShardedUnit& unit) const {
    return synchronizes_ && unit.settings.synchronizes && unit.is_trained();
  }
  bool has_held_gradients(const ShardedUnit& unit) const;
  bool is_forward_thread() const;

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  size_t max_reducing_ = 2;
  const std::unique_ptr<ShardMeshes> meshes_;
  std::vector<ShardedUnit> units_;
  UnshardBuffers memory_;
  const std::shared_ptr<Progress> progress_ = std::make_shared<Progress>();
  SegmentExchange exchange_;
  ShardingRecorder recorder_;
  std::unique_ptr<StallWatch> stall_watch_;
  std::vector<Parameter> parameters_;  // by parameter number
  std::vector<at::Tensor> hooked_;  // parameters of floating or complex dtypes
  std::vector<size_t> numbers_of_hooked_;
  std::unique_ptr<GradientHooks> hooks_;
  std::optional<HiddenPostAccumulateHooks> hidden_hooks_;  // during backward

  mutable std::recursive_mutex mutex_;
  mutable std::condition_variable_any run_ended_;  // with mutex_
  std::optional<SegmentRun> run_;                  // the open segment
  std::atomic<bool> is_in_forward_ = false;
  std::thread::id forward_thread_;
  std::function<void()> forward_check_;
  int nested_forwards_ = 0;
  std::atomic<bool> is_broken_ = false;
  std::string broken_reason_;
  int last_backward_ = -1;  // graph task of the last closed segment

  std::map<uint64_t, RecordedSchedule> schedules_;  // by tag, as learned
  RecordedSchedule advanced_;             // result of schedule_for(), if a copy
  std::map<SegmentKind, Schedule> step_;  // last learned
  std::vector<std::weak_ptr<ForwardRecord>> forwards_;
  std::shared_ptr<ForwardRecord> last_forward_;  // alive until backward ends
  std::vector<char> used_in_forward_;            // by parameter number
  std::vector<char> used_;  // by parameter number: has an unreduced gradient
  ShardedModelStatistics statistics_;
  std::shared_ptr<char> alive_ = std::make_shared<char>();
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_SEGMENTED_MODEL_H_
