// The sum of the used map over the ranks, as an entry of an iteration's
// sequence of collectives.
//
// Thread safety: none; the reducer's lock covers it.

#ifndef BRIGADE_REDUCER_USED_MAP_SUM_H_
#define BRIGADE_REDUCER_USED_MAP_SUM_H_

#include <cstddef>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "brigade/reducer/collective.h"
#include "brigade/reducer/used_parameter_map.h"

namespace brigade {

class UsedMapSum final : public Collective {
 public:
  // REQUIRES: both outlive this object.
  UsedMapSum(UsedParameterMap& map, c10d::ProcessGroup& group)
      : map_(map), group_(group) {}

  std::optional<size_t> bucket() const override { return std::nullopt; }
  size_t num_gradients() const override { return 0; }
  bool is_left_out() override { return false; }
  c10::intrusive_ptr<c10::ivalue::Future> launch() override {
    return map_.launch(group_);
  }
  c10::intrusive_ptr<c10::ivalue::Future> launch_substitute() override {
    map_.clear_marks();
    return map_.launch(group_);
  }
  c10::Device device() const override { return map_.device(); }
  bool fails_by_network_only() const override { return true; }
  std::string describe() const override { return "the map of used parameters"; }

 private:
  UsedParameterMap& map_;
  c10d::ProcessGroup& group_;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_USED_MAP_SUM_H_
