#include "brigade/fsdp/segment_exchange.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/errors/peer_error.h"

namespace brigade {
namespace {

constexpr size_t kBitsPerStatus = sizeof(StatusText) * 8;
// Of StatusTransport's limit; rounds that are awaited need some themselves.
constexpr size_t kMaxUnconfirmed = kMaxStatusesInFlight / 2;

// By SegmentKind.
constexpr const char* kWords[] = {"forward", "backward without synchronisation",
                                  "backward", "step without data"};

[[noreturn]] void throw_differs(const absl::Status& status) {
  throw PeerError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                  "fully_shard: " + std::string(status.message()));
}

void set_bit(std::vector<RankStatus>& chunks, size_t bit) {
  StatusText& text = chunks[bit / kBitsPerStatus].text;
  char& byte = text[bit % kBitsPerStatus / 8];
  byte = static_cast<char>(byte | (1 << (bit % 8)));
}

bool has_bit(const std::vector<RankStatus>& chunks, size_t bit) {
  const StatusText& text = chunks[bit / kBitsPerStatus].text;
  return (text[bit % kBitsPerStatus / 8] >> (bit % 8) & 1) != 0;
}

// RankStatus::proposal of a round.
enum RoundState : uint64_t { kGoesOn, kHasEnded, kHasGoneOn };

// Throws if a rank needs more than was recorded.
void require_all_done(const std::vector<RoundMessage>& by_rank) {
  for (const RoundMessage& message : by_rank) {
    const bool is_done =
        message.has_ended &&
        std::ranges::find(message.complete, 1) == message.complete.end();
    if (is_done) continue;
    throw_differs(absl::AbortedError(
        "a rank has used units in another order than recorded, or has "
        "gradients after their turn, and ranks have gone on.\nSet "
        "learn_always, or max_unconfirmed_iterations = 0."));
  }
}

bool is_backward(SegmentKind kind) { return kind != SegmentKind::kForward; }

Opened opened_by(std::vector<RankStatus> by_rank) {
  const auto is_shadow = [](const RankStatus& s) {
    return s.unit == static_cast<int64_t>(SegmentKind::kShadow);
  };
  const auto first = std::ranges::find_if_not(by_rank, is_shadow);
  TORCH_CHECK(first != by_rank.end(),
              "fully_shard: a step without data on all ranks.\nEnd the epoch "
              "when no rank has data.");
  const RankStatus leader = *first;
  for (RankStatus& status : by_rank) {
    if (is_shadow(status) && status.kind == StatusKind::kBegin) status = leader;
  }
  const absl::Status agreed = check_statuses(by_rank);
  if (!agreed.ok()) throw_differs(agreed);
  const auto alike = [&](auto field) {
    return std::ranges::all_of(by_rank, [&](const RankStatus& s) {
      return s.*field == leader.*field;
    });
  };
  return {.kind = static_cast<SegmentKind>(leader.unit),
          .tag = leader.proposal,
          .has_schedule = leader.order != 0 && alike(&RankStatus::proposal) &&
                          alike(&RankStatus::order),
          .has_slices = leader.launched != 0 && alike(&RankStatus::launched)};
}

}  // namespace

void throw_named(const std::string& doing) {
  const std::string where = absl::StrCat("fully_shard: ", doing);
  try {
    throw_peer_error(where, std::current_exception());
  } catch (const PeerError& error) {
    const std::string text = message_of(std::current_exception());
    if (absl::StartsWith(text, "fully_shard: ")) throw;
    throw PeerError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                    absl::StrCat(where, ": ", text));
  }
}

SegmentExchange::SegmentExchange(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, size_t num_units,
    size_t num_parameters, std::shared_ptr<Progress> progress)
    : channel_(group),
      num_units_(num_units),
      num_parameters_(num_parameters),
      own_rank_(group->getRank()),
      progress_(std::move(progress)) {}

std::vector<RankStatus> SegmentExchange::await(
    const RankStatus& own, std::optional<std::chrono::milliseconds> patience) {
  const WaitForPeers waiting(*progress_);
  try {
    return channel_.await(own, patience);
  } catch (...) {
    is_broken_ = true;
    throw_named("on meeting the peers");
  }
}

