#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "brigade/comm/ordered/ordered_collectives.h"

namespace brigade {
namespace {

using std::chrono::steady_clock;

constexpr size_t kCacheLine = 64;
constexpr size_t kNumSlots = 1024;

// Up to this many bytes from one rank, a single phase is faster than two,
// although it copies and sums W/2 times as much.
constexpr int64_t kOnePhaseBytes = int64_t{1} << 15;

// Bytes that are summed before they are copied: a part of the cache.
constexpr int64_t kBlockBytes = int64_t{1} << 19;

constexpr size_t padded(size_t bytes) {
  return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
}

// A post of a rank: its terms, and later the sum of its own slice.
struct Slot {
  std::atomic<uint64_t> progress;  // 2 * number, + 1 with the sums
  std::atomic<int32_t> num_unread;
  uint64_t tag;
  uint64_t offset;  // of the data in the region
};
struct Head {
  // The first post of the first call that failed on this rank; 0: none.
  std::atomic<uint64_t> first_failed;
  std::array<Slot, kNumSlots> slots;
};

// The posts of all ranks, each rank's in its region of the segment.
class SharedPosts {
 public:
  enum class Phase : uint64_t { kTerms = 0, kSums = 1 };

  explicit SharedPosts(std::shared_ptr<SharedSegment> segment, size_t room)
      : segment_(std::move(segment)), room_(room) {}

  SharedSegment& segment() const { return *segment_; }

  // Allocates memory for a post of this rank; null if there is none now. Posts
  // are allocated in rising order.
  std::byte* take(uint64_t number, size_t bytes, uint64_t tag) {
    if (!has_been_read(number)) return nullptr;
    std::erase_if(blocks_, [&](const auto& block) {
      return has_been_read(block.second.number);
    });
    const size_t block_bytes = padded(std::max<size_t>(1, bytes));
    const std::optional<size_t> offset = find_room(block_bytes);
    if (!offset) return nullptr;
    blocks_.emplace(*offset, Block{.bytes = block_bytes, .number = number});
    Slot& taken = slot(own(), number);
    taken.offset = *offset;
    taken.tag = tag;
    taken.num_unread = segment_->size() - 1;
    return segment_->region(own()) + *offset;
  }

  void publish(uint64_t number, Phase phase) {
    slot(own(), number)
        .progress.store(2 * number + static_cast<uint64_t>(phase),
                        std::memory_order_release);
    segment_->notify();
  }

  std::byte* own_post(uint64_t number) const {
    return segment_->region(own()) + slot(own(), number).offset;
  }

  // Records that the posts from `number` on failed on this rank. They fail on
  // all ranks once the segment is closed.
  void fail_from(uint64_t number) {
    std::atomic<uint64_t>& first = head(own()).first_failed;
    if (first.load() == 0 || number < first.load()) first = number;
  }
  bool has_failed() const { return head(own()).first_failed.load() != 0; }

  // Blocks until the peer's post has reached the phase. Returns its data, or
  // null after the deadline. Errors: as SharedSegment::wait_for(); RuntimeError
  // for a different tag, or for a post that failed on any rank.
  const std::byte* await(int peer, uint64_t number, uint64_t tag, Phase phase,
                         SharedSegment::Deadline deadline) const {
    const Slot& posted = slot(peer, number);
    const uint64_t wanted = 2 * number + static_cast<uint64_t>(phase);
    const bool is_posted = segment_->wait_for(peer, deadline, [&] {
      const uint64_t found = posted.progress.load(std::memory_order_acquire);
      return found / 2 == number && (found >= wanted || posted.tag != tag);
    });
    TORCH_CHECK(!segment_->is_closed() || number < first_failed(),
                segment_->close_reason());
    if (!is_posted) return nullptr;
    TORCH_CHECK(posted.tag == tag, "rank ", segment_->name_of(peer),
                " made another call: expected the same collectives in the same "
                "order on every rank, with equal shapes, dtypes and scales");
    return segment_->region(peer) + posted.offset;
  }

  void release(int peer, uint64_t number) {
    Slot& read = slot(peer, number);
    if (read.num_unread.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      segment_->notify(peer);
    }
  }

 private:
  struct Block {
    size_t bytes;
    uint64_t number;
  };

