#include "brigade/reducer/error_texts.h"

#include "absl/strings/str_cat.h"

namespace brigade {
namespace {

const char* cure_of_missing(const ReducerOptions& options) {
  if (options.static_graph) {
    return "They got one in the first iteration: use them in all iterations, "
           "or clear static_graph.";
  }
  if (options.find_unused_parameters) {
    return "The graph of the outputs reaches them, the loss does not: use "
           "every output of forward() in the loss, do not return it, or pass "
           "the outputs through tie_outputs().";
  }
  return "Use every output of forward() in the loss, set "
         "find_unused_parameters, or leave parameters that are not used out of "
         "the reducer.";
}

const char* cure_of_second(const ReducerOptions& options) {
  if (options.static_graph) {
    return "Its hook fired more often than in the first iteration: use every "
           "parameter equally often in all iterations, or clear static_graph.";
  }
  if (options.find_unused_parameters) {
    return "Run one backward per prepare_for_backward(), over the sum of the "
           "losses. If a reentrant checkpoint hides the parameter from the "
           "search for unused ones, set static_graph.";
  }
  return "Run one backward per prepare_for_backward(), over the sum of the "
         "losses. If reentrant checkpoints or shared weights use the parameter "
         "several times, set static_graph.";
}

}  // namespace

std::string describe(Occasion occasion) {
  return absl::StrCat("iteration ", occasion.iteration, " on rank ",
                      occasion.rank);
}

std::string describe_missing_gradients(const ParameterTable& table,
                                       std::span<const size_t> missing,
                                       Occasion occasion,
                                       const ReducerOptions& options) {
  return absl::StrCat("Reducer::prepare_for_backward: ", missing.size(), " of ",
                      table.size(), " parameters got no gradient in ",
                      describe(occasion), ": ", table.name_of(missing), ".\n",
                      cure_of_missing(options));
}

std::string describe_second_gradient(const ParameterTable& table,
                                     size_t parameter, Occasion occasion,
                                     const ReducerOptions& options) {
  return absl::StrCat("Reducer: the gradient of ", table.name_of(parameter),
                      " became ready twice in ", describe(occasion),
                      "; its bucket may already have been reduced.\n",
                      cure_of_second(options));
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
      " was over (reduced, or given up after an error); its gradient would be "
      "added on this rank alone.\nCall prepare_for_backward() on the outputs "
      "of "
      "a new forward, or run both losses in one backward.");
}

std::string describe_bucket(const ParameterTable& table,
                            std::span<const size_t> parameters, size_t bucket,
                            size_t num_buckets, Occasion occasion) {
  return absl::StrCat("bucket ", bucket, " of ", num_buckets, " (",
                      table.name_of(parameters), ") in ", describe(occasion));
}

}  // namespace brigade