Opened SegmentExchange::open(const OpeningMessage& own, bool awaits) {
  const RankStatus sent = channel_.exchange(
      {.kind = StatusKind::kBegin,
       .iteration = num_opened_ + 1,
       .unit = static_cast<int64_t>(own.kind),
       .fingerprint = own.settings,
       .launched = own.slices,
       .proposal = own.tag,
       .order = own.schedule,
       .text = status_text(kWords[static_cast<size_t>(own.kind)])});
  Opened opened = {.kind = own.kind,
                   .tag = own.tag,
                   .has_schedule = own.schedule != 0,
                   .has_slices = own.slices != 0};
  if (awaits || !opened.has_schedule) {
    confirm();
    opened = opened_by(await(sent));
  } else {
    unconfirmed_.push_back({.sent = {sent}, .is_opening = true});
  }
  ++num_opened_;
  kind_ = opened.kind;
  progress_->iteration = num_opened_;
  return opened;
}

// Of a round.
size_t SegmentExchange::num_chunks() const {
  const size_t num_bits =
      is_backward(kind_) ? 2 * num_units_ + num_parameters_ : 0;
  return std::max<size_t>(1, (num_bits + kBitsPerStatus - 1) / kBitsPerStatus);
}

bool SegmentExchange::may_end_unconfirmed() const {
  return num_chunks() <= kMaxUnconfirmed / 2;
}

std::vector<RankStatus> SegmentExchange::pack(const SegmentRound& own,
                                              bool is_unconfirmed) const {
  std::vector<RankStatus> chunks(num_chunks());
  for (RankStatus& chunk : chunks) {
    chunk.kind = StatusKind::kEnd;
    chunk.iteration = num_opened_;
    chunk.unit =
        own.message.need ? static_cast<int64_t>(*own.message.need) : -1;
    chunk.proposal = is_unconfirmed          ? kHasGoneOn
                     : own.message.has_ended ? kHasEnded
                                             : kGoesOn;
  }
  if (own.message.has_failed) {
    for (RankStatus& chunk : chunks) {
      chunk.kind = StatusKind::kFailed;
      chunk.unit = -1;
      chunk.text = status_text(own.error);
    }
    return chunks;
  }
  if (!is_backward(kind_)) return chunks;
  for (size_t i = 0; i < num_units_; ++i) {
    if (own.message.complete[i] != 0) set_bit(chunks, i);
    if (own.message.expects[i] != 0) set_bit(chunks, num_units_ + i);
  }
  for (size_t i = 0; i < own.used.size(); ++i) {
    if (own.used[i] != 0) set_bit(chunks, 2 * num_units_ + i);
  }
  return chunks;
}

RoundAnswers SegmentExchange::await_round(
    const std::vector<RankStatus>& sent, bool is_backward,
    std::optional<std::chrono::milliseconds> patience) {
  std::vector<std::vector<RankStatus>> by_rank;  // chunks
  for (const RankStatus& chunk : sent) {
    std::vector<RankStatus> answers = await(chunk, patience);
    by_rank.resize(answers.size());
    for (size_t rank = 0; rank < answers.size(); ++rank) {
      by_rank[rank].push_back(answers[rank]);
    }
  }
  RoundAnswers answers;
  if (is_backward) answers.used.assign(num_parameters_, 0);
  std::vector<RankStatus> first;
  bool has_failed = false;
  for (const std::vector<RankStatus>& chunks : by_rank) {
    RankStatus& head = first.emplace_back(chunks.front());
    RoundMessage& message = answers.by_rank.emplace_back();
    message.complete.assign(num_units_, 0);
    message.expects.assign(num_units_, 0);
    message.has_failed = head.kind != StatusKind::kEnd;
    has_failed |= message.has_failed;
    if (message.has_failed) continue;
    message.has_ended = head.proposal != kGoesOn;
    answers.has_unconfirmed |= head.proposal == kHasGoneOn;
    if (head.unit >= 0) message.need = static_cast<size_t>(head.unit);
    head.unit = -1;
    if (!is_backward) continue;
    for (size_t i = 0; i < num_units_; ++i) {
      message.complete[i] = has_bit(chunks, i) ? 1 : 0;
      message.expects[i] = has_bit(chunks, num_units_ + i) ? 1 : 0;
    }
    for (size_t i = 0; i < num_parameters_; ++i) {
      if (has_bit(chunks, 2 * num_units_ + i)) answers.used[i] = 1;
    }
  }
  if (has_failed) {
    answers.error =
        "fully_shard: " + std::string(check_statuses(first).message());
  }
  return answers;
}

