#include "brigade/comm/status/status_board.h"

#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <stdexcept>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/group/rank_names.h"
#include "brigade/comm/group/shared_segment.h"

namespace brigade {
namespace {

// A rank sends at most kMaxStatusesInFlight exchanges more than it has
// received, so it is never further than twice that ahead of a reader.
constexpr int64_t kDepth = 2 * kMaxStatusesInFlight + 1;

// What one rank posts. All zeros at the start.
struct Region {
  std::atomic<int64_t> num_sent;
  std::atomic<int64_t> left_after;      // 1 + its last iteration; 0: is here
  std::array<RankStatus, kDepth> ring;  // by sequence modulo kDepth
};

class StatusBoard final : public StatusTransport {
 public:
  StatusBoard(std::shared_ptr<SharedSegment> segment, RankNames names)
      : segment_(std::move(segment)), names_(std::move(names)) {}

  void send(const RankStatus& own) override {
    Region& region = of(segment_->rank());
    region.ring[own.sequence % kDepth] = own;
    region.num_sent.store(own.sequence);
    segment_->notify();
  }

  bool is_complete(int64_t sequence) override {
    for (int rank = 0; rank < segment_->size(); ++rank) {
      if (!has_sent(rank, sequence)) {
        return segment_->is_closed() || of(rank).left_after.load() != 0;
      }
    }
    return true;
  }

  std::optional<std::vector<RankStatus>> receive(int64_t sequence,
                                                 Deadline deadline) override {
    std::vector<RankStatus> by_rank;
    by_rank.reserve(static_cast<size_t>(segment_->size()));
    for (int rank = 0; rank < segment_->size(); ++rank) {
      if (!await(rank, sequence, deadline)) return std::nullopt;
      by_rank.push_back(of(rank).ring[sequence % kDepth]);
    }
    return by_rank;
  }

  void leave(const RankStatus& last) override {
    of(segment_->rank()).left_after.store(last.iteration + 1);
    segment_->notify();
  }

  void give_up(const RankStatus& last) override {
    segment_->close(absl::StrCat("rank ", names_[segment_->rank()],
                                 " has stopped waiting: it ",
                                 describe_status(last)));
  }

  std::vector<int> dead_ranks() override {
    std::vector<int> dead;
    for (int rank = 0; rank < segment_->size(); ++rank) {
      if (of(rank).left_after.load() == 0 && !segment_->is_alive(rank)) {
        dead.push_back(rank);
      }
    }
    return dead;
  }

 private:
  Region& of(int rank) const {
    return *reinterpret_cast<Region*>(segment_->region(rank));
  }

  bool has_sent(int rank, int64_t sequence) const {
    return of(rank).num_sent.load() >= sequence;
  }

  bool await(int rank, int64_t sequence, Deadline deadline) {
    int64_t left_after = 0;
    try {
      const bool in_time = segment_->wait_for(rank, deadline, [&] {
        left_after = of(rank).left_after.load();  // before num_sent
        return has_sent(rank, sequence) || left_after != 0;
      });
      if (!in_time) return false;
    } catch (const c10::Error& error) {
      const std::string reason = error.what_without_backtrace();
      // A rank that has given up knows no more of the others than this one.
      const bool has_given_up =
          segment_->is_closed() && segment_->lost_rank() < 0;
      if (has_given_up) throw std::runtime_error(reason);
      throw RanksAbsent(reason);
    }
    if (has_sent(rank, sequence)) return true;
    throw RanksAbsent(absl::StrCat(
        "rank ", names_[rank], " has left after iteration ", left_after - 1));
  }

  const std::shared_ptr<SharedSegment> segment_;
  const RankNames names_;
};

}  // namespace

std::unique_ptr<StatusTransport> meet_at_status_board(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  auto segment = SharedSegment::make(group, sizeof(Region));
  if (!segment) return nullptr;
  return std::make_unique<StatusBoard>(std::move(segment),
                                       RankNames::of(*group));
}

}  // namespace brigade
