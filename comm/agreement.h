// Comparison of parameters or options across ranks: either all ranks continue,
// or all throw the same error.

#ifndef BRIGADE_COMM_AGREEMENT_H_
#define BRIGADE_COMM_AGREEMENT_H_

#include <span>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "absl/status/status.h"

namespace brigade {

// Collective. Compares `items`, this rank's items in order, as "name: value".
// `item_name` ("Reducer: parameter") is equal on all ranks. `local_status` is
// an error that this rank has found by itself; its peers throw it too.
//
// Costs an all-gather of 24 bytes per rank if all ranks agree; otherwise also
// one of a hash per item and one of a text. A world of 1 communicates nothing.
// All ranks run the same build.
//
// Errors:
//   c10::ValueError  with the same text on every rank: the messages of the
//                    statuses that are not OK, with rank numbers unless all are
//                    equal; or the first item that differs, its value on each
//                    rank, and the counts if they differ.
//   PeerError        an all-gather failed.
void require_agreement(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                       std::string_view item_name,
                       std::span<const std::string> items,
                       const absl::Status& local_status);

}  // namespace brigade

#endif  // BRIGADE_COMM_AGREEMENT_H_
