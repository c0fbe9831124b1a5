#include "brigade/reducer/used_parameters.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace brigade {
namespace {

c10::intrusive_ptr<c10::ivalue::Future> future_of(c10d::Work& work) {
  try {
    return work.getFuture();
  } catch (const std::exception&) {
    return nullptr;  // a user's backend without futures
  }
}

}  // namespace

UsedParameters::UsedParameters(const ParameterTable& table,
                               c10d::ProcessGroup& group, bool goes_first)
    : table_(table),
      group_(group),
      goes_first_(goes_first),
      local_(at::zeros({static_cast<int64_t>(table.num_replicas()),
                        static_cast<int64_t>(table.size())},
                       at::kInt)),
      marks_(local_.mutable_data_ptr<int32_t>()),
      sum_(at::empty({static_cast<int64_t>(table.size())},
                     at::TensorOptions(at::kInt).device(table[0].device()))),
      host_sum_(at::zeros({static_cast<int64_t>(table.size())}, at::kInt)) {}

std::vector<size_t> UsedParameters::unused_slots(
    size_t replica, std::span<const size_t> members) const {
  std::vector<size_t> slots;
  for (size_t slot = 0; slot < members.size(); ++slot) {
    const size_t variable =
        table_.number_of({.replica = replica, .parameter = members[slot]});
    if (!is_marked(variable)) slots.push_back(slot);
  }
  return slots;
}

// Gradients of a static graph may arrive after its only all-reduce.
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
  counts();
  std::erase_if(slots, [&](size_t slot) {
    return is_used_anywhere(members[slot]) || is_marked_here(members[slot]);
  });
  return slots;
}

bool UsedParameters::is_any_used_anywhere(std::span<const size_t> members) {
  counts();
  return std::ranges::any_of(
      members, [this](size_t member) { return is_used_anywhere(member); });
}

// Copies right after the wait, since only the current stream has waited for the
// collective.
const at::Tensor& UsedParameters::counts() {
  wait();
  if (!host_sum_.defined()) host_sum_ = sum_.cpu();
  return host_sum_;
}

void UsedParameters::wait() {
  if (!work_) return;
  work_->wait();
  work_ = nullptr;
}

at::Tensor UsedParameters::abandon() {
  work_ = nullptr;
  host_sum_ = at::zeros(sum_.sizes(), at::kInt);
  return std::exchange(sum_, at::empty_like(sum_));
}

c10::intrusive_ptr<c10::ivalue::Future> UsedParameters::launch(bool on_zeros) {
  if (on_zeros) clear_marks();
  const at::NoGradGuard no_grad;
  try {
    wait();  // the last all-reduce, if nobody read its result
  } catch (const std::exception&) {
    work_ = nullptr;  // its failure does not matter either
  }
  const at::Tensor used = local_.size(0) == 1
                              ? local_[0]
                              : local_.sum(0, /*keepdim=*/false, at::kInt);
  if (sum_.is_cpu()) {
    sum_.copy_(used);
  } else {
    // The caching host allocator reuses this memory only after the copy.
    const at::Tensor staging =
        at::empty_like(used, used.options().pinned_memory(true));
    staging.copy_(used);
    // New memory: the old one belongs to the stream of the last launch, which
    // the current stream may not have waited for.
    sum_ = staging.to(sum_.device(), /*non_blocking=*/true);
  }
  host_sum_.reset();
  std::vector<at::Tensor> tensors = {sum_};
  work_ = group_.allreduce(tensors);
  return future_of(*work_);
}

}  // namespace brigade