  int own() const { return segment_->rank(); }
  Head& head(int rank) const {
    return *reinterpret_cast<Head*>(segment_->region(rank));
  }
  Slot& slot(int rank, uint64_t number) const {
    return head(rank).slots[number % kNumSlots];
  }

  // Returns true if all peers have read the own post: its memory and slot are
  // free.
  bool has_been_read(uint64_t number) const {
    const Slot& posted = slot(own(), number);
    const bool is_read = posted.num_unread.load(std::memory_order_acquire) == 0;
    // Orders this after the sums for thread sanitizers too, which see separate
    // mappings of the memory in ranks that are threads.
    posted.progress.load(std::memory_order_acquire);
    return is_read;
  }

  // Returns the lowest failed post of all ranks. A rank may post before it
  // fails: without this, its peers would complete a call that failed there.
  uint64_t first_failed() const {
    if (segment_->lost_rank() >= 0) return 0;
    uint64_t first = std::numeric_limits<uint64_t>::max();
    for (int rank = 0; rank < segment_->size(); ++rank) {
      const uint64_t of_rank = head(rank).first_failed.load();
      if (of_rank > 0) first = std::min(first, of_rank);
    }
    return first;
  }

  // Returns the lowest free offset, so that memory is reused while it is
  // cached.
  std::optional<size_t> find_room(size_t bytes) const {
    size_t offset = padded(sizeof(Head));
    for (const auto& [begin, block] : blocks_) {
      if (begin - offset >= bytes) break;
      offset = begin + block.bytes;
    }
    const size_t end = padded(sizeof(Head)) + room_;
    if (end - offset < bytes) return std::nullopt;
    return offset;
  }

  const std::shared_ptr<SharedSegment> segment_;
  const size_t room_;
  std::map<size_t, Block> blocks_;  // in use, by offset
};

// Partition of a call's elements: each rank sums its slice, in pieces that fit
// into the region. Equal on all ranks.
class Partition {
 public:
  Partition(const OrderedCall& call, int size, size_t room)
      : numel_(call.input.numel()),
        size_(size),
        is_one_phase_(call.kind == OrderedKind::kAllReduce &&
                      (size == 2 ||
                       static_cast<int64_t>(call.input.nbytes()) * (size - 1) <=
                           kOnePhaseBytes)) {
    const int64_t slices = is_one_phase_ ? 1 : size;
    piece_numel_ = std::max<int64_t>(
        1, static_cast<int64_t>(room) / 4 /
               static_cast<int64_t>(call.input.element_size()) / slices);
    num_pieces_ = (slice(0).numel + piece_numel_ - 1) / piece_numel_;
  }

  // Returns true if every rank sums all elements.
  bool is_one_phase() const { return is_one_phase_; }
  int64_t num_pieces() const { return num_pieces_; }

  // Returns a piece of `rank`'s slice; its offset is in the call's elements.
  RankSlice piece(int rank, int64_t index) const {
    const RankSlice of_rank = slice(rank);
    const int64_t offset = std::min(of_rank.numel, index * piece_numel_);
    return {.offset = of_rank.offset + offset,
            .numel = std::min(piece_numel_, of_rank.numel - offset)};
  }

  // Returns the offset of the rank's piece in a post of all ranks' pieces.
  int64_t offset_in_post(int rank, int64_t index) const {
    if (is_one_phase_) return 0;
    int64_t offset = 0;
    for (int r = 0; r < rank; ++r) offset += piece(r, index).numel;
    return offset;
  }
  int64_t post_numel(int64_t index) const {
    return is_one_phase_ ? piece(0, index).numel : offset_in_post(size_, index);
  }

 private:
  RankSlice slice(int rank) const {
    if (is_one_phase_) return {.offset = 0, .numel = numel_};
    return slice_of_rank(numel_, rank, size_);
  }

  int64_t numel_;
  int size_;
  bool is_one_phase_;
  int64_t piece_numel_;
  int64_t num_pieces_;
};

void copy(const std::byte* source, const at::Tensor& to) {
  if (to.numel() > 0) std::memcpy(to.mutable_data_ptr(), source, to.nbytes());
}

void copy(const at::Tensor& source, std::byte* to) {
  if (source.numel() > 0) {
    std::memcpy(to, source.const_data_ptr(), source.nbytes());
  }
}

class SharedTransport final : public OrderedTransport {
 public:
  SharedTransport(std::shared_ptr<SharedSegment> segment, size_t room,
                  const OrderedRanks& ranks)
      : ranks_(ranks), room_(room), posts_(std::move(segment), room) {}

