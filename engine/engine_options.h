#ifndef BRIGADE_ENGINE_ENGINE_OPTIONS_H_
#define BRIGADE_ENGINE_ENGINE_OPTIONS_H_

#include <chrono>
#include <string>

namespace brigade {

struct EngineOptions {
  // Begins the texts of errors: "Reducer".
  std::string name;

  // A rank whose backward fails waits so long for its peers to hear it.
  std::chrono::milliseconds failure_patience;

  // A backward that brings some gradients but not all is an error at its end.
  bool one_backward_per_forward;
};

}  // namespace brigade

#endif  // BRIGADE_ENGINE_ENGINE_OPTIONS_H_
