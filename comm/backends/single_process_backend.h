// The backend of a world of 1.

#ifndef BRIGADE_COMM_BACKENDS_SINGLE_PROCESS_BACKEND_H_
#define BRIGADE_COMM_BACKENDS_SINGLE_PROCESS_BACKEND_H_

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace brigade {

// Answers every collective at once, on the calling thread and stream, for
// tensors of any device. Has no send and receive. Thread safety: any thread.
c10::intrusive_ptr<c10d::Backend> make_single_process_backend();

}  // namespace brigade

#endif  // BRIGADE_COMM_BACKENDS_SINGLE_PROCESS_BACKEND_H_
