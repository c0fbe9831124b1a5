#include "brigade/comm/ordered/host_outbox.h"

#include <cstring>
#include <utility>

namespace brigade {
namespace {

constexpr size_t kAlignment = 64;

constexpr size_t aligned(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

HostOutbox::HostOutbox(SharedMemory memory) : memory_(std::move(memory)) {}

size_t HostOutbox::bytes_with_room_for(size_t bytes) {
  return aligned(sizeof(Head)) + aligned(bytes);
}

void HostOutbox::set_state(State state) {
  State open = State::kOpen;
  if (!head().state.compare_exchange_strong(open, state) &&
      state == State::kFailed) {
    head().state = state;
  }
}

bool HostOutbox::is_free(Key key) const {
  return place(key).num_unread.load(std::memory_order_acquire) == 0;
}

bool HostOutbox::post(Key key, uint64_t tag, int num_readers,
                      std::span<const std::span<const std::byte>> pieces) {
  size_t bytes = 0;
  for (const auto& piece : pieces) bytes += piece.size();
  Place& posted = place(key);
  const std::optional<size_t> offset = take_room(key, num_readers, bytes);
  posted.tag = tag;
  posted.offset = offset ? static_cast<int64_t>(*offset) : -1;
  if (offset) {
    std::byte* to = memory_.data() + *offset;
    for (const auto& piece : pieces) {
      if (!piece.empty()) std::memcpy(to, piece.data(), piece.size());
      to += piece.size();
    }
  }
  posted.number.store(key.number, std::memory_order_release);
  return offset.has_value();
}

std::optional<HostOutbox::Post> HostOutbox::find(Key key) const {
  const Place& posted = place(key);
  if (posted.number.load(std::memory_order_acquire) != key.number) return {};
  return Post{
      .tag = posted.tag,
      .data = posted.offset < 0 ? nullptr : memory_.data() + posted.offset};
}

void HostOutbox::release(Key key) const {
  if (place(key).num_unread.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    signal().raise();
  }
}

// Its place may have been taken by a later one since. Its number is looked at
// first: who wrote it has written the data.
bool HostOutbox::is_read(Key key) const {
  const uint64_t number = place(key).number.load(std::memory_order_acquire);
  return number > key.number || (number == key.number && is_free(key));
}

// The lowest that is free, so that memory is used again while it is warm.
std::optional<size_t> HostOutbox::take_room(Key key, int num_readers,
                                            size_t bytes) {
  bytes = aligned(bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(blocks_,
                [&](const auto& block) { return is_read(block.second.key); });
  place(key).num_unread.store(num_readers);  // so it is not read yet
  size_t offset = aligned(sizeof(Head));
  for (const auto& [begin, block] : blocks_) {
    if (begin - offset >= bytes) break;
    offset = begin + block.bytes;
  }
  if (memory_.size() - offset < bytes) return std::nullopt;
  if (bytes > 0) blocks_.emplace(offset, Block{.bytes = bytes, .key = key});
  return offset;
}

}  // namespace brigade
