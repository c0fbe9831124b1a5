#include "brigade/comm/errors/message_of.h"

#include <c10/util/Exception.h>

namespace brigade {

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& known) {
    return known.what_without_backtrace();
  } catch (const std::exception& unknown) {
    return unknown.what();
  } catch (...) {
    return "an unknown exception";
  }
}

}  // namespace brigade
