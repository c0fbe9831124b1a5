// The future of a collective that backward goes on beside.
//
// torch 2.15's new NCCL backend makes the current stream wait for the
// collective when it is asked for the future (nccl2::WorkNCCL::getFuture()):
// asked on the stream that computes gradients, nothing of backward runs beside
// it. Here it is asked on a stream of its own. What is launched from a side
// stream, as sharding's gathers and sums are, need not care.

#ifndef BRIGADE_COMM_STREAMS_FUTURE_OF_WORK_H_
#define BRIGADE_COMM_STREAMS_FUTURE_OF_WORK_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace brigade {

// `tensor`: what the work changes. To be kept until the stream that it was
// allocated on has waited for the future: the backend may have let go of it.
// Errors: what Work::getFuture() throws, as of backends that have none. Thread
// safety: any thread.
c10::intrusive_ptr<c10::ivalue::Future> future_of(
    const c10::intrusive_ptr<c10d::Work>& work, const at::Tensor& tensor);

}  // namespace brigade

#endif  // BRIGADE_COMM_STREAMS_FUTURE_OF_WORK_H_
