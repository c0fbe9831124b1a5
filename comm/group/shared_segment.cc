#include "brigade/comm/group/shared_segment.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <cstring>
#include <ctime>
#include <fstream>
#include <functional>
#include <optional>
#include <random>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "brigade/comm/group/group_collectives.h"

namespace brigade {
namespace {

using std::chrono::steady_clock;

constexpr std::chrono::milliseconds kLivenessInterval{100};

constexpr size_t kAlignment = 64;

constexpr size_t aligned(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// std::atomic::wait() uses futexes that are private to a process.
void futex(std::atomic<uint32_t>& word, int operation, uint32_t value,
           const timespec* timeout) {
  static_assert(std::atomic<uint32_t>::is_always_lock_free);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value,
          timeout, nullptr, 0);
}

std::optional<std::string> target_of(const std::string& link) {
  std::array<char, 256> target;
  const ssize_t length = readlink(link.c_str(), target.data(), target.size());
  if (length < 0 || length == static_cast<ssize_t>(target.size())) return {};
  return std::string(target.data(), static_cast<size_t>(length));
}

std::string memory_name(int64_t nonce) {
  return absl::StrCat("brigade-", nonce);
}

// A memfd, or -1.
int make_memory(int64_t nonce, size_t bytes) {
  const int descriptor = memfd_create(memory_name(nonce).c_str(), MFD_CLOEXEC);
  if (descriptor >= 0 &&
      ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) {
    close(descriptor);
    return -1;
  }
  return descriptor;
}

}  // namespace

// The head of the memory; the ranks' regions follow.
struct SharedSegment::Layout {
  enum class Closing : uint32_t { kOpen, kBegun, kDone };
  struct alignas(kAlignment) Rank {
    std::atomic<uint32_t> count;  // of notify() calls
    std::atomic<uint32_t> num_waiting;
    std::atomic<uint32_t> has_left;
  };

  std::atomic<Closing> closing;
  std::atomic<int32_t> lost;  // rank + 1; 0: none
  std::array<char, 504> reason;
  Rank first;

  static size_t bytes(int num_ranks, size_t bytes_per_rank) {
    return sizeof(Layout) +
           num_ranks * (sizeof(Rank) + aligned(bytes_per_rank));
  }
  Rank& of(int rank) { return (&first)[rank]; }
  bool is_closed() const {
    return closing.load(std::memory_order_acquire) == Closing::kDone;
  }
};

// This process's mapping of the memory, and pidfds of its peers. A forked child
// has the descriptors but not the memory (MADV_DONTFORK).
struct SharedSegment::Mapping {
  std::byte* data = nullptr;
  size_t bytes = 0;
  std::vector<pollfd> pidfds;  // by rank; -1: of this process
  std::vector<int64_t> processes;
  const pid_t process = getpid();

  ~Mapping() {
    if (process != getpid()) return;
    if (data != nullptr) munmap(data, bytes);
    for (const pollfd& peer : pidfds) {
      if (peer.fd >= 0) ::close(peer.fd);
    }
  }

  // Maps the memfd of process `owner`. In another container this PID may be
  // another process: the memfd's name tells them apart.
  bool map(int64_t owner, int64_t owner_descriptor, int64_t nonce,
           size_t bytes_to_map) {
    const std::string path =
        absl::StrCat("/proc/", owner, "/fd/", owner_descriptor);
    if (target_of(path) !=
        absl::StrCat("/memfd:", memory_name(nonce), " (deleted)")) {
      return false;
    }
    const int descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (descriptor < 0) return false;
    const absl::Cleanup close_it = [&] { ::close(descriptor); };
    struct stat status = {};
    if (fstat(descriptor, &status) != 0 ||
        status.st_size != static_cast<off_t>(bytes_to_map)) {
      return false;
    }
    void* const mapped = mmap(nullptr, bytes_to_map, PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_NORESERVE, descriptor, 0);
    if (mapped == MAP_FAILED) return false;
    madvise(mapped, bytes_to_map, MADV_DONTFORK);
    data = static_cast<std::byte*>(mapped);
    bytes = bytes_to_map;
    return true;
  }

  bool watch(std::vector<int64_t> process_by_rank) {
    processes = std::move(process_by_rank);
    for (const int64_t peer : processes) {
      int pidfd = -1;
      if (peer != process) {
        pidfd = static_cast<int>(syscall(SYS_pidfd_open, peer, 0));
        if (pidfd < 0) return false;
      }
      pidfds.push_back({.fd = pidfd, .events = POLLIN, .revents = 0});
    }
    return true;
  }

  // poll() skips negative descriptors.
  std::vector<int> ended_ranks() const {
    std::vector<pollfd> peers = pidfds;
    std::vector<int> dead;
    if (poll(peers.data(), peers.size(), 0) <= 0) return dead;
    for (size_t rank = 0; rank < peers.size(); ++rank) {
      if (peers[rank].revents != 0) dead.push_back(static_cast<int>(rank));
    }
    return dead;
  }
};

int64_t SharedSegment::host() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  const auto network = target_of("/proc/self/ns/net");
  const auto processes = target_of("/proc/self/ns/pid");
  if (!(file >> boot) || !network || !processes) return 0;
  return static_cast<int64_t>(
      std::hash<std::string>()(absl::StrCat(boot, *network, *processes)));
}

