#include "brigade/reducer/used_parameters.h"

#include <algorithm>

namespace brigade {

UsedParameters::UsedParameters(const ParameterTable& table,
                               c10d::ProcessGroup& group, Turn turn)
    : table_(table),
      group_(group),
      turn_(turn),
      map_(table.num_replicas(), table.size(), table[0].device()) {}

std::vector<size_t> UsedParameters::unused_slots(
    size_t replica, std::span<const size_t> members) const {
  std::vector<size_t> slots;
  if (num_unused_ == 0) return slots;
  for (size_t slot = 0; slot < members.size(); ++slot) {
    const size_t variable =
        table_.number_of({.replica = replica, .parameter = members[slot]});
    if (!is_marked(variable)) slots.push_back(slot);
  }
  return slots;
}

// A static graph's sum does not tell of gradients that have come since.
bool UsedParameters::is_marked_here(size_t parameter) const {
  for (size_t replica = 0; replica < table_.num_replicas(); ++replica) {
    if (is_marked(
            table_.number_of({.replica = replica, .parameter = parameter}))) {
      return true;
    }
  }
  return false;
}

std::vector<size_t> UsedParameters::globally_unused_slots(
    std::span<const size_t> members) {
  std::vector<size_t> slots = unused_slots(/*replica=*/0, members);
  if (slots.empty()) return slots;
  map_.wait();
  std::erase_if(slots, [&](size_t slot) {
    return map_.is_used_anywhere(members[slot]) ||
           is_marked_here(members[slot]);
  });
  return slots;
}

bool UsedParameters::is_any_used_anywhere(std::span<const size_t> members) {
  map_.wait();
  return std::ranges::any_of(
      members, [this](size_t member) { return map_.is_used_anywhere(member); });
}

const at::Tensor& UsedParameters::counts() {
  map_.wait();
  return map_.counts();
}

c10::intrusive_ptr<c10::ivalue::Future> UsedParameters::launch() {
  return map_.launch(group_);
}

c10::intrusive_ptr<c10::ivalue::Future> UsedParameters::launch_substitute() {
  map_.clear_marks();
  return map_.launch(group_);
}

}  // namespace brigade
