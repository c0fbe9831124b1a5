// Checks that all ranks hold the same parameters or options: either every rank
// goes on, or every rank throws the same error.

#ifndef BRIGADE_COMM_AGREEMENT_H_
#define BRIGADE_COMM_AGREEMENT_H_

#include <span>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "absl/status/status.h"

namespace brigade {

// Collective: all ranks call it with the same `what`, the name of one item
// ("parameter"). `items` describes this rank's items in order. `local_status`
// is the error that this rank has found by itself, so that its peers learn of
// it.
//
// One all-gather of 24 bytes per rank if all agree; otherwise one of a hash per
// item, and one of a text. Communicates nothing in a world of 1. Ranks run the
// same build.
//
// Errors:
//   c10::ValueError  the same text on every rank. If a rank's `local_status`
//                    is not OK: its message, with the rank's number unless all
//                    ranks have the same. If items differ: the first one that
//                    does, and each rank's; counts, if they differ.
//   PeerError        the exchange itself failed.
void require_agreement(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                       std::string_view what,
                       std::span<const std::string> items,
                       const absl::Status& local_status);

}  // namespace brigade

#endif  // BRIGADE_COMM_AGREEMENT_H_
