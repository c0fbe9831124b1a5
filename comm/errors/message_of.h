// What an exception says, whatever kind it is.
//
// Thread safety: pure functions.

#ifndef BRIGADE_COMM_ERRORS_MESSAGE_OF_H_
#define BRIGADE_COMM_ERRORS_MESSAGE_OF_H_

#include <exception>
#include <string>

namespace brigade {

// Without a backtrace.
std::string message_of(const std::exception_ptr& error);

}  // namespace brigade

#endif  // BRIGADE_COMM_ERRORS_MESSAGE_OF_H_
