// What a call throws, in words.

#ifndef BRIGADE_TESTS_FSDP_MESSAGE_OF_CALL_H_
#define BRIGADE_TESTS_FSDP_MESSAGE_OF_CALL_H_

#include <exception>
#include <functional>
#include <string>

#include "brigade/comm/errors/message_of.h"

namespace brigade::testing {

// Empty if it throws nothing.
inline std::string message_of(const std::function<void()>& run) {
  try {
    run();
  } catch (...) {
    return brigade::message_of(std::current_exception());
  }
  return "";
}

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_FSDP_MESSAGE_OF_CALL_H_
