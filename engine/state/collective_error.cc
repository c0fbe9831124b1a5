#include "brigade/engine/state/collective_error.h"

#include <c10/util/Exception.h>

#include <typeinfo>

namespace brigade {

bool is_peer_failure(const std::exception_ptr& error, ErrorSource source,
                     bool fails_by_network_only) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::DistBackendError&) {
    return true;
  } catch (const c10::Error& known) {
    return fails_by_network_only && source != ErrorSource::kDelivery &&
           typeid(known) == typeid(c10::Error);
  } catch (...) {
    return source == ErrorSource::kFuture ||
           (fails_by_network_only && source == ErrorSource::kHook);
  }
}

void rethrow_hook_error(const std::exception_ptr& error,
                        const std::string& where) {
  try {
    std::rethrow_exception(error);
  } catch (c10::Error& known) {
    known.add_context(where);
    throw;
  } catch (const std::exception& unknown) {
    TORCH_CHECK(false, where, ": the comm hook threw: ", unknown.what());
  } catch (...) {
    TORCH_CHECK(false, where, ": the comm hook threw an unknown exception");
  }
}

}  // namespace brigade
