#include "brigade/fsdp/segment_exchange.h"

#include <c10/util/hash.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/peer_error.h"

namespace brigade {
namespace {

constexpr size_t kBitsPerStatus = sizeof(StatusText) * 8;
// The other half of the limit is for awaited rounds.
constexpr size_t kMaxUnconfirmed = kMaxStatusesInFlight / 2;
constexpr std::chrono::seconds kFailureTimeout(30);

void throw_if_ranks_differ(std::span<const RankStatus> by_rank) {
  const absl::Status status = check_statuses(
      by_rank,
      "Run the same number of forwards and backwards on every rank; forwards "
      "under no_grad are collective, too.");
  if (!status.ok()) {
    throw_peer_failure("fully_shard: " + std::string(status.message()));
  }
}

// Returns `count` bits of the chunks from `bit` on, which it advances. Bits
// after the last chunk are 0.
std::vector<char> take_bits(const std::vector<RankStatus>& chunks, size_t count,
                            size_t& bit) {
  std::vector<char> bits(count, 0);
  for (size_t i = 0; i < count; ++i, ++bit) {
    if (bit / kBitsPerStatus >= chunks.size()) break;
    const StatusText& text = chunks[bit / kBitsPerStatus].text;
    bits[i] =
        static_cast<char>(text[bit % kBitsPerStatus / 8] >> (bit % 8) & 1);
  }
  return bits;
}

// Sent as RankStatus::proposal.
enum RoundState : uint64_t { kContinues, kHasEnded, kEndedUnconfirmed };

// Throws if a rank did not end as recorded.
void require_all_ended(const std::vector<RoundMessage>& by_rank) {
  for (const RoundMessage& message : by_rank) {
    const bool has_late_gradients =
        std::ranges::find(message.complete, 1) != message.complete.end();
    if (message.has_ended && !has_late_gradients) continue;
    throw_peer_failure(
        "fully_shard: expected each rank to run as recorded, found a rank that "
        "used units in another order than recorded, or got gradients after "
        "their reduce-scatter. Other ranks have already continued.\nSet "
        "max_unconfirmed_iterations = 0 if ranks run different programs.");
  }
}

OpeningMessage common_opening(std::vector<RankStatus> by_rank) {
  const auto has_no_data = [](const RankStatus& s) {
    return s.unit == static_cast<int64_t>(SegmentKind::kWithoutData);
  };
  const auto first = std::ranges::find_if_not(by_rank, has_no_data);
  TORCH_CHECK(first != by_rank.end(),
              "fully_shard: expected data on at least one rank, found a step "
              "without data on all ranks.\nEnd the epoch when no rank has "
              "data.");
  const RankStatus leader = *first;
  bool has_equal_settings = true;
  for (RankStatus& status : by_rank) {
    if (status.kind != StatusKind::kBegin) continue;
    if (has_no_data(status)) status = leader;
    has_equal_settings &= status.fingerprint == leader.fingerprint;
    status.fingerprint = leader.fingerprint;
  }
  throw_if_ranks_differ(by_rank);
  OpeningMessage common = {
      .kind = static_cast<SegmentKind>(leader.unit),
      .tag = leader.proposal,
      .schedule = leader.order,
      .settings = has_equal_settings ? leader.fingerprint : 0,
      .slices = leader.launched};
  for (const RankStatus& status : by_rank) {
    common.tags.insert(status.proposal);
    if (status.proposal != common.tag || status.order != leader.order) {
      common.schedule = 0;
    }
    if (status.launched != leader.launched) common.slices = 0;
  }
  return common;
}

}  // namespace

void throw_with_context(const std::string& context) {
  const std::string where =
      absl::StrCat("fully_shard", context.empty() ? "" : ": ", context);
  try {
    throw_peer_error(where, std::current_exception());
  } catch (const PeerError& error) {
    const std::string text = message_of(std::current_exception());
    if (absl::StartsWith(text, "fully_shard: ")) throw;
    throw_peer_failure(absl::StrCat(where, ": ", text));
  }
}

void throw_peer_failure(const std::string& text) {
  throw PeerError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text);
}

