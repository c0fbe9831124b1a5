#include "brigade/reducer/gradient_errors.h"

#include <vector>

#include "absl/strings/str_cat.h"

namespace brigade {
namespace {

// Returns the parameters that no longer require a gradient.
std::vector<size_t> frozen_of(const ParameterTable& table,
                              std::span<const size_t> parameters) {
  std::vector<size_t> frozen;
  for (const size_t i : parameters) {
    if (!table.tensors()[i].requires_grad()) frozen.push_back(i);
  }
  return frozen;
}

const char* remedy_of_missing(const ReducerOptions& options, bool all_frozen) {
  if (all_frozen) {
    return "Freeze parameters before the module is wrapped, wrap it again, or "
           "set find_unused_parameters.";
  }
  if (options.static_graph) {
    return "They got a gradient in the first iteration: use them in all "
           "iterations, or clear static_graph.";
  }
  if (options.find_unused_parameters) {
    return "The outputs of forward() depend on them, the loss does not: use "
           "every output in the loss, or do not return it. If you call "
           "backward(inputs=...), list them there.";
  }
  return "Use every output of forward() in the loss, set "
         "find_unused_parameters, or freeze unused parameters before the "
         "module is wrapped. If you call backward(inputs=...), list them "
         "there.";
}

const char* remedy_of_second(const ReducerOptions& options) {
  if (options.static_graph) {
    return "Its hook ran more often than in the first iteration: use every "
           "parameter the same number of times in all iterations, or clear "
           "static_graph.";
  }
  return "Run one backward per forward, over the sum of the losses. If "
         "reentrant checkpoints or shared weights use the parameter several "
         "times, set static_graph.";
}

// Beginning of torch's error, for which programs search.
std::string torch_text_of_second(size_t parameter,
                                 const ParameterTable& table) {
  return absl::StrCat(
      "Expected to mark a variable ready only once. Parameter at index ",
      parameter,
      table.names().empty()
          ? ""
          : absl::StrCat(" with name ", table.names()[parameter]),
      " has been marked as ready twice.\n");
}

}  // namespace

std::string describe_missing_gradients(const ParameterTable& table,
                                       std::span<const size_t> variables,
                                       IterationId id,
                                       const ReducerOptions& options) {
  const std::vector<size_t> missing = table.parameters_of(variables);
  const std::vector<size_t> frozen = frozen_of(table, missing);
  const bool all_frozen = frozen.size() == missing.size();
  return absl::StrCat(
      "Reducer: ", missing.size(), " of ", table.size(),
      " parameters got no gradient in ", describe(id), ": ",
      table.name_of(missing), ".",
      frozen.empty() ? ""
                     : absl::StrCat(" Frozen since the module was wrapped: ",
                                    table.name_of(frozen), "."),
      "\n", remedy_of_missing(options, all_frozen));
}

std::string describe_second_gradient(const ParameterTable& table,
                                     size_t parameter, IterationId id,
                                     const ReducerOptions& options) {
  return absl::StrCat(torch_text_of_second(parameter, table),
                      "Reducer: the gradient of ", table.name_of(parameter),
                      " became ready twice in ", describe(id),
                      "; its bucket may already have been reduced.\n",
                      remedy_of_second(options));
}

std::string describe_gradient_of_unused(const ParameterTable& table,
                                        size_t parameter, IterationId id) {
  return absl::StrCat(
      torch_text_of_second(parameter, table), "Reducer: backward reached ",
      table.name_of(parameter), " in ", describe(id),
      ", which the outputs of the last forward do not depend on; its bucket "
      "may already have been reduced.\nRun one backward after each forward, "
      "and all but the last under no_sync(). If only the loss uses the "
      "parameter, use it in forward or clear find_unused_parameters. If a "
      "reentrant checkpoint hides it, set static_graph.");
}

std::string describe_unexpected_gradient(const ParameterTable& table,
                                         size_t parameter, IterationId id) {
  return absl::StrCat(
      "Reducer: ", table.name_of(parameter), " was reached by backward in ",
      describe(id),
      ", but not in the first iteration; its bucket may already have been "
      "reduced.\nUse the same parameters in all iterations, or clear "
      "static_graph.");
}

std::string describe_late_gradient(const ParameterTable& table,
                                   size_t parameter, IterationId id) {
  return absl::StrCat(
      "Reducer: backward reached ", table.name_of(parameter), " again after ",
      describe(id),
      " was reduced (or aborted after an error).\nCall backward() once per "
      "forward, before the next forward; or sum the losses and call it once; "
      "or run all but the last forward and backward under no_sync().");
}

std::string describe_gradient_without_forward(const ParameterTable& table,
                                              size_t parameter,
                                              IterationId last) {
  return absl::StrCat(
      "Reducer: backward ran without a forward of the DistributedDataParallel "
      "(first gradient: ",
      table.name_of(parameter), ", after ", describe(last),
      "). It does not average these gradients; the ranks diverge unless "
      "another wrapper does.\nCall the DistributedDataParallel, not its "
      "module; "
      "or use no_sync().");
}

}  // namespace brigade
