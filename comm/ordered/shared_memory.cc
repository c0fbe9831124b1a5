#include "brigade/comm/ordered/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace brigade {
namespace {

std::optional<std::string> target_of(const std::string& link) {
  std::array<char, 256> target;
  const ssize_t length = readlink(link.c_str(), target.data(), target.size());
  if (length < 0 || length == static_cast<ssize_t>(target.size())) return {};
  return std::string(target.data(), static_cast<size_t>(length));
}

std::string name_of(const SharedMemory::Address& address) {
  return absl::StrFormat("brigade-%016x%016x", address.nonce[0],
                         address.nonce[1]);
}

std::byte* map_descriptor(int descriptor, size_t bytes) {
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  if (data == MAP_FAILED) return nullptr;
  // A child neither reads it nor is to keep it alive.
  madvise(data, bytes, MADV_DONTFORK);
  return static_cast<std::byte*>(data);
}

}  // namespace

uint64_t SharedMemory::host() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  const auto network = target_of("/proc/self/ns/net");
  const auto processes = target_of("/proc/self/ns/pid");
  if (!(file >> boot) || !network || !processes) return 0;
  return std::hash<std::string>()(absl::StrCat(boot, *network, *processes));
}

std::optional<SharedMemory> SharedMemory::make(size_t bytes) {
  std::random_device random;
  const auto draw = [&] {
    return static_cast<uint64_t>(random()) << 32 | random();
  };
  Address address = {.process = getpid(),
                     .descriptor = -1,
                     .bytes = bytes,
                     .nonce = {draw(), draw()},
                     .host = host()};
  if (address.host == 0) return std::nullopt;
  const int descriptor = memfd_create(name_of(address).c_str(), MFD_CLOEXEC);
  if (descriptor < 0) return std::nullopt;
  address.descriptor = descriptor;
  absl::Cleanup close_it = [&] { close(descriptor); };
  if (ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) {
    return std::nullopt;
  }
  std::byte* const data = map_descriptor(descriptor, bytes);
  if (data == nullptr) return std::nullopt;
  std::move(close_it).Cancel();
  return SharedMemory(descriptor, address, data);
}

std::optional<SharedMemory> SharedMemory::map(const Address& address) {
  if (address.bytes == 0 || address.host != host()) {
    return std::nullopt;
  }
  const std::string path =
      absl::StrCat("/proc/", address.process, "/fd/", address.descriptor);
  // Another process of that number may have anything there.
  if (target_of(path) !=
      absl::StrCat("/memfd:", name_of(address), " (deleted)")) {
    return std::nullopt;
  }
  const int descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return std::nullopt;
  const absl::Cleanup close_it = [&] { close(descriptor); };
  struct stat status = {};
  if (fstat(descriptor, &status) != 0 ||
      status.st_size != static_cast<off_t>(address.bytes)) {
    return std::nullopt;
  }
  std::byte* const data = map_descriptor(descriptor, address.bytes);
  if (data == nullptr) return std::nullopt;
  return SharedMemory(-1, address, data);
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      address_(other.address_),
      data_(std::exchange(other.data_, nullptr)) {}

SharedMemory::~SharedMemory() {
  close_address();
  if (data_ != nullptr) munmap(data_, size());
}

void SharedMemory::close_address() {
  if (descriptor_ >= 0) close(std::exchange(descriptor_, -1));
}

}  // namespace brigade
