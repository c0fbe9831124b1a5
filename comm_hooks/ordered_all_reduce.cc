#include "brigade/comm_hooks/ordered_all_reduce.h"

#include <algorithm>

namespace brigade {

OrderedAllReduce::OrderedAllReduce(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    std::optional<int> row_size)
    : group_(group, "OrderedAllReduce"),
      row_size_(row_size),
      identity_(ChannelIdentity::made_alone(group)),
      on_device_(row_size) {}

void OrderedAllReduce::connect_for(std::span<const at::Tensor> tensors) {
  if (std::ranges::none_of(tensors, &at::Tensor::is_cpu)) return;
  connect_as(ChannelIdentity::made_together(group_.lock()));
}

void OrderedAllReduce::connect_as(ChannelIdentity identity) {
  collectives_.emplace(group_.lock(), OrderedOptions{.group_size = row_size_},
                       identity);
}

OrderedCollectives::FuturePtr OrderedAllReduce::run(const at::Tensor& tensor,
                                                    double scale) {
  if (!tensor.is_cpu()) {
    return on_device_.all_reduce(*group_.lock(), tensor, scale);
  }
  if (!collectives_) connect_as(identity_);
  return collectives_->all_reduce(tensor, scale);
}

}  // namespace brigade
