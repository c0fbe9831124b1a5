#include "brigade/comm/control/status_protocol.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "brigade/comm/control/exchange_rounds.h"

namespace brigade {
namespace {

// More are not kept to be used again.
constexpr size_t kMaxOutcomes = 8;

template <typename T>
Bytes bytes_of(const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  return std::as_bytes(std::span(&value, 1));
}

// Reads values off the front of a message.  A message that is too short gives
// nothing.
class Reader {
 public:
  explicit Reader(Bytes bytes) : bytes_(bytes) {}

  template <typename T>
  std::optional<T> next() {
    static_assert(std::is_trivially_copyable_v<T>);
    if (bytes_.size() < sizeof(T)) return std::nullopt;
    T value;
    std::memcpy(&value, bytes_.data(), sizeof(T));
    bytes_ = bytes_.subspan(sizeof(T));
    return value;
  }

  Bytes rest() const { return bytes_; }

 private:
  Bytes bytes_;
};

class Writer {
 public:
  template <typename T>
  void add(const T& value) {
    add_bytes(bytes_of(value));
  }
  void add_bytes(Bytes bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }
  Bytes bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

}  // namespace

struct StatusProtocol::MessageHead {
  MessageKind kind = MessageKind::kDigest;
  uint32_t round = 0;
  Place place = {};
};

struct StatusProtocol::Exchange {
  // By round: what has come, and is not used yet.
  std::vector<std::optional<StatusDigest>> digests = {};
  std::vector<std::vector<RankStatus>> statuses = {};

  std::shared_ptr<StatusExchange> outcome = {};  // null: not begun
  RankStatus own = {};
  StatusDigest digest = {};  // of `rounds_combined` rounds
  int rounds_combined = 0;
  int rounds_gathered = 0;
  std::vector<RankStatus> by_rank = {};  // once it is known that they differ
};

// Of one rank, from a channel or from all.
struct StatusProtocol::Departure {
  struct Head {
    int64_t rank = 0;
    AbsenceReason reason = AbsenceReason::kClosed;
    int64_t iteration = 0;
    int64_t has_failure = 0;
    StatusOf failure = {};
  };
  struct End {
    uint64_t channel = 0;
    int64_t last_sequence = 0;
  };

  void set_failure(const std::optional<StatusOf>& failure) {
    head.has_failure = failure.has_value();
    if (failure) head.failure = *failure;
  }

