// Where one parameter lives in a plan: a bucket, and a slot inside it.

#ifndef BRIGADE_PLANNING_VARIABLE_LOCATOR_H_
#define BRIGADE_PLANNING_VARIABLE_LOCATOR_H_

#include <cstddef>

namespace brigade {

// plan.buckets()[bucket][slot] == parameter index.
struct VariableLocator {
  size_t bucket = 0;
  size_t slot = 0;

  friend bool operator==(const VariableLocator&,
                         const VariableLocator&) = default;
};

}  // namespace brigade

#endif  // BRIGADE_PLANNING_VARIABLE_LOCATOR_H_
