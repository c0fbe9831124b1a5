#include "brigade/comm/errors/peer_error.h"

#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/errors/liveness_probe.h"

namespace brigade {
namespace {

// Ends in one full stop, since more text follows; a text that was cut keeps its
// "...".
std::string as_sentence(std::string text) {
  while (text.ends_with('\n')) text.pop_back();
  if (text.ends_with("...")) return text;
  while (text.ends_with('.')) text.pop_back();
  return text + '.';
}

template <typename... Errors>
bool is_any_of(const std::exception& error) {
  return (... || (dynamic_cast<const Errors*>(&error) != nullptr));
}

// Rethrows `cause` if it passes unchanged.
std::string message_of_cause(const std::exception_ptr& cause) {
  if (!cause) return "unknown error";
  try {
    std::rethrow_exception(cause);
  } catch (const std::exception& error) {
    if (is_any_of<PeerError, c10::ValueError, c10::TypeError, c10::IndexError,
                  c10::NotImplementedError, c10::OutOfMemoryError,
                  c10::AcceleratorError>(error)) {
      throw;
    }
  } catch (...) {
    // Of another type.
  }
  return message_of(cause);
}

}  // namespace

void throw_peer_error(std::string_view context, const std::exception_ptr& cause,
                      const LivenessProbe* liveness_probe) {
  std::string message = as_sentence(message_of_cause(cause));
  if (!context.empty()) message = std::string(context) + ": " + message;
  if (liveness_probe != nullptr)
    message += ' ' + liveness_probe->describe() + '.';
  throw PeerError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                  std::move(message));
}

}  // namespace brigade