SegmentExchange::SegmentExchange(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, size_t num_units,
    size_t num_parameters, std::shared_ptr<Progress> progress)
    : channel_(group),
      num_units_(num_units),
      num_parameters_(num_parameters),
      progress_(std::move(progress)) {
  progress_->iteration = iteration_;
}

std::vector<RankStatus> SegmentExchange::await(
    const RankStatus& own, std::optional<std::chrono::milliseconds> timeout) {
  const WaitForPeers waiting(*progress_);
  try {
    return channel_.await(own, timeout);
  } catch (...) {
    is_broken_ = true;
    throw_with_context("");
  }
}

OpeningMessage SegmentExchange::open(const OpeningMessage& own, bool awaits) {
  const int64_t step = num_steps_ + 1;
  progress_->iteration = iteration_of(own.kind, step);
  const RankStatus sent =
      channel_.exchange({.kind = StatusKind::kBegin,
                         .iteration = progress_->iteration,
                         .unit = static_cast<int64_t>(own.kind),
                         .fingerprint = own.settings,
                         .launched = own.slices,
                         .proposal = own.tag,
                         .order = own.schedule});
  OpeningMessage opened = own;
  if (awaits || own.schedule == 0) {
    confirm();
    opened = common_opening(await(sent));
  } else {
    unconfirmed_.push_back({sent});
  }
  kind_ = opened.kind;
  step_ = step;
  iteration_ = iteration_of(kind_, step);
  progress_->iteration = iteration_;
  return opened;
}

// Returns the number of statuses of one round.
size_t SegmentExchange::num_chunks() const {
  const size_t num_bits =
      kind_ == SegmentKind::kForward ? 0 : 2 * num_units_ + num_parameters_;
  return std::max<size_t>(1, (num_bits + kBitsPerStatus - 1) / kBitsPerStatus);
}

bool SegmentExchange::may_end_unconfirmed() const {
  return num_chunks() <= kMaxUnconfirmed / 2;
}

SegmentExchange::Sent SegmentExchange::send(const RoundMessage& own,
                                            uint64_t state) {
  RankStatus head = {.kind = StatusKind::kEnd,
                     .iteration = iteration_,
                     .unit = own.need ? static_cast<int64_t>(*own.need) : -1,
                     .proposal = state,
                     .order = own.accumulations};
  if (own.has_failed) {
    head.kind = StatusKind::kFailed;
    head.text = status_text(own.error);
  }
  Sent sent(num_chunks(), head);
  size_t bit = 0;
  for (const auto* bits : {&own.complete, &own.expects, &own.used}) {
    if (own.has_failed || kind_ == SegmentKind::kForward) break;
    for (const char value : *bits) {
      char& byte = sent[bit / kBitsPerStatus].text[bit % kBitsPerStatus / 8];
      byte = static_cast<char>(byte | (value != 0 ? 1 : 0) << bit % 8);
      ++bit;
    }
  }
  for (RankStatus& chunk : sent) chunk = channel_.exchange(chunk);
  return sent;
}

RoundAnswers SegmentExchange::await_round(
    const Sent& sent, std::optional<std::chrono::milliseconds> timeout) {
  std::vector<std::vector<RankStatus>> by_rank;  // chunks
  for (const RankStatus& chunk : sent) {
    const std::vector<RankStatus> answers = await(chunk, timeout);
    by_rank.resize(answers.size());
    for (size_t rank = 0; rank < answers.size(); ++rank) {
      by_rank[rank].push_back(answers[rank]);
    }
  }
  RoundAnswers answers;
  std::vector<RankStatus> first;
  bool has_failed = false;
  for (const std::vector<RankStatus>& chunks : by_rank) {
    RankStatus& head = first.emplace_back(chunks.front());
    RoundMessage& message = answers.by_rank.emplace_back();
    message.has_failed = head.kind != StatusKind::kEnd;
    has_failed |= message.has_failed;
    if (message.has_failed) continue;
    message.has_ended = head.proposal != kContinues;
    answers.has_unconfirmed_end |= head.proposal == kEndedUnconfirmed;
    message.accumulations = head.order;
    if (head.unit >= 0) message.need = static_cast<size_t>(head.unit);
    head.unit = -1;
    size_t bit = 0;
    message.complete = take_bits(chunks, num_units_, bit);
    message.expects = take_bits(chunks, num_units_, bit);
    message.used = take_bits(chunks, num_parameters_, bit);
  }
  if (has_failed) {
    answers.error =
        "fully_shard: " + std::string(check_statuses(first).message());
  }
  return answers;
}

