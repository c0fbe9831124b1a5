// Function types of programs that make a vendor's backend.

#ifndef BRIGADE_COMM_BACKENDS_BACKEND_PLACE_H_
#define BRIGADE_COMM_BACKENDS_BACKEND_PLACE_H_

#include <chrono>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace brigade {

// The group of a backend and this rank's place in it. The store is the
// backend's own.
struct BackendPlace {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int world_size = 1;
  std::chrono::milliseconds timeout;
  std::string group_name;
};

using MakeBackend =
    std::function<c10::intrusive_ptr<c10d::Backend>(const BackendPlace&)>;

}  // namespace brigade

#endif  // BRIGADE_COMM_BACKENDS_BACKEND_PLACE_H_
