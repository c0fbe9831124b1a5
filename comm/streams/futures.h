// Futures of tensors and of collectives.
//
// Thread safety: any thread.

#ifndef BRIGADE_COMM_STREAMS_FUTURES_H_
#define BRIGADE_COMM_STREAMS_FUTURES_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <chrono>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace brigade {

// Returns a completed future that holds a list of the tensors, as a
// collective's does. A stream that waits for it waits for the current streams
// of the tensors' devices.
c10::intrusive_ptr<c10::ivalue::Future> completed_future(
    const std::vector<at::Tensor>& tensors);

// Returns the future of a collective that backward overlaps with.
//
// torch 2.15's new NCCL backend makes the current stream wait for the
// collective in getFuture(), which would end the overlap: so this asks on
// another stream. A launch from a side stream, as in sharding, need not.
//
// `tensor`: the work's output. Keep it until the stream that it was allocated
// on has waited for the future: the backend may have dropped it. Throws what
// Work::getFuture() throws: some backends have none.
c10::intrusive_ptr<c10::ivalue::Future> future_of(
    const c10::intrusive_ptr<c10d::Work>& work, const at::Tensor& tensor);

// Blocks until `future` is completed or the timeout is over. Returns whether it
// is completed.
bool wait_for(c10::ivalue::Future& future, std::chrono::milliseconds timeout);

}  // namespace brigade

#endif  // BRIGADE_COMM_STREAMS_FUTURES_H_
