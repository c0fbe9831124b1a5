// The used-parameter map: parameters that have got gradients on this rank since
// the last reduction, and on any rank.
//
// A parameter that no rank and no local replica used keeps its gradient. The
// sum over all ranks is an entry of an iteration's sequence of collectives;
// only its readers wait for it. Marks accumulate over iterations that are not
// reduced.
//
// The map is a CPU tensor; a copy of it travels on the buckets' device, through
// pinned memory of its own, so that the host does not wait. Variables go by
// their number.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_REDUCER_USED_PARAMETERS_H_
#define BRIGADE_REDUCER_USED_PARAMETERS_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/reducer/collective.h"
#include "brigade/reducer/parameter_table.h"

namespace brigade {

class UsedParameters final : public Collective {
 public:
  // `goes_first`: in the sequence, so that buckets that no rank used are left
  // out; otherwise last. REQUIRES: table and group outlive this object.
  UsedParameters(const ParameterTable& table, c10d::ProcessGroup& group,
                 bool goes_first);
  UsedParameters(const UsedParameters&) = delete;
  UsedParameters& operator=(const UsedParameters&) = delete;

  bool goes_first() const { return goes_first_; }

  // It got a gradient on this rank.
  void mark(size_t variable) { marks_[variable] = 1; }
  bool is_marked(size_t variable) const { return marks_[variable] != 0; }
  void clear_marks() { local_.zero_(); }

  // By slot, ascending: those of a bucket's parameters that got no gradient on
  // this replica.
  std::vector<size_t> unused_slots(size_t replica,
                                   std::span<const size_t> members) const;

  // Likewise: those that got none on any replica of any rank. Waits for the sum
  // if there are unused ones here. Errors: those of the collective.
  std::vector<size_t> globally_unused_slots(std::span<const size_t> members);

  // Waits for the sum. Errors: those of the collective.
  bool is_any_used_anywhere(std::span<const size_t> members);

  // The number of replicas of all ranks that had marked each parameter at the
  // last launch; zeros before. Int32, [num_parameters], on the CPU, until the
  // next launch(). Waits for the sum. Errors: those of the collective.
  const at::Tensor& counts();

  // Waits no more for the sum, which may never come. Returns the memory that it
  // may still be written to; the next one is taken elsewhere.
  at::Tensor abandon();

  std::optional<size_t> unit() const override { return std::nullopt; }
  size_t num_awaited() const override { return 0; }
  bool is_left_out() override { return false; }
  bool needs_pack() override { return false; }
  void pack() override {}  // launch() takes the marks of its time

  // The future is null if the group's works have none.
  c10::intrusive_ptr<c10::ivalue::Future> launch() override;
  c10::intrusive_ptr<c10::ivalue::Future> launch_substitute() override;
  at::Tensor result_of(const c10::IValue&) override { return {}; }
  void deliver(const at::Tensor&) override { counts(); }
  c10::Device device() const override { return sum_.device(); }
  bool fails_by_network_only() const override { return true; }
  std::string describe() const override { return "the map of used parameters"; }

 private:
  void finish();
  bool is_marked_here(size_t parameter) const;
  // REQUIRES: counts() since the last launch.
  bool is_used_anywhere(size_t parameter) const {
    return host_sum_.const_data_ptr<int32_t>()[parameter] != 0;
  }

  const ParameterTable& table_;
  c10d::ProcessGroup& group_;
  const bool goes_first_;
  at::Tensor local_;      // int32, [num_replicas, num_parameters]; 1: marked
  int32_t* const marks_;  // elements of local_
  at::Tensor sum_;        // int32, [num_parameters], on the buckets' device
  at::Tensor host_sum_;  // the last sum, on the CPU; undefined: not awaited yet
  c10::intrusive_ptr<c10d::Work> work_;  // null: nothing to wait for
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_USED_PARAMETERS_H_
