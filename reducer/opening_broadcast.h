// The broadcast of tensors that an iteration may begin with, ahead of its
// forward: buffers of a module.
//
// As an entry of the sequence its peers launch it for a rank that failed, so
// that ranks broadcast before they have heard how the last iteration ended.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_REDUCER_OPENING_BROADCAST_H_
#define BRIGADE_REDUCER_OPENING_BROADCAST_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/engine/collective.h"

namespace brigade {

class OpeningBroadcast final : public Collective {
 public:
  explicit OpeningBroadcast(c10::intrusive_ptr<c10d::ProcessGroup> group);

  // Iterations begin with it.
  bool is_set() const { return !tensors_.empty(); }

  // From the next launch on these are sent, from rank `source`.
  void set(std::vector<at::Tensor> tensors, int source);
  void clear();

  // Peers that have not heard of these would launch the same.
  bool is_like(const std::vector<at::Tensor>& tensors, int source) const;

  std::optional<size_t> unit() const override { return std::nullopt; }
  size_t num_awaited() const override { return 0; }
  bool is_left_out() override { return false; }
  bool needs_pack() override { return false; }
  void pack() override {}

  // The calling thread's streams wait for it, and on the CPU the thread.
  c10::intrusive_ptr<c10::ivalue::Future> launch() override;

  // On the streams of the last launch. The source sends what it has; on another
  // rank nothing is overwritten.
  c10::intrusive_ptr<c10::ivalue::Future> launch_substitute() override;

  at::Tensor result_of(const c10::IValue& value) override { return {}; }
  void deliver(const at::Tensor& result) override {}
  // The CPU if one of them is there.
  c10::Device device() const override;
  bool fails_by_network_only() const override { return true; }
  std::string describe() const override;

 private:
  void broadcast(const std::vector<at::Tensor>& tensors) const;

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::vector<at::Tensor> tensors_;
  int source_ = 0;
  std::vector<c10::Stream> streams_;  // of the last launch, by device
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_OPENING_BROADCAST_H_
