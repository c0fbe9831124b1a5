// What a rank has for the others of its host to read: copies of what it sends,
// in memory that it shares with them.
//
// Posts are told apart by a number, which counts up, and a lane; each is read
// once by every reader.  A post for which there is no room says so, so that
// nobody who posts waits for memory, and readers know to get it otherwise.
//
// Thread safety: posts of a lane come one at a time, in the order of numbers or
// nearly; anything else from any thread of any process.

#ifndef BRIGADE_COMM_ORDERED_HOST_OUTBOX_H_
#define BRIGADE_COMM_ORDERED_HOST_OUTBOX_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>

#include "brigade/comm/ordered/shared_memory.h"
#include "brigade/comm/ordered/shared_signal.h"

namespace brigade {

class HostOutbox {
 public:
  static constexpr size_t kNumLanes = 3;
  struct Key {
    size_t lane;      // < kNumLanes
    uint64_t number;  // > 0
  };
  enum class State : uint32_t {
    kOpen,
    kLeft,    // nothing more comes
    kFailed,  // neither this nor what is there is to be read
  };
  struct Post {
    uint64_t tag;           // as it was posted
    const std::byte* data;  // null: there was no room
  };

  // Of this rank; `memory` is zero. Or of another, which has made it.
  explicit HostOutbox(SharedMemory memory);

  // Bytes of memory for an outbox with room for so many bytes of posts.
  static size_t bytes_with_room_for(size_t bytes);

  // What its owner waits on.
  SharedSignal& signal() const { return head().signal; }

  State state() const { return head().state; }

  // ---- The owner.

  // Once failed, it stays so. The caller raises the readers' signals.
  void set_state(State state);

  // Whether the post that had the same place, some 1,000 before it, was read.
  bool is_free(Key key) const;

  // REQUIRES: is_free(key). `num_readers` > 0.  Returns whether there was room.
  // The caller raises the readers' signals.
  bool post(Key key, uint64_t tag, int num_readers,
            std::span<const std::span<const std::byte>> pieces);

  // ---- A reader.

  // None until it is posted.
  std::optional<Post> find(Key key) const;

  // What it has found is not read any more.
  void release(Key key) const;

 private:
  static constexpr size_t kNumPlaces = 1024;  // of posts, by lane
  struct Place {
    std::atomic<uint64_t> number;  // is written last
    std::atomic<int32_t> num_unread;
    uint64_t tag;
    int64_t offset;  // of the data; < 0: there was no room
  };
  struct Head {
    SharedSignal signal;
    std::atomic<State> state;
    std::array<std::array<Place, kNumPlaces>, kNumLanes> places;
  };
  struct Block {
    size_t bytes;
    Key key;
  };

  Head& head() const { return *reinterpret_cast<Head*>(memory_.data()); }
  Place& place(Key key) const {
    return head().places[key.lane][key.number % kNumPlaces];
  }
  bool is_read(Key key) const;
  std::optional<size_t> take_room(Key key, int num_readers, size_t bytes);

  const SharedMemory memory_;

  std::mutex mutex_;
  std::map<size_t, Block> blocks_;  // by offset; guarded by mutex_
};

}  // namespace brigade

#endif  // BRIGADE_COMM_ORDERED_HOST_OUTBOX_H_
