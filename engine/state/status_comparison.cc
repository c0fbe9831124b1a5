#include "brigade/engine/state/status_comparison.h"

#include <c10/util/Exception.h>

#include <exception>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/peer_error.h"

namespace brigade {

// All ranks throw alike, with the same words.
void throw_if_apart(const StatusComparison& comparison,
                    const std::string& name) {
  if (comparison.status.ok()) return;
  std::string text(comparison.status.message());
  if (!comparison.deficit.ok()) {
    absl::StrAppend(&text, "\n", comparison.deficit.status().message());
  }
  if (absl::IsAborted(comparison.status)) {
    throw_peer_error(name, std::make_exception_ptr(std::runtime_error(text)));
  }
  TORCH_CHECK(false, name, ": ", text);
}

}  // namespace brigade
