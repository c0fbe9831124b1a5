// Ends a group's use: a group in which a collective failed is dead, and peers
// that wait for this rank shall learn it now, not at their timeout.

#ifndef BRIGADE_COMM_CLOSE_GROUP_H_
#define BRIGADE_COMM_CLOSE_GROUP_H_

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace brigade {

// Closes the connections of all of the group's backends, as far as these can:
// Gloo's (torch's own class too, whose abort() can't) and what abort() ends.
// Aborts its ordered collectives (comm/ordered/ordered_collectives.h). Does not
// throw.
void close_group(c10d::ProcessGroup& group) noexcept;

}  // namespace brigade

#endif  // BRIGADE_COMM_CLOSE_GROUP_H_