RoundAnswers SegmentExchange::round(const RoundMessage& own) {
  const Sent sent = send(own, own.has_ended ? kHasEnded : kContinues);
  confirm();
  std::optional<std::chrono::milliseconds> timeout;
  if (own.has_failed) timeout = kFailureTimeout;
  RoundAnswers answers = await_round(sent, timeout);
  if (answers.has_unconfirmed_end && answers.error.empty()) {
    require_all_ended(answers.by_rank);
  }
  note_end(std::ranges::all_of(answers.by_rank, &RoundMessage::has_ended));
  return answers;
}

// Another round of the segment may follow.
void SegmentExchange::note_end(bool has_ended) {
  if (kind_ == SegmentKind::kBackward) num_steps_ = step_ - (has_ended ? 0 : 1);
}

void SegmentExchange::end_unconfirmed(const RoundMessage& own) {
  note_end(true);
  unconfirmed_.push_back(send(own, kEndedUnconfirmed));
  size_t num_sent = 0;
  for (const Sent& sent : unconfirmed_) num_sent += sent.size();
  for (; num_sent > kMaxUnconfirmed; confirm_oldest()) {
    num_sent -= unconfirmed_.front().size();
  }
}

void SegmentExchange::confirm(size_t num_segments) {
  size_t num_left = 2 * num_segments;  // an opening and a round each
  while (unconfirmed_.size() > num_left) confirm_oldest();
}

// A failure breaks the exchange, since this rank has already continued.
void SegmentExchange::confirm_oldest() {
  const Sent oldest = std::move(unconfirmed_.front());
  unconfirmed_.pop_front();
  try {
    const RankStatus& own = oldest.front();
    if (own.kind == StatusKind::kBegin) {
      const OpeningMessage opened = common_opening(await(own));
      if (opened.schedule == own.order && opened.settings == own.fingerprint &&
          opened.slices == own.launched) {
        return;
      }
      throw_peer_failure(
          "fully_shard: expected all ranks to begin this forward or backward "
          "with the same recorded schedule, settings and unsharded units, "
          "found different ones. Ranks have already continued.\nSet "
          "max_unconfirmed_iterations = 0 if ranks run different programs.");
    }
    const RoundAnswers answers = await_round(oldest);
    if (!answers.error.empty()) throw_peer_failure(answers.error);
    require_all_ended(answers.by_rank);
  } catch (...) {
    is_broken_ = true;
    throw;
  }
}

std::vector<RankStatus> SegmentExchange::exchange_and_await(RankStatus own) {
  const int64_t step = iteration_of(SegmentKind::kWithoutData, num_steps_ + 1);
  own.iteration = own.kind == StatusKind::kFailed ? step : iteration_;
  own = channel_.exchange(own);
  progress_->iteration = step;
  confirm();
  std::vector<RankStatus> by_rank = await(own);
  progress_->iteration = iteration_;
  return by_rank;
}

std::vector<int64_t> SegmentExchange::compare(const std::string& text,
                                              uint64_t hash, int64_t number) {
  const std::vector<RankStatus> by_rank = exchange_and_await(
      {.kind = StatusKind::kAsk,
       .fingerprint = c10::hash_combine(hash, std::hash<std::string>{}(text)),
       .proposal = static_cast<uint64_t>(number),
       .text = status_text(text)});
  throw_if_ranks_differ(by_rank);
  std::vector<int64_t> numbers;
  for (const RankStatus& status : by_rank) {
    numbers.push_back(static_cast<int64_t>(status.proposal));
  }
  return numbers;
}

void SegmentExchange::fail(const std::string& error) {
  exchange_and_await({.kind = StatusKind::kFailed, .text = status_text(error)});
}

}  // namespace brigade