std::shared_ptr<SharedSegment> SharedSegment::make(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, size_t bytes_per_rank,
    int64_t host) {
  const int size = group->getSize();
  if (size == 1) return nullptr;
  const size_t bytes = Layout::bytes(size, bytes_per_rank);
  const int64_t nonce = std::random_device()();
  const int descriptor =
      group->getRank() == 0 && host != 0 ? make_memory(nonce, bytes) : -1;
  const absl::Cleanup close_it = [&] {
    if (descriptor >= 0) ::close(descriptor);
  };
  const std::vector<int64_t> numbers = all_gather_ints(
      group,
      {host, getpid(), static_cast<int64_t>(bytes_per_rank), descriptor, nonce},
      "could not exchange host ids");
  std::vector<int64_t> processes;
  for (int rank = 0; rank < size; ++rank) {
    const int64_t* const of_rank = &numbers[rank * 5];
    if (of_rank[0] == 0 || of_rank[0] != numbers[0] ||
        of_rank[2] != numbers[2]) {
      return nullptr;
    }
    processes.push_back(of_rank[1]);
  }
  if (numbers[3] < 0) return nullptr;
  auto map = std::make_unique<Mapping>();
  const bool is_ready = map->map(processes[0], numbers[3], numbers[4], bytes) &&
                        map->watch(processes);
  // A rank that joins this all-gather was alive when watch() opened its pidfd.
  const std::vector<int64_t> ready =
      all_gather_ints(group, {is_ready ? 1 : 0},
                      "could not exchange the result of mapping memory");
  if (std::ranges::find(ready, 0) != ready.end()) return nullptr;
  return std::shared_ptr<SharedSegment>(
      new SharedSegment(*group, std::move(map), bytes_per_rank));
}

SharedSegment::SharedSegment(const c10d::ProcessGroup& group,
                             std::unique_ptr<Mapping> map,
                             size_t bytes_per_rank)
    : rank_(group.getRank()),
      size_(group.getSize()),
      names_(RankNames::of(group)),
      bytes_per_rank_(aligned(bytes_per_rank)),
      map_(std::move(map)) {}

SharedSegment::~SharedSegment() {
  if (map_->process != getpid()) return;
  layout().of(rank_).has_left = 1;
  for (int rank = 0; rank < size_; ++rank) notify(rank);
}

SharedSegment::Layout& SharedSegment::layout() const {
  return *reinterpret_cast<Layout*>(map_->data);
}

std::byte* SharedSegment::region(int rank) const {
  return map_->data + Layout::bytes(size_, 0) + rank * bytes_per_rank_;
}

void SharedSegment::notify(int rank) {
  Layout::Rank& of_rank = layout().of(rank);
  of_rank.count.fetch_add(1);
  if (of_rank.num_waiting.load() > 0) {
    futex(of_rank.count, FUTEX_WAKE, INT_MAX, nullptr);
  }
}

bool SharedSegment::has_left(int rank) const {
  return layout().of(rank).has_left.load() != 0;
}

bool SharedSegment::is_alive(int rank) const {
  if (has_left(rank)) return false;
  pollfd peer = map_->pidfds[rank];
  return peer.fd < 0 || poll(&peer, 1, 0) == 0;
}

void SharedSegment::close(std::string_view reason, int lost) {
  Layout& all = layout();
  auto open = Layout::Closing::kOpen;
  if (!all.closing.compare_exchange_strong(open, Layout::Closing::kBegun)) {
    return;
  }
  all.lost = lost + 1;
  const size_t length = std::min(reason.size(), all.reason.size() - 1);
  std::memcpy(all.reason.data(), reason.data(), length);
  all.closing.store(Layout::Closing::kDone, std::memory_order_release);
  for (int rank = 0; rank < size_; ++rank) notify(rank);
}

bool SharedSegment::is_closed() const { return layout().is_closed(); }

std::string SharedSegment::close_reason() const {
  return is_closed() ? std::string(layout().reason.data()) : std::string();
}

int SharedSegment::lost_rank() const {
  return is_closed() ? layout().lost - 1 : -1;
}

SharedSegment::Seen SharedSegment::look(int rank) const {
  Layout& all = layout();
  Seen seen = {.count = all.of(rank).count.load(),
               .left = -1,
               .is_closed = all.is_closed()};
  for (int other = 0; other < size_; ++other) {
    // A wait on the own region is a wait for any peer to read it.
    const bool is_awaited = rank == rank_ ? other != rank_ : other == rank;
    if (is_awaited && has_left(other)) seen.left = other;
  }
  return seen;
}

bool SharedSegment::sleep(int rank, const Seen& seen, Deadline deadline) {
  TORCH_CHECK(!seen.is_closed, close_reason());
  TORCH_CHECK(seen.left < 0, "rank ", names_[std::max(0, seen.left)],
              " has left");
  const auto now = steady_clock::now();
  if (now >= deadline) return false;
  const std::chrono::nanoseconds left =
      std::min<steady_clock::duration>(deadline - now, kLivenessInterval);
  const timespec timeout = {.tv_sec = 0, .tv_nsec = left.count()};
  Layout::Rank& of_rank = layout().of(rank);
  of_rank.num_waiting.fetch_add(1);
  futex(of_rank.count, FUTEX_WAIT, seen.count, &timeout);
  of_rank.num_waiting.fetch_sub(1);
  if (steady_clock::now() - now >= left) close_if_a_rank_is_dead();
  return true;
}

std::vector<int> SharedSegment::dead_ranks() const {
  std::vector<int> dead = map_->ended_ranks();
  std::erase_if(dead, [&](int rank) { return has_left(rank); });
  return dead;
}

void SharedSegment::close_if_a_rank_is_dead() {
  for (const int rank : dead_ranks()) {
    const std::string reason =
        absl::StrCat("rank ", names_[rank], " (process ", map_->processes[rank],
                     ") has ended");
    close(reason, rank);
    // A rank that died inside close() leaves the segment half closed.
    TORCH_CHECK(is_closed(), reason);
  }
}

}  // namespace brigade
