// What the statuses of all ranks say together.

#ifndef BRIGADE_ENGINE_STATE_STATUS_COMPARISON_H_
#define BRIGADE_ENGINE_STATE_STATUS_COMPARISON_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "brigade/comm/control/rank_status.h"
#include "brigade/comm/control/status_check.h"

namespace brigade {

// What all ranks said, and so the same on every rank but for `deficit`.
struct StatusComparison {
  // OK: all stand in the same place, none has failed. Aborted: ranks have
  // failed. FailedPrecondition: ranks differ.
  absl::Status status;

  // Launches on zeros that bring this rank where the others are. An error on
  // every rank if nothing can bring all of them there.
  absl::StatusOr<LaunchDeficit> deficit;

  // What others have launched in front of a forward, to be launched by this
  // rank before its deficit.
  OpeningTold opening = {};

  int64_t iteration = 0;  // of the rank that is furthest

  // False in all unless they agree.
  ToldAlike alike = {.proposals = false, .orders = false};

  std::vector<RankStatus> by_rank = {};  // if they differ
};

// Throws on all ranks alike, unless all stand in the same place. Errors:
// PeerError if ranks have failed, RuntimeError if they differ.
// `name` begins the text.
void throw_if_apart(const StatusComparison& comparison,
                    const std::string& name);

}  // namespace brigade

#endif  // BRIGADE_ENGINE_STATE_STATUS_COMPARISON_H_
