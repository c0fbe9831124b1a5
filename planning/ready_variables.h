// Which gradients of one iteration are ready.
//
// Variables go by number.
//
// Thread safety: none; the owner serialises calls.

#ifndef BRIGADE_PLANNING_READY_VARIABLES_H_
#define BRIGADE_PLANNING_READY_VARIABLES_H_

#include <cstddef>
#include <vector>

namespace brigade {

class ReadyVariables {
 public:
  explicit ReadyVariables(size_t num_variables) : ready_(num_variables) {}

  bool is_ready(size_t variable) const { return ready_[variable] != 0; }
  void mark(size_t variable) { ready_[variable] = 1; }

  // Ascending.
  std::vector<size_t> missing() const;

 private:
  std::vector<char> ready_;  // not vector<bool>: hot path
};

}  // namespace brigade

#endif  // BRIGADE_PLANNING_READY_VARIABLES_H_
