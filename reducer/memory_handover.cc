#include "brigade/reducer/memory_handover.h"

namespace brigade {
namespace {

// A gradient that autograd has just made has version 0. Memory that cannot be
// resized is seen by another library, an array of NumPy's for instance, without
// a reference.
bool is_seen_by_nobody_else(const at::Tensor& gradient) {
  return gradient._version() == 0 && gradient.storage().use_count() == 1 &&
         gradient.storage().resizable();
}

bool is_plain(const at::Tensor& gradient, const at::Tensor& view) {
  return gradient.key_set() == view.key_set() &&
         gradient.dtype() == view.dtype();
}

}  // namespace

MemoryHandover::MemoryHandover(const at::Tensor& flat) {
  if (!flat.is_cpu()) return;
  storage_ = flat.storage();
  memory_ = storage_.data();
  own_references_ = storage_.use_count();
}

bool MemoryHandover::give(const at::Tensor& gradient, const at::Tensor& view) {
  if (!is_worth(static_cast<int64_t>(view.nbytes())) ||
      !is_plain(gradient, view) || !is_seen_by_nobody_else(gradient)) {
    return false;
  }
  gradient.set_data(view);
  gradient.unsafeGetTensorImpl()->bump_version();
  given_ = true;
  return true;
}

bool MemoryHandover::is_taken() const {
  if (!given_) return false;
  return storage_.use_count() != own_references_ || storage_.data() != memory_;
}

}  // namespace brigade
