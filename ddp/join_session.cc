#include "brigade/ddp/join_session.h"

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <exception>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/group_info.h"

namespace brigade {

bool JoinSession::begin_shadow() {
  count(/*has_data=*/false);
  wait_for_count();
  return !with_data_.empty();
}

int JoinSession::num_ranks_with_data() {
  wait_for_count();
  return static_cast<int>(with_data_.size());
}

int JoinSession::first_rank_with_data() {
  wait_for_count();
  return with_data_.front();
}

int JoinSession::last_rank_with_data() {
  wait_for_count();
  return last_rank_with_data_;
}

void JoinSession::count(bool has_data) {
  const at::NoGradGuard no_grad;
  at::Tensor mine = at::zeros({group_->getSize()}, at::kInt);
  if (has_data) mine[group_->getRank()] = 1;
  std::vector<at::Tensor> tensors = {mine.to(control_device(*group_))};
  ++iteration_;
  is_read_ = false;
  previous_ = std::exchange(current_, {.counts = tensors.front(),
                                       .work = group_->allreduce(tensors)});
}

void JoinSession::wait_for_count() {
  TORCH_CHECK(iteration_ > 0,
              "join: a model was used before the first one of the list.\nUse "
              "them in the list's order.");
  if (std::exchange(is_read_, true)) return;
  with_data_ = read(current_);
  const std::vector<int> had_data =
      with_data_.empty() && previous_.work ? read(previous_) : with_data_;
  if (!had_data.empty()) last_rank_with_data_ = had_data.front();
}

std::vector<int> JoinSession::read(const Count& count) const {
  try {
    count.work->wait();
  } catch (...) {
    throw_peer_error(absl::StrCat("join: counting on rank ", group_->getRank(),
                                  " who has data in iteration ", iteration_),
                     std::current_exception());
  }
  const at::Tensor counts = count.counts.cpu();
  std::vector<int> ranks;
  for (int rank = 0; rank < group_->getSize(); ++rank) {
    if (counts.const_data_ptr<int32_t>()[rank] != 0) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace brigade