  std::unique_ptr<OrderedOperation> start(const OrderedCall& call) override;

  void abort(std::string_view reason) override {
    {
      const std::lock_guard<std::mutex> lock(post_mutex_);
      if (!posts_.has_failed()) posts_.fail_from(1);
    }
    posts_.segment().close(reason);
  }

 private:
  class Operation;

  // Posts pending pieces while there is room. REQUIRES: post_mutex_ is held.
  void post_all();

  const OrderedRanks ranks_;
  const size_t room_;
  SharedPosts posts_;

  std::mutex post_mutex_;
  // Guarded by post_mutex_, with take() and fail_from() of posts_.
  uint64_t next_post_ = 1;
  std::deque<Operation*> unposted_;  // in the order of start()
};

class SharedTransport::Operation final : public OrderedOperation {
 public:
  // `first_post`: number of the first piece's post.
  Operation(SharedTransport& transport, const OrderedCall& call,
            uint64_t first_post)
      : transport_(transport),
        ranks_(transport.ranks_),
        posts_(transport.posts_),
        call_(call),
        partition_(call, ranks_.size, transport.room_),
        first_post_(first_post),
        tag_(c10::get_hash(static_cast<int>(call.kind), call.input.numel(),
                           static_cast<int>(call.input.scalar_type()),
                           call.scale.has_value(), call.scale.value_or(0),
                           partition_.num_pieces(), first_post)),
        element_size_(call.input.element_size()) {}

  ~Operation() override {
    const std::lock_guard<std::mutex> lock(transport_.post_mutex_);
    std::erase(transport_.unposted_, this);
  }

  int64_t num_pieces() const { return partition_.num_pieces(); }
  bool is_posted() const { return num_posted_ == partition_.num_pieces(); }

  // Posts the next piece. Returns false if there is no room now.
  bool post() {
    if (call_.after && (!call_.after->completed() || call_.after->hasError())) {
      return false;
    }
    const int64_t index = num_posted_;
    const RankSlice own = partition_.piece(ranks_.rank, index);
    const int64_t numel =
        is_gather() ? own.numel : partition_.post_numel(index);
    std::byte* const to = posts_.take(
        number(index), static_cast<size_t>(numel * element_size_), tag_);
    if (to == nullptr) return false;
    if (is_gather() || partition_.is_one_phase()) {
      copy(call_.input.narrow(0, own.offset, own.numel), to);
    } else {
      for_each_peer([&](int peer) {
        const RankSlice term = partition_.piece(peer, index);
        copy(call_.input.narrow(0, term.offset, term.numel),
             to + partition_.offset_in_post(peer, index) * element_size_);
      });
    }
    posts_.publish(number(index), is_gather() ? Phase::kSums : Phase::kTerms);
    ++num_posted_;
    return true;
  }

  void finish() override {
    try {
      if (call_.after) call_.after->waitAndThrow();
      for (int64_t i = 0; i < partition_.num_pieces(); ++i) finish(i);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(transport_.post_mutex_);
      posts_.fail_from(first_post_);
      throw;
    }
  }

 private:
  using Phase = SharedPosts::Phase;

  void finish(int64_t index) {
    deadline_ = steady_clock::now() + ranks_.timeout;
    check_in_time(posts_.segment().wait_for(ranks_.rank, deadline_, [&] {
      if (num_posted_ > index) return true;
      const std::lock_guard<std::mutex> lock(transport_.post_mutex_);
      transport_.post_all();
      return num_posted_ > index;
    }));
    if (!is_gather()) {
      std::vector<const std::byte*> terms(ranks_.size);
      for_each_peer([&](int peer) {
        terms[peer] =
            await(peer, index, Phase::kTerms) +
            partition_.offset_in_post(ranks_.rank, index) * element_size_;
      });
      add(index, terms);
    }
    for_each_peer([&](int peer) {
      if (is_gather() || posts_sums()) {
        const std::byte* const posted = await(peer, index, Phase::kSums);
        const int64_t offset =
            is_gather() ? 0 : partition_.offset_in_post(peer, index);
        const RankSlice sum = partition_.piece(peer, index);
        copy(posted + offset * element_size_,
             call_.output.narrow(0, sum.offset, sum.numel));
      }
      posts_.release(peer, number(index));
    });
  }

