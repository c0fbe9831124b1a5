// All that a planner sees of a parameter.

#ifndef BRIGADE_PLANNING_PARAMETER_SPEC_H_
#define BRIGADE_PLANNING_PARAMETER_SPEC_H_

#include <cstdint>

namespace brigade {

struct ParameterSpec {
  int64_t size_bytes = 0;  // numel * element size; may be 0
  int kind = 0;            // equal iff dtype and device are equal
  bool sparse = false;     // a sparse gradient always travels alone
};

}  // namespace brigade

#endif  // BRIGADE_PLANNING_PARAMETER_SPEC_H_
