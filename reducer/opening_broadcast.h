// Gives all ranks the tensors of one, in front of a forward: a module's
// buffers.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_REDUCER_OPENING_BROADCAST_H_
#define BRIGADE_REDUCER_OPENING_BROADCAST_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/engine/state/opening.h"

namespace brigade {

class OpeningBroadcast final : public Opening {
 public:
  // `tensors`: at least one; those of rank `source` are sent.
  OpeningBroadcast(c10::intrusive_ptr<c10d::ProcessGroup> group,
                   std::vector<at::Tensor> tensors, int source);

  uint64_t form() const override { return form_; }

  // The calling thread's streams wait for it, and on the CPU the thread.
  void launch() override;

  // On the streams of launch(). On the source it sends what is there.
  void launch_for_peers() override;

  bool keeps_host_waiting() const override;
  c10::Device device() const override;
  std::string describe() const override;

 private:
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const std::vector<at::Tensor> tensors_;
  const int source_;
  const uint64_t form_;
  std::vector<c10::Stream> streams_;  // of launch(), by device
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_OPENING_BROADCAST_H_
