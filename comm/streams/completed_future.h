// Futures of what the current streams are about to have done.

#ifndef BRIGADE_COMM_STREAMS_COMPLETED_FUTURE_H_
#define BRIGADE_COMM_STREAMS_COMPLETED_FUTURE_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <vector>

namespace brigade {

// Holds a list of the tensors, as a collective's does. Who waits for it is
// behind what the current streams of their devices have been given.
c10::intrusive_ptr<c10::ivalue::Future> completed_future(
    const std::vector<at::Tensor>& tensors);

}  // namespace brigade

#endif  // BRIGADE_COMM_STREAMS_COMPLETED_FUTURE_H_
