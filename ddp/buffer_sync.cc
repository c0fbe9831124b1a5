#include "brigade/ddp/buffer_sync.h"

#include <utility>

#include "brigade/ddp/module_broadcast.h"

namespace brigade {

BufferSync::BufferSync(std::vector<BufferLookup> replicas, BufferHook hook,
                       c10::intrusive_ptr<c10d::ProcessGroup> group)
    : replicas_(std::move(replicas)),
      hook_(std::move(hook)),
      group_(std::move(group)) {}

bool BufferSync::are_none() const { return replicas_.front()().empty(); }

void BufferSync::run(int source) const {
  if (!hook_) return broadcast(source);
  const std::vector<NamedTensor> buffers = replicas_.front()();
  hook_(buffers, source);
  copy_to_other_replicas(buffers);
}

void BufferSync::broadcast(int source) const {
  if (group_->getSize() == 1 && replicas_.size() == 1) return;
  const std::vector<NamedTensor> buffers = replicas_.front()();
  broadcast_from(source, buffers, "buffers", group_);
  copy_to_other_replicas(buffers);
}

void BufferSync::broadcast_by(
    const std::function<void(std::vector<at::Tensor>)>& send) const {
  const std::vector<NamedTensor> buffers = replicas_.front()();
  std::vector<at::Tensor> tensors;
  tensors.reserve(buffers.size());
  for (const NamedTensor& buffer : buffers) tensors.push_back(buffer.tensor);
  send(std::move(tensors));
  copy_to_other_replicas(buffers);
}

void BufferSync::copy_to_other_replicas(
    std::span<const NamedTensor> buffers) const {
  for (size_t r = 1; r < replicas_.size(); ++r) {
    copy_values(buffers, replicas_[r]());
  }
}

}  // namespace brigade
