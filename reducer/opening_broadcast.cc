#include "brigade/reducer/opening_broadcast.h"

#include <ATen/ops/empty_like.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/broadcast_tensors.h"
#include "brigade/comm/group/find_backend.h"
#include "brigade/comm/streams/stream_join.h"

namespace brigade {
namespace {

uint64_t digest_of(const std::vector<at::Tensor>& tensors, int source) {
  uint64_t digest = c10::get_hash(source, tensors.size());
  for (const at::Tensor& tensor : tensors) {
    digest = c10::hash_combine(
        digest, c10::get_hash(tensor.numel(), tensor.scalar_type(),
                              tensor.device().type()));
  }
  return digest;
}

}  // namespace

OpeningBroadcast::OpeningBroadcast(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                   std::vector<at::Tensor> tensors, int source)
    : group_(std::move(group)),
      tensors_(std::move(tensors)),
      source_(source),
      form_(digest_of(tensors_, source_)) {}

void OpeningBroadcast::launch() {
  streams_.clear();
  for (const at::Tensor& tensor : tensors_) {
    if (tensor.is_cpu()) continue;
    const c10::Stream stream = current_stream(tensor.device());
    if (std::ranges::count(streams_, stream) == 0) streams_.push_back(stream);
  }
  broadcast_tensors(group_, tensors_, source_);
}

void OpeningBroadcast::launch_for_peers() {
  const c10::MultiStreamGuard on_its_streams(streams_);
  if (group_->getRank() == source_) {
    return broadcast_tensors(group_, tensors_, source_);
  }
  std::vector<at::Tensor> unwanted;
  unwanted.reserve(tensors_.size());
  for (const at::Tensor& tensor : tensors_) {
    unwanted.push_back(at::empty_like(tensor));
  }
  broadcast_tensors(group_, unwanted, source_);
}

bool OpeningBroadcast::keeps_host_waiting() const {
  return std::ranges::any_of(tensors_, [this](const at::Tensor& tensor) {
    const auto backend = find_backend(*group_, tensor.device().type());
    return backend == nullptr || backend->getBackendName() == "gloo";
  });
}

c10::Device OpeningBroadcast::device() const {
  const auto on_cpu = std::ranges::find_if(tensors_, &at::Tensor::is_cpu);
  return (on_cpu == tensors_.end() ? tensors_.front() : *on_cpu).device();
}

std::string OpeningBroadcast::describe() const {
  return absl::StrCat("broadcasting ", tensors_.size(),
                      tensors_.size() == 1 ? " buffer" : " buffers",
                      " from rank ", source_);
}

}  // namespace brigade
