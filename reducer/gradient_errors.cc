#include "brigade/reducer/gradient_errors.h"

#include <vector>

#include "absl/strings/str_cat.h"

namespace brigade {
namespace {

// Those that no longer require a gradient.
std::vector<size_t> frozen_of(const ParameterTable& table,
                              std::span<const size_t> parameters) {
  std::vector<size_t> frozen;
  for (const size_t i : parameters) {
    if (!table.tensors()[i].requires_grad()) frozen.push_back(i);
  }
  return frozen;
}

const char* cure_of_missing(const ReducerOptions& options, bool all_frozen) {
  if (all_frozen) {
    return "Freeze parameters before the module is wrapped, wrap it again, or "
           "set find_unused_parameters.";
  }
  if (options.static_graph) {
    return "They got one in the first iteration: use them in all iterations, "
           "or clear static_graph.";
  }
  if (options.find_unused_parameters) {
    return "The graph of the outputs reaches them, the loss does not: use "
           "every output of forward() in the loss, or do not return it. A "
           "backward with inputs has to name them, "
           "too.";
  }
  return "Use every output of forward() in the loss, set "
         "find_unused_parameters, or freeze parameters that are not used "
         "before the module is wrapped. A backward with inputs has to name "
         "them, too.";
}

const char* cure_of_second(const ReducerOptions& options) {
  if (options.static_graph) {
    return "Its hook ran more often than in the first iteration: use every "
           "parameter equally often in all iterations, or clear static_graph.";
  }
  return "Run one backward per forward, over the sum of the losses. If "
         "reentrant checkpoints or shared weights use the parameter several "
         "times, set static_graph.";
}

// Programs look for this text of torch's reducer.
std::string torchs_words_of_second(size_t parameter,
                                   const ParameterTable& table) {
  return absl::StrCat(
      "\nExpected to mark a variable ready only once: Parameter at index ",
      parameter,
      table.names().empty()
          ? ""
          : absl::StrCat(" with name ", table.names()[parameter]),
      ".");
}

}  // namespace

std::string describe_missing_gradients(const ParameterTable& table,
                                       std::span<const size_t> variables,
                                       Occasion occasion,
                                       const ReducerOptions& options) {
  const std::vector<size_t> missing = table.parameters_of(variables);
  const std::vector<size_t> frozen = frozen_of(table, missing);
  const bool all_frozen = frozen.size() == missing.size();
  return absl::StrCat(
      "Reducer: ", missing.size(), " of ", table.size(),
      " parameters got no gradient in ", describe(occasion), ": ",
      table.name_of(missing), ".",
      frozen.empty() ? ""
                     : absl::StrCat(" Frozen since the module was wrapped: ",
                                    table.name_of(frozen), "."),
      "\n", cure_of_missing(options, all_frozen));
}

std::string describe_second_gradient(const ParameterTable& table,
                                     size_t parameter, Occasion occasion,
                                     const ReducerOptions& options) {
  return absl::StrCat("Reducer: the gradient of ", table.name_of(parameter),
                      " became ready twice in ", describe(occasion),
                      "; its bucket may already have been reduced.\n",
                      cure_of_second(options),
                      torchs_words_of_second(parameter, table));
}

std::string describe_gradient_of_unused(const ParameterTable& table,
                                        size_t parameter, Occasion occasion,
                                        const ReducerOptions& options) {
  return absl::StrCat(
      "Reducer: backward reached ", table.name_of(parameter), " in ",
      describe(occasion),
      ", which the outputs of the last forward do not depend on; its bucket "
      "may already have been reduced.\nGive each forward a backward of its "
      "own, under no_sync() all but the last. If a reentrant checkpoint hides "
      "the parameter from the search for unused ones, set static_graph.",
      torchs_words_of_second(parameter, table));
}

std::string describe_unexpected_gradient(const ParameterTable& table,
                                         size_t parameter, Occasion occasion) {
  return absl::StrCat(
      "Reducer: ", table.name_of(parameter), " was reached by backward in ",
      describe(occasion),
      ", but not in the first iteration; its bucket may already have been "
      "reduced.\nUse the same parameters in all iterations, or clear "
      "static_graph.");
}

std::string describe_late_gradient(const ParameterTable& table,
                                   size_t parameter, Occasion occasion) {
  return absl::StrCat(
      "Reducer: a second backward reached ", table.name_of(parameter),
      " after ", describe(occasion),
      " was over (reduced, or aborted after an error); its gradient would be "
      "added on this rank alone.\nRun a new forward for it, or both losses in "
      "one backward.");
}

std::string describe_gradient_without_forward(const ParameterTable& table,
                                              size_t parameter, Occasion last) {
  return absl::StrCat(
      "Reducer: expected each backward to go through a forward of the wrapper, "
      "found a gradient of ",
      table.name_of(parameter), " and no forward after ", describe(last),
      ": it stays on this rank, and replicas drift apart.\nCall the wrapper, "
      "and not the module that it wraps; under no_sync() for gradients of this "
      "rank alone.");
}

}  // namespace brigade
