// A socket that is closed when its owner ends.
//
// Thread safety: none.

#ifndef BRIGADE_COMM_CONTROL_OWNED_SOCKET_H_
#define BRIGADE_COMM_CONTROL_OWNED_SOCKET_H_

#include <unistd.h>

#include <utility>

namespace brigade {

class OwnedSocket {
 public:
  OwnedSocket() = default;
  explicit OwnedSocket(int descriptor) : descriptor_(descriptor) {}
  ~OwnedSocket() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  OwnedSocket(OwnedSocket&& other) noexcept
      : descriptor_(std::exchange(other.descriptor_, -1)) {}
  OwnedSocket& operator=(OwnedSocket&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }

  int get() const { return descriptor_; }  // < 0: none

 private:
  int descriptor_ = -1;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_CONTROL_OWNED_SOCKET_H_