  Head head = {};
  std::vector<End> ends = {};
};

StatusProtocol::StatusProtocol(int rank, int size, Send send)
    : rank_(rank),
      size_(size),
      rounds_(num_rounds(size)),
      neighbours_(neighbours_of(rank, size)),
      send_(std::move(send)) {}

StatusProtocol::~StatusProtocol() {
  for (const auto& [place, exchange] : exchanges_) {
    if (exchange.outcome) exchange.outcome->abort();
  }
}

std::shared_ptr<StatusExchange> StatusProtocol::begin(uint64_t channel,
                                                      const RankStatus& own) {
  const std::shared_ptr<StatusExchange> outcome = new_outcome();
  const Place place = {.channel = channel, .sequence = own.sequence};
  channels_[channel] = own.sequence;
  if (auto absences = absences_at(place); !absences.empty()) {
    outcome->finish_broken(std::move(absences));
    return outcome;
  }
  Exchange& exchange = exchange_at(place);
  exchange.outcome = outcome;
  exchange.own = own;
  exchange.digest = digest_of(rank_, own);
  send_digest(place, exchange, 0);
  advance(place);
  return outcome;
}

// One that nobody holds any more, if there is one.
std::shared_ptr<StatusExchange> StatusProtocol::new_outcome() {
  for (const std::shared_ptr<StatusExchange>& kept : outcomes_) {
    if (kept.use_count() > 1) continue;
    kept->renew();
    return kept;
  }
  const auto outcome = std::make_shared<StatusExchange>();
  if (outcomes_.size() < kMaxOutcomes) outcomes_.push_back(outcome);
  return outcome;
}

StatusProtocol::Exchange& StatusProtocol::exchange_at(const Place& place) {
  Exchange& exchange = exchanges_[place];
  if (exchange.digests.empty()) {
    exchange.digests.resize(rounds_);
    exchange.statuses.resize(rounds_);
  }
  return exchange;
}

// As far as what has come allows.
void StatusProtocol::advance(const Place& place) {
  const auto found = exchanges_.find(place);
  if (found == exchanges_.end() || !found->second.outcome) return;
  Exchange& exchange = found->second;
  if (!combine_digests(place, exchange)) return;
  if (exchange.digest.all_agree != 0) {
    exchange.outcome->finish_agreed(told_alike(exchange.digest));
  } else {
    if (!gather(place, exchange)) return;
    exchange.outcome->finish_different(std::move(exchange.by_rank));
  }
  exchanges_.erase(found);
}

bool StatusProtocol::combine_digests(const Place& place, Exchange& exchange) {
  while (exchange.rounds_combined < rounds_) {
    const auto& come = exchange.digests[exchange.rounds_combined];
    if (!come) {
      require_from(source_of(rank_, size_, exchange.rounds_combined), place);
      return false;
    }
    exchange.digest = combine(exchange.digest, *come);
    ++exchange.rounds_combined;
    if (exchange.rounds_combined < rounds_) {
      send_digest(place, exchange, exchange.rounds_combined);
    }
  }
  return true;
}

// The first round's digest was the one status of its sender.
bool StatusProtocol::gather(const Place& place, Exchange& exchange) {
  if (exchange.by_rank.empty()) {
    exchange.by_rank.resize(size_);
    exchange.by_rank[rank_] = exchange.own;
    exchange.by_rank[source_of(rank_, size_, 0)] =
        exchange.digests.front()->first.rank_status;
    exchange.rounds_gathered = 1;
    if (rounds_ > 1) send_statuses(place, exchange, 1);
  }
  while (exchange.rounds_gathered < rounds_) {
    if (exchange.statuses[exchange.rounds_gathered].empty()) {
      require_from(source_of(rank_, size_, exchange.rounds_gathered), place);
      return false;
    }
    take_statuses(exchange, exchange.rounds_gathered);
    ++exchange.rounds_gathered;
    if (exchange.rounds_gathered < rounds_) {
      send_statuses(place, exchange, exchange.rounds_gathered);
    }
  }
  return true;
}

void StatusProtocol::take_statuses(Exchange& exchange, int round) {
  int of = source_of(rank_, size_, round);
  for (const RankStatus& rank_status : exchange.statuses[round]) {
    exchange.by_rank[of] = rank_status;
    of = (of + size_ - 1) % size_;
  }
}

void StatusProtocol::send_digest(const Place& place, const Exchange& exchange,
                                 int round) {
  Writer message;
  message.add(MessageHead{.kind = MessageKind::kDigest,
                          .round = static_cast<uint32_t>(round),
                          .place = place});
  message.add(exchange.digest);
  send_(target_of(rank_, size_, round), message.bytes());
}

void StatusProtocol::send_statuses(const Place& place, const Exchange& exchange,
                                   int round) {
  Writer message;
  message.add(MessageHead{.kind = MessageKind::kStatuses,
                          .round = static_cast<uint32_t>(round),
                          .place = place});
  int of = rank_;
  for (int i = 0; i < num_told(size_, round); ++i) {
    message.add(exchange.by_rank[of]);
    of = (of + size_ - 1) % size_;
  }
  send_(target_of(rank_, size_, round), message.bytes());
}

// What is not of the expected form comes from nobody who speaks this protocol,
// and is dropped.
void StatusProtocol::on_message(int from, Bytes message) {
  Reader reader(message);
  const auto head = reader.next<MessageHead>();
  if (!head) return;
  if (head->kind == MessageKind::kDeparture) {
    return on_departure(from, reader.rest());
  }
  const int round = static_cast<int>(head->round);
  if (round < 0 || round >= rounds_ || source_of(rank_, size_, round) != from) {
    return;
  }
  if (head->kind == MessageKind::kDigest) {
    const auto digest = reader.next<StatusDigest>();
    if (!digest) return;
    heard_[{from, head->place.channel}] = head->place.sequence;
    if (!is_open(head->place)) return;
    exchange_at(head->place).digests[round] = *digest;
  } else {
    if (!is_open(head->place)) return;
    std::vector<RankStatus> statuses;
    while (const auto rank_status = reader.next<RankStatus>()) {
      statuses.push_back(*rank_status);
    }
    if (statuses.size() != static_cast<size_t>(num_told(size_, round))) {
      return;
    }
    exchange_at(head->place).statuses[round] = std::move(statuses);
  }
  advance(head->place);
}

// Neither over nor broken on this rank; it may not have begun.
bool StatusProtocol::is_open(const Place& place) const {
  if (exchanges_.contains(place)) return true;
  const auto channel = channels_.find(place.channel);
  const bool is_over =
      channel != channels_.end() && place.sequence <= channel->second;
  return !is_over && absences_at(place).empty();
}

void StatusProtocol::leave(uint64_t channel, const RankStatus& last) {
  tell({.head = {.rank = rank_,
                 .reason = AbsenceReason::kLeft,
                 .iteration = last.iteration},
        .ends = {{.channel = channel, .last_sequence = last.sequence}}});
}

void StatusProtocol::abort_exchanges(const RankStatus& last) {
  Departure departure = {
      .head = {.rank = rank_, .reason = AbsenceReason::kTimedOut}};
  std::map<uint64_t, int64_t> ends = channels_;
  std::optional<StatusOf> failure;
  if (last.kind == StatusKind::kFailed) failure = {rank_, last};
  for (const auto& [place, exchange] : exchanges_) {
    if (!exchange.outcome) continue;
    int64_t& end = ends[place.channel];
    end = std::min(end, place.sequence - 1);
    if (!failure) failure = first_failure(exchange.digest);
  }
  departure.set_failure(failure);
  for (const auto& [channel, last] : ends) {
    departure.ends.push_back({.channel = channel, .last_sequence = last});
  }
  tell(departure);
}

void StatusProtocol::on_closed(int peer) {
  closed_.insert(peer);
  if (is_source(peer) && !has_done_all(peer)) tell(departure_of_closed(peer));
  // Some may lack only the statuses that were to be gathered.
  std::vector<Place> places;
  for (const auto& [place, exchange] : exchanges_) places.push_back(place);
  for (const Place& place : places) advance(place);
}

bool StatusProtocol::is_source(int peer) const {
  for (int round = 0; round < rounds_; ++round) {
    if (source_of(rank_, size_, round) == peer) return true;
  }
  return false;
}

// Has left all channels before, with nothing missing: not worth telling, since
// all programs end so.
bool StatusProtocol::has_done_all(int peer) const {
  const auto known = departed_.find(peer);
  if (known == departed_.end() || known->second.left.empty()) return false;
  return std::ranges::all_of(channels_, [&](const auto& entry) {
    const uint64_t channel = entry.first;
    if (channel == kHelloChannel) return true;
    const auto left = known->second.left.find(channel);
    if (left == known->second.left.end()) return false;
    const auto heard = heard_.find({peer, channel});
    return left->second.last_sequence <=
           (heard == heard_.end() ? 0 : heard->second);
  });
}

// The part that it has done, as seen from here.
StatusProtocol::Departure StatusProtocol::departure_of_closed(int peer) const {
  Departure departure = {
      .head = {.rank = peer, .reason = AbsenceReason::kClosed}};
  for (const auto& [of, sequence] : heard_) {
    if (of.first == peer) departure.ends.push_back({of.second, sequence});
  }
  departure.set_failure(failure_heard_from(peer));
  return departure;
}

std::optional<StatusOf> StatusProtocol::failure_heard_from(int peer) const {
  for (const auto& [place, exchange] : exchanges_) {
    for (int round = 0; round < rounds_; ++round) {
      if (source_of(rank_, size_, round) != peer) continue;
      const auto& come = exchange.digests[round];
      if (!come) continue;
      if (const auto failure = first_failure(*come)) return failure;
    }
  }
  return std::nullopt;
}

// It is missing; if it can't come any more, everybody is to know.
void StatusProtocol::require_from(int source, const Place& place) {
  if (!closed_.contains(source)) return;
  Departure departure = departure_of_closed(source);
  for (Departure::End& end : departure.ends) {
    if (end.channel != place.channel) continue;
    end.last_sequence = std::min(end.last_sequence, place.sequence - 1);
  }
  tell(departure);
}

void StatusProtocol::on_departure(int from, Bytes payload) {
  Reader reader(payload);
  const auto head = reader.next<Departure::Head>();
  if (!head || head->rank < 0 || head->rank >= size_) return;
  Departure departure = {.head = *head};
  while (const auto end = reader.next<Departure::End>()) {
    departure.ends.push_back(*end);
  }
  // Its last words may be known here only, in an exchange that this breaks.
  if (head->has_failure == 0) {
    departure.set_failure(failure_heard_from(static_cast<int>(head->rank)));
  }
  if (!merge(departure)) return;
  const bool adds_words = departure.head.has_failure != head->has_failure;
  spread(departure, /*except=*/adds_words ? rank_ : from);
  break_exchanges();
}

void StatusProtocol::tell(const Departure& departure) {
  if (!merge(departure)) return;
  spread(departure, /*except=*/rank_);
  break_exchanges();
}

void StatusProtocol::spread(const Departure& departure, int except) {
  Writer message;
  message.add(MessageHead{.kind = MessageKind::kDeparture});
  message.add(departure.head);
  for (const Departure::End& end : departure.ends) message.add(end);
  for (const int peer : neighbours_) {
    if (peer != except && !closed_.contains(peer)) send_(peer, message.bytes());
  }
}

// Whether it tells something new.
bool StatusProtocol::merge(const Departure& departure) {
  const Departure::Head& head = departure.head;
  Departed& known = departed_[static_cast<int>(head.rank)];
  if (head.reason == AbsenceReason::kLeft) {
    bool is_new = false;
    for (const Departure::End& end : departure.ends) {
      is_new |= known.left
                    .insert({end.channel,
                             {.last_sequence = end.last_sequence,
                              .iteration = head.iteration}})
                    .second;
    }
    return is_new;
  }
  std::map<uint64_t, int64_t> ends;
  for (const Departure::End& end : departure.ends) {
    int64_t last = end.last_sequence;
    if (known.ends) {
      const auto before = known.ends->find(end.channel);
      if (before == known.ends->end()) continue;
      last = std::min(last, before->second);
    }
    ends[end.channel] = last;
  }
  const bool is_closed = head.reason == AbsenceReason::kClosed;
  const bool is_new = known.ends != ends ||
                      (is_closed && known.reason != AbsenceReason::kClosed) ||
                      (head.has_failure != 0 && !known.failure);
  if (is_closed || !known.ends) known.reason = head.reason;
  if (head.has_failure != 0 && !known.failure) known.failure = head.failure;
  known.ends = std::move(ends);
  return is_new;
}

std::vector<int> StatusProtocol::closed_ranks() const {
  std::vector<int> closed;
  for (const auto& [rank, known] : departed_) {
    if (known.ends && known.reason == AbsenceReason::kClosed) {
      closed.push_back(rank);
    }
  }
  return closed;
}

std::vector<Absence> StatusProtocol::absences_at(const Place& place) const {
  std::vector<Absence> absences;
  for (const auto& [rank, known] : departed_) {
    const auto left = known.left.find(place.channel);
    if (left != known.left.end() &&
        place.sequence > left->second.last_sequence) {
      absences.push_back({.rank = rank,
                          .reason = AbsenceReason::kLeft,
                          .iteration = left->second.iteration});
      continue;
    }
    if (!known.ends) continue;
    const auto end = known.ends->find(place.channel);
    if (place.sequence > (end == known.ends->end() ? 0 : end->second)) {
      absences.push_back(
          {.rank = rank, .reason = known.reason, .failure = known.failure});
    }
  }
  return absences;
}

void StatusProtocol::break_exchanges() {
  std::erase_if(exchanges_, [this](const auto& entry) {
    const auto& [place, exchange] = entry;
    std::vector<Absence> absences = absences_at(place);
    if (absences.empty()) return false;
    if (exchange.outcome) exchange.outcome->finish_broken(std::move(absences));
    return true;
  });
}

}  // namespace brigade
