#include "brigade/ddp/optimizer_broadcast.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <torch/serialize.h>

#include <cstring>
#include <exception>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/group_info.h"

namespace brigade {
namespace {

at::Tensor broadcast(const at::Tensor& tensor, int source,
                     c10d::ProcessGroup& group) {
  std::vector<at::Tensor> tensors = {tensor.to(control_device(group))};
  try {
    group.broadcast(tensors, {.rootRank = source})->wait();
  } catch (...) {
    throw_peer_error(absl::StrCat("broadcast_optimizer_state on rank ",
                                  group.getRank(), " from rank ", source),
                     std::current_exception());
  }
  return tensors.front().cpu();
}

}  // namespace

void broadcast_optimizer_state(
    torch::optim::Optimizer& optimizer,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, int source) {
  if (group->getSize() == 1) return;
  const at::NoGradGuard no_grad;
  const bool is_source = group->getRank() == source;
  std::string bytes;
  if (is_source) {
    std::ostringstream stream;
    torch::save(optimizer, stream);
    bytes = stream.str();
  }
  const at::Tensor size =
      broadcast(at::full({1}, static_cast<int64_t>(bytes.size()), at::kLong),
                source, *group);
  at::Tensor state = at::empty({size.item<int64_t>()}, at::kByte);
  std::memcpy(state.mutable_data_ptr(), bytes.data(), bytes.size());
  state = broadcast(state, source, *group);
  if (is_source) return;
  std::istringstream stream(
      std::string(static_cast<const char*>(state.const_data_ptr()),
                  static_cast<size_t>(state.numel())));
  // Loading adds to what is there, and goes group by group until one does not
  // fit.
  auto own_state = std::exchange(optimizer.state(), {});
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> own_options;
  for (const auto& parameters : optimizer.param_groups()) {
    own_options.push_back(parameters.options().clone());
  }
  try {
    // Not on the source's device.
    torch::load(optimizer, stream,
                optimizer.param_groups().front().params().front().device());
  } catch (...) {
    optimizer.state() = std::move(own_state);
    for (size_t i = 0; i < own_options.size(); ++i) {
      optimizer.param_groups()[i].set_options(std::move(own_options[i]));
    }
    throw;
  }
}

}  // namespace brigade
