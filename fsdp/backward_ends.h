// Ends the segments of several models that take part in one backward, the one
// that began last first.
//
// A rank that fails then tells its peers in the segment in which they wait for
// it, and not in an outer one, whose end they reach later.
//
// Thread safety: as hooks/backward_end.h.

#ifndef BRIGADE_FSDP_BACKWARD_ENDS_H_
#define BRIGADE_FSDP_BACKWARD_ENDS_H_

#include <functional>
#include <memory>

namespace brigade {

// As watch_backward_end(). If `on_end` throws, segments that began earlier are
// abandoned, and the exception comes out of backward().
void end_with_backward(std::weak_ptr<void> owner, std::function<void()> on_end,
                       std::function<void()> on_abandoned);

}  // namespace brigade

#endif  // BRIGADE_FSDP_BACKWARD_ENDS_H_