  // Sums this rank's piece. `terms`: by rank; the own term is in the input.
  // Writes the sum to the output and, with two phases, to the own post.
  void add(int64_t index, const std::vector<const std::byte*>& terms) {
    const RankSlice own = partition_.piece(ranks_.rank, index);
    const int64_t output_offset =
        call_.kind == OrderedKind::kReduceScatter
            ? own.offset - partition_.piece(ranks_.rank, 0).offset
            : own.offset;
    // Peers release the own post after they have read the sums. Without sums it
    // may be free already.
    std::byte* const own_post =
        posts_sums()
            ? posts_.own_post(number(index)) +
                  partition_.offset_in_post(ranks_.rank, index) * element_size_
            : nullptr;
    const int64_t most = std::max<int64_t>(1, kBlockBytes / element_size_);
    for (int64_t begin = 0; begin < own.numel; begin += most) {
      const int64_t numel = std::min(most, own.numel - begin);
      std::vector<at::Tensor> blocks;
      for (int rank = 0; rank < ranks_.size; ++rank) {
        if (rank == ranks_.rank) {
          blocks.push_back(call_.input.narrow(0, own.offset + begin, numel));
        } else {  // only read
          blocks.push_back(at::from_blob(
              const_cast<std::byte*>(terms[rank] + begin * element_size_),
              {numel}, call_.input.options()));
        }
      }
      const at::Tensor sum =
          call_.output.narrow(0, output_offset + begin, numel);
      ordered_sum(blocks, call_.scale, sum);
      if (posts_sums()) copy(sum, own_post + begin * element_size_);
    }
    if (posts_sums()) posts_.publish(number(index), Phase::kSums);
  }

  const std::byte* await(int peer, int64_t index, Phase phase) {
    awaited_ = peer;
    const std::byte* const posted =
        posts_.await(peer, number(index), tag_, phase, deadline_);
    check_in_time(posted != nullptr);
    return posted;
  }

  static void check_in_time(bool is_in_time) {
    TORCH_CHECK(is_in_time, "no data within the group's timeout");
  }

  template <typename Function>
  void for_each_peer(const Function& function) const {
    for (int step = 1; step < ranks_.size; ++step) {
      function((ranks_.rank + step) % ranks_.size);
    }
  }

  uint64_t number(int64_t index) const {
    return first_post_ + static_cast<uint64_t>(index);
  }
  bool is_gather() const { return call_.kind == OrderedKind::kAllGather; }
  bool posts_sums() const {
    return call_.kind == OrderedKind::kAllReduce && !partition_.is_one_phase();
  }

  SharedTransport& transport_;
  const OrderedRanks& ranks_;
  SharedPosts& posts_;
  const OrderedCall call_;
  const Partition partition_;
  const uint64_t first_post_;
  const uint64_t tag_;
  const int64_t element_size_;
  SharedSegment::Deadline deadline_;
  std::atomic<int64_t> num_posted_ = 0;  // changes with post_mutex_ held
};

std::unique_ptr<OrderedOperation> SharedTransport::start(
    const OrderedCall& call) {
  const std::lock_guard<std::mutex> lock(post_mutex_);
  auto operation = std::make_unique<Operation>(*this, call, next_post_);
  next_post_ += static_cast<uint64_t>(operation->num_pieces());
  unposted_.push_back(operation.get());
  post_all();
  return operation;
}

void SharedTransport::post_all() {
  while (!unposted_.empty() && unposted_.front()->post()) {
    if (unposted_.front()->is_posted()) unposted_.pop_front();
  }
}

}  // namespace

size_t shared_bytes_per_rank(size_t room) {
  return padded(sizeof(Head)) + padded(room);
}

std::unique_ptr<OrderedTransport> make_shared_transport(
    std::shared_ptr<SharedSegment> segment, size_t room,
    const OrderedRanks& ranks) {
  return std::make_unique<SharedTransport>(std::move(segment), room, ranks);
}

}  // namespace brigade
