// Texts of a reducer's errors about gradients.
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
                                       IterationId id,
                                       const ReducerOptions& options);
std::string describe_second_gradient(const ParameterTable& table,
                                     size_t parameter, IterationId id,
                                     const ReducerOptions& options);
// Of a parameter that find_unused_parameters found unused. For example, the
// backward is of an earlier forward than the last.
std::string describe_gradient_of_unused(const ParameterTable& table,
                                        size_t parameter, IterationId id);
// Of a parameter that the first iteration of a static graph did not use.
std::string describe_unexpected_gradient(const ParameterTable& table,
                                         size_t parameter, IterationId id);
// Of a second backward through the outputs of iteration `id`, which is over.
std::string describe_late_gradient(const ParameterTable& table,
                                   size_t parameter, IterationId id);
// Of a backward without a forward since iteration `last`.
std::string describe_gradient_without_forward(const ParameterTable& table,
                                              size_t parameter,
                                              IterationId last);

}  // namespace brigade

#endif  // BRIGADE_REDUCER_GRADIENT_ERRORS_H_
