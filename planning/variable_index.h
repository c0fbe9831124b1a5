// Which parameter of which local replica.
//
// A process may hold several replicas of a module, one per device for instance;
// a parameter has one index, and a variable for each replica.

#ifndef BRIGADE_PLANNING_VARIABLE_INDEX_H_
#define BRIGADE_PLANNING_VARIABLE_INDEX_H_

#include <cstddef>

namespace brigade {

struct VariableIndex {
  size_t replica = 0;
  size_t parameter = 0;

  friend bool operator==(const VariableIndex&, const VariableIndex&) = default;
};

}  // namespace brigade

#endif  // BRIGADE_PLANNING_VARIABLE_INDEX_H_
