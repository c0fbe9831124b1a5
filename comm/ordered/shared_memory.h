// Memory that processes of one host share: one makes it, others map it by an
// address that it tells them.  It is the system's again when all have let go of
// it, however they end.
//
// Thread safety: const methods are safe.

#ifndef BRIGADE_COMM_ORDERED_SHARED_MEMORY_H_
#define BRIGADE_COMM_ORDERED_SHARED_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <optional>

namespace brigade {

class SharedMemory {
 public:
  // What a peer needs to map it; may travel as bytes.  Of this host, as others
  // know it: two containers, or network namespaces, are two hosts.
  struct Address {
    int64_t process;
    int64_t descriptor;
    uint64_t bytes;  // 0: there is none
    uint64_t nonce[2];
    uint64_t host;
  };

  // Equal for processes that may share memory, and would talk over loopback.
  // 0: this one can't.
  static uint64_t host();

  // Zeros, of which the system keeps what was written to only.  None where it
  // refuses.
  static std::optional<SharedMemory> make(size_t bytes);

  // None if it can't be reached from here.
  static std::optional<SharedMemory> map(const Address& address);

  ~SharedMemory();
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  SharedMemory& operator=(SharedMemory&&) = delete;

  const Address& address() const { return address_; }
  // From here on it can't be mapped by others.
  void close_address();

  std::byte* data() const { return data_; }
  size_t size() const { return address_.bytes; }

 private:
  SharedMemory(int descriptor, const Address& address, std::byte* data)
      : descriptor_(descriptor), address_(address), data_(data) {}

  int descriptor_;  // -1: closed
  Address address_;
  std::byte* data_;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_ORDERED_SHARED_MEMORY_H_
