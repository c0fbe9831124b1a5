// Texts of a reducer's errors about gradients: expected, found, where, and one
// thing to do.
//
// Thread safety: pure functions.

#ifndef BRIGADE_REDUCER_GRADIENT_ERRORS_H_
#define BRIGADE_REDUCER_GRADIENT_ERRORS_H_

#include <cstddef>
#include <span>
#include <string>

#include "brigade/reducer/collective.h"
#include "brigade/reducer/parameter_table.h"
#include "brigade/reducer/reducer_options.h"

namespace brigade {

std::string describe_missing_gradients(const ParameterTable& table,
                                       std::span<const size_t> variables,
                                       Occasion occasion,
                                       const ReducerOptions& options);
std::string describe_second_gradient(const ParameterTable& table,
                                     size_t parameter, Occasion occasion,
                                     const ReducerOptions& options);
// Of a parameter that the search has found unused: of a forward before the one
// that was searched, say.
std::string describe_gradient_of_unused(const ParameterTable& table,
                                        size_t parameter, Occasion occasion,
                                        const ReducerOptions& options);
// In a static graph: of a parameter that the first iteration did not use.
std::string describe_unexpected_gradient(const ParameterTable& table,
                                         size_t parameter, Occasion occasion);
std::string describe_late_gradient(const ParameterTable& table,
                                   size_t parameter, Occasion occasion);
// Of a backward when no forward has run since iteration `last`.
std::string describe_gradient_without_forward(const ParameterTable& table,
                                              size_t parameter, Occasion last);

}  // namespace brigade

#endif  // BRIGADE_REDUCER_GRADIENT_ERRORS_H_
