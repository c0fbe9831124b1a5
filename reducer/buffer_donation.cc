#include "brigade/reducer/buffer_donation.h"

namespace brigade {
namespace {

// Each write in place adds to the version. Memory that cannot be resized is
// seen by another library, NumPy for instance, which holds no reference to it.
bool is_as_autograd_made_it(const at::Tensor& gradient) {
  return gradient._version() == 0 && gradient.use_count() == 1 &&
         gradient.storage().use_count() == 1 && gradient.storage().resizable();
}

}  // namespace

BufferDonation::BufferDonation(const at::Tensor& flat) {
  if (!flat.is_cpu()) return;
  storage_ = flat.storage();
  memory_ = storage_.data();
  own_references_ = storage_.use_count();
}

bool BufferDonation::give(const at::Tensor& gradient, const at::Tensor& view) {
  if (!is_as_autograd_made_it(gradient)) return false;
  gradient.set_data(view);
  gradient.unsafeGetTensorImpl()->bump_version();
  given_ = true;
  return true;
}

bool BufferDonation::is_taken() const {
  if (!given_) return false;
  if (storage_.use_count() != own_references_ || storage_.data() != memory_) {
    return true;
  }
  // Counting down pairs with whoever, on any thread, gave up the last
  // reference.
  { const c10::Storage counted = storage_; }
  return false;
}

void BufferDonation::leave(const at::Tensor& flat) {
  const int num_left = num_left_ + 1;
  *this = num_left < kMaxLeft ? BufferDonation(flat) : BufferDonation();
  num_left_ = num_left;
}

}  // namespace brigade
