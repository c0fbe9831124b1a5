// What an engine does beside its policy's business: what ranks tell each other
// and when, and how long it waits for them. Its owner decides;
// reducer/reducer_options.h has DDP's.
//
// Thread safety: values.

#ifndef BRIGADE_ENGINE_STATE_ENGINE_OPTIONS_H_
#define BRIGADE_ENGINE_STATE_ENGINE_OPTIONS_H_

#include <chrono>
#include <string>

namespace brigade {

struct EngineOptions {
  // Begins the texts of errors: "Reducer".
  std::string name;

  // Ranks tell each other where they are (docs/protocol.md, "Statuses"). False:
  // a failure ends the group, and peers hear of it from that.
  bool has_control_channel = true;

  // Where all results are on devices: the number of iterations that may be
  // delivered before all ranks are known to have ended them, when the next one
  // begins. From 0 to 32; equal on all ranks.
  int max_unconfirmed_iterations = 1;

  // A rank whose backward fails waits so long for its peers to hear it.
  std::chrono::milliseconds failure_patience;

  // A backward that brings some gradients but not all is an error at its end.
  bool one_backward_per_forward;
};

}  // namespace brigade

#endif  // BRIGADE_ENGINE_STATE_ENGINE_OPTIONS_H_
