// Used-parameter bitmap: the parameters that got gradients since the last
// reduction, on this rank and, after an all-reduce, on any rank.
//
// A parameter that no rank used keeps its gradient. The all-reduce is an entry
// of an iteration's sequence of collectives; only readers of its result wait
// for it. Marks accumulate over iterations that are not reduced (`no_sync`).
//
// Marks are a CPU tensor. The all-reduce runs on a copy on the buckets' device,
// made through pinned memory so that the host does not wait. Variables are
// given by their number in the ParameterTable.
//
// Functions that wait for the all-reduce throw its errors.
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
  // `goes_first`: the bitmap is the first entry of the sequence, so that
  // buckets that no rank used are skipped; otherwise the last. REQUIRES: table
  // and group outlive this object.
  UsedParameters(const ParameterTable& table, c10d::ProcessGroup& group,
                 bool goes_first);
  UsedParameters(const UsedParameters&) = delete;
  UsedParameters& operator=(const UsedParameters&) = delete;

  bool goes_first() const { return goes_first_; }

  // Records that the variable got a gradient on this rank.
  void mark(size_t variable) { marks_[variable] = 1; }
  bool is_marked(size_t variable) const { return marks_[variable] != 0; }
  void clear_marks() { local_.zero_(); }

  // Returns the slots, ascending, of a bucket's parameters that got no gradient
  // on this replica.
  std::vector<size_t> unused_slots(size_t replica,
                                   std::span<const size_t> members) const;

  // Returns the slots, ascending, of parameters that got no gradient on any
  // replica of any rank. Waits for the all-reduce if some are unused here.
  std::vector<size_t> globally_unused_slots(std::span<const size_t> members);

  // Waits for the all-reduce.
  bool is_any_used_anywhere(std::span<const size_t> members);

  // Returns, for each parameter, the number of replicas of all ranks that had
  // marked it at the last launch; zeros before the first. Int32,
  // [num_parameters], on the CPU; valid until the next launch(). Waits for the
  // all-reduce.
  const at::Tensor& counts();

  // Gives up an all-reduce that may never complete. Returns the memory that it
  // may still write to; the next launch uses other memory.
  at::Tensor abandon();

  std::optional<size_t> unit() const override { return std::nullopt; }
  size_t num_awaited() const override { return 0; }
  bool is_left_out() override { return false; }
  bool needs_pack() override { return false; }
  void pack() override {}  // launch() copies the marks

  // The future is null if the backend has none.
  c10::intrusive_ptr<c10::ivalue::Future> launch(bool on_zeros) override;
  at::Tensor result_of(const c10::IValue&) override { return {}; }
  void deliver(const at::Tensor&) override { counts(); }
  c10::Device device() const override { return sum_.device(); }
  bool fails_by_network_only() const override { return true; }
  std::string describe() const override { return "the used-parameter bitmap"; }

 private:
  void wait();
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
  at::Tensor host_sum_;   // sum_ on the CPU; undefined: not copied yet
  c10::intrusive_ptr<c10d::Work> work_;  // null: nothing to wait for
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_USED_PARAMETERS_H_
