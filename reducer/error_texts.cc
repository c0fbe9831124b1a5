#include "brigade/reducer/error_texts.h"

#include "absl/strings/str_cat.h"

namespace brigade {
namespace {

std::string when_and_where(Occasion occasion) {
  return absl::StrCat("iteration ", occasion.iteration, " on rank ",
                      occasion.rank);
}

}  // namespace

std::string describe_missing_gradients(const ParameterTable& table,
                                       std::span<const size_t> missing,
                                       Occasion occasion) {
  return absl::StrCat(
      "Reducer::prepare_for_backward: ", missing.size(), " of ", table.size(),
      " parameters got no gradient in ", when_and_where(occasion), ": ",
      table.name_of(missing),
      ".\nUse every output of forward() in the loss, or leave parameters that "
      "are not used out of the reducer.");
}

std::string describe_second_gradient(const ParameterTable& table,
                                     size_t parameter, Occasion occasion) {
  return absl::StrCat(
      "Reducer: the gradient of ", table.name_of(parameter),
      " became ready twice in ", when_and_where(occasion),
      "; its bucket may already have been reduced.\nRun one backward per "
      "prepare_for_backward(), over the sum of the losses.");
}

std::string describe_late_gradient(const ParameterTable& table,
                                   size_t parameter, Occasion occasion) {
  return absl::StrCat(
      "Reducer: a second backward reached ", table.name_of(parameter),
      " after ", when_and_where(occasion),
      " was over (reduced, or given up after an error); its gradient would be "
      "added on this rank alone.\nCall prepare_for_backward() on the outputs "
      "of "
      "a new forward, or run both losses in one backward.");
}

std::string describe_bucket(const ParameterTable& table,
                            std::span<const size_t> parameters, size_t bucket,
                            size_t num_buckets, Occasion occasion) {
  return absl::StrCat("bucket ", bucket, " of ", num_buckets, " (",
                      table.name_of(parameters), ") in ",
                      when_and_where(occasion));
}

}  // namespace brigade
