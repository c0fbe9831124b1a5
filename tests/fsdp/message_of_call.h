// What a call throws, in words.

#ifndef BRIGADE_TESTS_FSDP_MESSAGE_OF_CALL_H_
#define BRIGADE_TESTS_FSDP_MESSAGE_OF_CALL_H_

#include <c10/util/Exception.h>

#include <exception>
#include <functional>
#include <string>

namespace brigade::testing {

// Empty if it throws nothing.
inline std::string message_of(const std::function<void()>& run) {
  try {
    run();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_FSDP_MESSAGE_OF_CALL_H_
