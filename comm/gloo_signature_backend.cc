#include "brigade/comm/gloo_signature_backend.h"

#include <gloo/transport/unbound_buffer.h>
#include <gloo/types.h>

#include <cstring>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>

#include "brigade/comm/gloo_connections.h"
#include "brigade/comm/sigpipe_block.h"

namespace brigade {
namespace {

using c10d::ProcessGroupGloo;

// A message, and what Gloo knows of it.
struct Sent {
  at::Tensor tensor;
  std::unique_ptr<::gloo::transport::UnboundBuffer> buffer;
};

class Exchange final : public ProcessGroupGloo::AsyncWork {
 public:
  // Rank and size are not the context's: Debian's header does not know where
  // LibTorch's Gloo keeps them.  `last_sent` is used by the backend's thread
  // only.
  Exchange(std::shared_ptr<::gloo::Context> context, int rank, int size,
           const at::Tensor& output, const at::Tensor& input, uint32_t tag,
           std::chrono::milliseconds timeout, std::shared_ptr<Sent> last_sent)
      : AsyncWork(std::move(context), {{output}}, c10d::OpType::ALLGATHER, tag,
                  timeout),
        rank_(rank),
        size_(size),
        output_(output),
        input_(input),
        slot_(::gloo::Slot::build(::gloo::kAllgatherSlotPrefix, tag)),
        last_sent_(std::move(last_sent)) {}

  void run() override {
    const size_t bytes = input_.nbytes();
    auto received = context_->createUnboundBuffer(output_.mutable_data_ptr(),
                                                  output_.nbytes());
    Sent sent = {.tensor = input_,
                 .buffer = context_->createUnboundBuffer(
                     input_.mutable_data_ptr(), bytes)};
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) received->recv(peer, slot_, peer * bytes, bytes);
    }
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) sent.buffer->send(peer, slot_, 0, bytes);
    }
    std::memcpy(static_cast<char*>(output_.mutable_data_ptr()) + rank_ * bytes,
                input_.const_data_ptr(), bytes);
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) received->waitRecv(timeout_);
    }
    // All have sent, so all have what they were sent the time before.
    *last_sent_ = std::move(sent);
  }

  const std::vector<at::Tensor> getInputTensors() override { return {input_}; }
  const std::vector<at::Tensor> getOutputTensors() override {
    return {output_};
  }

 private:
  const int rank_;
  const int size_;
  const at::Tensor output_;
  const at::Tensor input_;
  const uint64_t slot_;
  const std::shared_ptr<Sent> last_sent_;
};

class GlooSignatureBackend final : public ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::AllgatherOptions&) override {
    TORCH_INTERNAL_ASSERT(output.nbytes() == getSize() * input.nbytes());
    const uint32_t tag = nextTag();
    auto work = c10::make_intrusive<Exchange>(
        getContext(tag), getRank(), getSize(), output, input, tag,
        getOptions()->timeout, last_sent_);
    enqueue(work);
    return work;
  }

  void abort() override { end_gloo_operations(contexts_); }

 private:
  const std::shared_ptr<Sent> last_sent_ = std::make_shared<Sent>();
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_signature_backend(
    c10d::ProcessGroup& group, const c10::intrusive_ptr<c10d::Store>& store,
    std::chrono::milliseconds timeout) {
  const SigpipeBlock inherited_by_its_threads;
  GlooDevices devices = gloo_devices_of(group);
  if (devices.empty()) devices = open_gloo_devices({});
  devices.resize(1);
  auto options = ProcessGroupGloo::Options::create(timeout);
  options->devices = std::move(devices);
  options->threads = 1;
  return c10::make_intrusive<GlooSignatureBackend>(store, group.getRank(),
                                                   group.getSize(), options);
}

}  // namespace brigade
