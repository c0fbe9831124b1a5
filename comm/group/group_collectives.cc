#include "brigade/comm/group/group_collectives.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <exception>
#include <string_view>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <utility>

#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/group_info.h"

namespace brigade {

namespace {

bool is_sent_by_all_backends(at::ScalarType dtype) {
  constexpr std::array kDtypes = {at::kFloat,    at::kDouble, at::kHalf,
                                  at::kBFloat16, at::kByte,   at::kChar,
                                  at::kInt,      at::kLong,   at::kBool};
  return std::ranges::find(kDtypes, dtype) != kDtypes.end();
}

}  // namespace

std::vector<at::Tensor> all_gather_tensors(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, const at::Tensor& own,
    const std::string& failure) {
  std::vector<at::Tensor> inputs = {own};
  std::vector<std::vector<at::Tensor>> outputs(1);  // by rank
  for (int rank = 0; rank < group->getSize(); ++rank) {
    outputs.front().push_back(at::empty_like(own));
  }
  try {
    // Groups written in Python can't override the variant with one output.
    group->allgather(outputs, inputs)->wait();
  } catch (...) {
    throw_peer_error(c10::str("rank ", group->getRank(), " of ",
                              group->getSize(), " ", failure),
                     std::current_exception());
  }
  return std::move(outputs.front());
}

std::vector<int64_t> all_gather_ints(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const std::vector<int64_t>& own, const std::string& failure) {
  if (group->getSize() == 1) return own;
  const at::Tensor sent = at::tensor(own).to(control_device(*group));
  std::vector<int64_t> numbers;
  for (const at::Tensor& output : all_gather_tensors(group, sent, failure)) {
    const at::Tensor here = output.cpu();
    const auto* const begin = here.const_data_ptr<int64_t>();
    numbers.insert(numbers.end(), begin, begin + own.size());
  }
  return numbers;
}

int64_t channel_number(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  // Ranks may count differently; all of them use rank 0's number.
  const int64_t own = ++*per_group<std::atomic<int64_t>>(group);
  return all_gather_ints(group, {own}, "could not exchange channel numbers")
      .front();
}

void broadcast_tensors(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                       const std::vector<at::Tensor>& tensors, int source) {
  constexpr size_t kPieceBytes = size_t{250} << 20;
  if (tensors.empty()) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> sent;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  for (const at::Tensor& tensor : tensors) {
    if (is_sent_by_all_backends(tensor.scalar_type())) {
      sent.push_back(tensor);
    } else if (tensor.is_complex()) {
      sent.push_back(at::view_as_real(tensor));
    } else {
      copies.emplace_back(tensor, tensor.reshape(-1).contiguous());
      sent.push_back(copies.back().second.view(at::kByte));
    }
  }
  c10d::broadcast_coalesced(group, sent, kPieceBytes, source);
  for (const auto& [tensor, copy] : copies) {
    if (!copy.is_alias_of(tensor)) tensor.copy_(copy.view(tensor.sizes()));
  }
}

void throw_if_not_supported(const c10::Error& error, c10::Device device) {
  const std::string_view text = error.what_without_backtrace();
  const auto has = [&](const char* part) {
    return text.find(part) != std::string_view::npos;
  };
  const bool has_backend = !has("No backend type associated");
  if (has_backend && !has("does not support all_to_all_single") &&
      !has("does not support alltoall_base")) {
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "reproducible reduction: expected a process group with an all-to-all "
      "for tensors on ",
      device, ", found none (", text,
      ").\nUse Gloo for CPU tensors or NCCL for CUDA tensors, or turn off "
      "`reproducible`.");
}

}  // namespace brigade
