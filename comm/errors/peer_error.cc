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

// Rethrows `cause` if it passes unchanged.
std::string message_of_cause(const std::exception_ptr& cause) {
  if (!cause) return "unknown error";
  try {
    std::rethrow_exception(cause);
  } catch (const PeerError&) {
    throw;
  } catch (const c10::ValueError&) {
    throw;
  } catch (const c10::TypeError&) {
    throw;
  } catch (const c10::IndexError&) {
    throw;
  } catch (const c10::NotImplementedError&) {
    throw;
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::AcceleratorError&) {
    throw;
  } catch (...) {
    return message_of(cause);
  }
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
