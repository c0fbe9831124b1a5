// Which parameters have been used: on this rank since the last reduction, and
// on any of them.
//
// The one place that says which slots of a bucket have no gradient to send, and
// which gradients are to stay as they were. The second is known from a sum over
// the ranks, an entry of an iteration's sequence of collectives, which is
// waited for only by who asks.
//
// Variables go by their number, replica by replica.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_REDUCER_USED_PARAMETERS_H_
#define BRIGADE_REDUCER_USED_PARAMETERS_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/reducer/collective.h"
#include "brigade/reducer/parameter_table.h"
#include "brigade/reducer/used_parameter_map.h"

namespace brigade {

class UsedParameters final : public Collective {
 public:
  // Where the sum has its place in the sequence.
  enum class Turn {
    kFirst,  // and buckets that no rank used are left out
    kLast,
  };

  // REQUIRES: both outlive this object.
  UsedParameters(const ParameterTable& table, c10d::ProcessGroup& group,
                 Turn turn);
  UsedParameters(const UsedParameters&) = delete;
  UsedParameters& operator=(const UsedParameters&) = delete;

  Turn turn() const { return turn_; }

  // It got a gradient on this rank. Marks stay until they are cleared, over
  // iterations that are not reduced.
  void mark(size_t variable) { map_.mark(variable); }
  bool is_marked(size_t variable) const { return map_.is_marked(variable); }
  void clear_marks() { map_.clear_marks(); }

  // Int32, [num_replicas, num_parameters], on the CPU; 1 where a mark is. It is
  // what mark() writes to, not a copy.
  const at::Tensor& local() const { return map_.local(); }

  // An iteration begins; what was ready in an unfinished one is forgotten.
  void restart() { num_unused_ = 0; }

  // Its gradient is ready: unless it is marked, there is none.
  void count_if_unused(size_t variable) {
    num_unused_ += is_marked(variable) ? 0 : 1;
  }

  // By slot, ascending: those of a bucket's parameters that got no gradient on
  // this replica. REQUIRES: count_if_unused() of all of them since restart().
  std::vector<size_t> unused_slots(size_t replica,
                                   std::span<const size_t> members) const;

  // Likewise: those that got none on any replica of any rank. Waits for the sum
  // if there are unused ones here. Errors: what the collective throws.
  std::vector<size_t> globally_unused_slots(std::span<const size_t> members);

  // Waits for the sum. Errors: what the collective throws.
  bool is_any_used_anywhere(std::span<const size_t> members);

  // How many replicas of all ranks had marked each parameter when the last sum
  // was launched; zeros before. Int32, [num_parameters], on the CPU; the next
  // launch() changes it. Waits for the sum. Errors: what the collective throws.
  const at::Tensor& counts();

  // Does not wait for the sum any more, which may never come. Returns the
  // memory that it may still be written to.
  at::Tensor abandon() { return map_.abandon(); }

  std::optional<size_t> unit() const override { return std::nullopt; }
  size_t num_awaited() const override { return 0; }
  bool is_left_out() override { return false; }
  bool needs_pack() override { return false; }
  void pack() override {}  // launch() takes the marks of its time
  c10::intrusive_ptr<c10::ivalue::Future> launch() override;
  c10::intrusive_ptr<c10::ivalue::Future> launch_substitute() override;
  at::Tensor result_of(const c10::IValue&) override { return {}; }
  void deliver(const at::Tensor&) override { map_.wait(); }
  c10::Device device() const override { return map_.device(); }
  bool fails_by_network_only() const override { return true; }
  std::string describe() const override { return "the map of used parameters"; }

 private:
  bool is_marked_here(size_t parameter) const;

  const ParameterTable& table_;
  c10d::ProcessGroup& group_;
  const Turn turn_;
  UsedParameterMap map_;
  size_t num_unused_ = 0;  // of those that are ready in this iteration
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_USED_PARAMETERS_H_
