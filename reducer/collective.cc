#include "brigade/reducer/collective.h"

#include <c10/util/Exception.h>

#include <typeinfo>

#include "absl/strings/str_cat.h"

namespace brigade {

std::string describe(Occasion occasion) {
  return absl::StrCat("iteration ", occasion.iteration, " on rank ",
                      occasion.rank);
}

Failure failure_of(Occasion occasion, ErrorSource source,
                   Collective& collective) {
  return {
      .error = std::current_exception(),
      .source = source,
      .collective = &collective,
      .where = absl::StrCat("Reducer: ", describe_place(collective, occasion))};
}

bool is_peer_failure(const Failure& failure) {
  const bool by_network_only = failure.collective->fails_by_network_only();
  try {
    std::rethrow_exception(failure.error);
  } catch (const c10::DistBackendError&) {
    return true;
  } catch (const c10::Error& known) {
    return by_network_only && failure.source != ErrorSource::kDelivery &&
           typeid(known) == typeid(c10::Error);
  } catch (...) {
    return failure.source == ErrorSource::kFuture ||
           (by_network_only && failure.source == ErrorSource::kHook);
  }
}

void rethrow_hook_error(const Failure& failure) {
  try {
    std::rethrow_exception(failure.error);
  } catch (c10::Error& known) {
    known.add_context(failure.where);
    throw;
  } catch (const std::exception& unknown) {
    TORCH_CHECK(false, failure.where,
                ": the comm hook threw: ", unknown.what());
  } catch (...) {
    TORCH_CHECK(false, failure.where,
                ": the comm hook threw an unknown exception");
  }
}

std::string describe_place(const Collective& collective, Occasion occasion) {
  return absl::StrCat(collective.describe(), " in ", describe(occasion));
}

}  // namespace brigade