RoundAnswers SegmentExchange::round(
    const SegmentRound& own,
    std::optional<std::chrono::milliseconds> patience) {
  std::vector<RankStatus> sent = pack(own, /*is_unconfirmed=*/false);
  for (RankStatus& chunk : sent) chunk = channel_.exchange(chunk);
  confirm();
  RoundAnswers answers = await_round(sent, is_backward(kind_), patience);
  if (answers.has_unconfirmed && answers.error.empty()) {
    require_all_done(answers.by_rank);
  }
  return answers;
}

void SegmentExchange::end_unconfirmed(const SegmentRound& own) {
  std::vector<RankStatus> sent = pack(own, /*is_unconfirmed=*/true);
  for (RankStatus& chunk : sent) chunk = channel_.exchange(chunk);
  unconfirmed_.push_back(
      {.sent = std::move(sent), .is_backward = is_backward(kind_)});
  size_t num_sent = 0;
  for (const Unconfirmed& segment : unconfirmed_) {
    num_sent += segment.sent.size();
  }
  while (num_sent > kMaxUnconfirmed) {
    num_sent -= unconfirmed_.front().sent.size();
    confirm_oldest();
  }
}

void SegmentExchange::confirm(size_t num_segments) {
  size_t num_left = 2 * num_segments;  // an opening and a round each
  while (unconfirmed_.size() > num_left) confirm_oldest();
}

// A failure in it comes too late: this rank has gone on.
void SegmentExchange::confirm_oldest() {
  const Unconfirmed oldest = std::move(unconfirmed_.front());
  unconfirmed_.pop_front();
  try {
    if (oldest.is_opening) {
      confirm_opening(oldest.sent.front());
    } else {
      const RoundAnswers answers =
          await_round(oldest.sent, oldest.is_backward, std::nullopt);
      if (!answers.error.empty()) {
        throw PeerError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                        answers.error);
      }
      require_all_done(answers.by_rank);
    }
  } catch (...) {
    is_broken_ = true;
    throw;
  }
}

void SegmentExchange::confirm_opening(const RankStatus& own) {
  const Opened opened = opened_by(await(own));
  if (opened.tag == own.proposal && opened.has_schedule &&
      (own.launched == 0) != opened.has_slices) {
    return;
  }
  throw_differs(absl::AbortedError(
      "ranks have opened a forward or backward in different states, and have "
      "gone on.\nSet max_unconfirmed_iterations = 0 to continue after this."));
}

int64_t SegmentExchange::ask(const std::string& text, uint64_t digest,
                             int64_t number) {
  const RankStatus sent =
      channel_.exchange({.kind = StatusKind::kAsk,
                         .iteration = num_opened_,
                         .fingerprint = digest,
                         .proposal = static_cast<uint64_t>(number),
                         .text = status_text(text)});
  confirm();
  const std::vector<RankStatus> by_rank = await(sent);
  const absl::Status agreed = check_statuses(by_rank);
  if (!agreed.ok()) throw_differs(agreed);
  int64_t sum = 0;
  for (const RankStatus& status : by_rank) {
    sum += static_cast<int64_t>(status.proposal);
  }
  return sum;
}

void SegmentExchange::fail(const std::string& error) {
  const RankStatus sent = channel_.exchange({.kind = StatusKind::kFailed,
                                             .iteration = num_opened_,
                                             .unit = -1,
                                             .text = status_text(error)});
  confirm();
  await(sent);
}

}  // namespace brigade
