#include "brigade/comm/status/status_channel.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <thread>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/group/group_collectives.h"
#include "brigade/comm/group/group_info.h"
#include "brigade/comm/group/shared_segment.h"
#include "brigade/comm/process_group.h"
#include "brigade/comm/streams/streams.h"

namespace brigade {
namespace {

using std::chrono::milliseconds;

// ---- Status.

constexpr std::string_view kCut = "...";

bool continues_a_character(char c) {
  return (static_cast<unsigned char>(c) & 0xC0) == 0x80;
}

template <typename F>
auto by_rank_of(std::span<const RankStatus> by_rank, F part) {
  std::vector<decltype(part(by_rank.front()))> parts;
  for (const RankStatus& rank_status : by_rank) {
    parts.push_back(part(rank_status));
  }
  return parts;
}

bool all_equal(std::span<const RankStatus> by_rank, auto part) {
  return std::ranges::all_of(by_rank, [&](const RankStatus& rank_status) {
    return std::invoke(part, rank_status) == std::invoke(part, by_rank.front());
  });
}

std::string describe_fingerprint(const RankStatus& rank_status) {
  const std::string words(words_of(rank_status.text));
  return absl::StrFormat("%016x%s%s%s", rank_status.fingerprint,
                         words.empty() ? "" : " (", words,
                         words.empty() ? "" : ")");
}

auto place_of(const RankStatus& s) {
  return std::tuple(s.kind, s.iteration, s.unit);
}

// ---- Transport in shared memory.

// A rank has sent at most kMaxStatusesInFlight more exchanges than it has
// received, so it is at most twice that many ahead of a reader.
constexpr int64_t kDepth = 2 * kMaxStatusesInFlight + 1;

// One rank's region of the segment; initially all zeros.
struct Region {
  std::atomic<int64_t> num_sent;
  std::array<RankStatus, kDepth> ring;  // by sequence modulo kDepth
};

class SharedStatusTransport final : public StatusTransport {
 public:
  explicit SharedStatusTransport(std::shared_ptr<SharedSegment> segment)
      : segment_(std::move(segment)) {}

  void send(const RankStatus& own) override {
    Region& region = of(segment_->rank());
    region.ring[own.sequence % kDepth] = own;
    region.num_sent.store(own.sequence);
    segment_->notify();
  }

  bool is_complete(int64_t sequence) override {
    for (int rank = 0; rank < segment_->size(); ++rank) {
      if (!has_sent(rank, sequence)) {
        return segment_->is_closed() || !segment_->is_alive(rank);
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

  void abort(const RankStatus& last) override {
    segment_->close(absl::StrCat("rank ", segment_->name_of(segment_->rank()),
                                 " has stopped waiting: it ",
                                 describe_status(last)));
  }

  std::vector<int> dead_ranks() override { return segment_->dead_ranks(); }

 private:
  Region& of(int rank) const {
    return *reinterpret_cast<Region*>(segment_->region(rank));
  }

  const RankStatus& last_of(int rank) const {
    return of(rank).ring[of(rank).num_sent.load() % kDepth];
  }

  bool has_sent(int rank, int64_t sequence) const {
    return of(rank).num_sent.load() >= sequence;
  }

  bool await(int rank, int64_t sequence, Deadline deadline) {
    try {
      return segment_->wait_for(rank, deadline,
                                [&] { return has_sent(rank, sequence); });
    } catch (const c10::Error& error) {
      const std::string reason = error.what_without_backtrace();
      if (segment_->has_left(rank) && segment_->lost_rank() < 0) {
        throw RankLost(
            describe_leaver(segment_->name_of(rank), last_of(rank).iteration));
      }
      // A rank that gave up does not know whether others are lost.
      if (segment_->is_closed() && segment_->lost_rank() < 0) {
        throw std::runtime_error(reason);
      }
      throw RankLost(reason + "; see its log");
    }
  }

  const std::shared_ptr<SharedSegment> segment_;
};

// ---- Transport by all-gathers.

constexpr auto kStatusBytes = static_cast<int64_t>(sizeof(RankStatus));
constexpr milliseconds kEventInterval{1};

class GatheringStatusTransport final : public StatusTransport {
 public:
  // `subgroup`: null to use `group` itself.
  GatheringStatusTransport(c10::intrusive_ptr<c10d::ProcessGroup> group,
                           std::unique_ptr<GroupScope> subgroup)
      : subgroup_(std::move(subgroup)),
        group_(subgroup_ ? subgroup_->group() : std::move(group)),
        device_(control_device(*group_)) {}

  // An exchange that was not received may never end.
  ~GatheringStatusTransport() override {
    if (subgroup_ && !exchanges_.empty()) close_group(*group_);
  }

  void send(const RankStatus& own) override {
    const at::NoGradGuard no_grad;
    at::Tensor input = at::empty({kStatusBytes}, at::kByte);
    std::memcpy(input.mutable_data_ptr(), &own, sizeof(own));
    std::optional<c10::StreamGuard> on_side_stream;
    if (!device_.is_cpu()) {
      on_side_stream.emplace(side_stream(device_));
      input = input.to(device_);
    }
    Exchange exchange = {
        .input = input,
        .gathered =
            at::empty({group_->getSize(), kStatusBytes}, input.options())};
    std::vector<std::vector<at::Tensor>> outputs = {exchange.gathered.unbind()};
    std::vector<at::Tensor> inputs = {input};
    exchange.work = group_->allgather(outputs, inputs);
    exchange.future = exchange.work->getFuture();
    if (on_side_stream) {
      exchange.future->wait();  // orders the stream only
      exchange.gathered =
          exchange.gathered.to(at::TensorOptions(at::kCPU).pinned_memory(true),
                               /*non_blocking=*/true);
      exchange.copied.emplace(device_.type());
      exchange.copied->record(on_side_stream->current_stream());
    }
    exchanges_.emplace(own.sequence, std::move(exchange));
  }

  bool is_complete(int64_t sequence) override {
    const Exchange& exchange = exchanges_.at(sequence);
    return exchange.future->completed() &&
           (!exchange.copied || exchange.copied->query());
  }

  std::optional<std::vector<RankStatus>> receive(int64_t sequence,
                                                 Deadline deadline) override {
    const auto left = std::chrono::ceil<milliseconds>(
        deadline - std::chrono::steady_clock::now());
    Exchange& exchange = exchanges_.at(sequence);
    if (!wait_for(*exchange.future, std::max(left, milliseconds(0)))) {
      return std::nullopt;
    }
    if (exchange.future->hasError()) {
      std::rethrow_exception(exchange.future->exception_ptr());
    }
    while (exchange.copied && !exchange.copied->query()) {
      if (std::chrono::steady_clock::now() >= deadline) return std::nullopt;
      std::this_thread::sleep_for(kEventInterval);
    }
    const at::Tensor gathered = exchange.gathered;
    std::vector<RankStatus> by_rank(static_cast<size_t>(group_->getSize()));
    std::memcpy(by_rank.data(), gathered.const_data_ptr(),
                by_rank.size() * sizeof(RankStatus));
    exchanges_.erase(sequence);
    return by_rank;
  }

  void abort(const RankStatus& last) override { close_group(*group_); }

 private:
  struct Exchange {
    at::Tensor input;     // uint8 [bytes of a status]
    at::Tensor gathered;  // uint8 [world size, bytes of a status]
    c10::intrusive_ptr<c10d::Work> work = {};
    c10::intrusive_ptr<c10::ivalue::Future> future = {};
    std::optional<c10::Event> copied = {};  // devices: gathered is on the host
  };

  const std::unique_ptr<GroupScope> subgroup_;
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const c10::Device device_;
  std::map<int64_t, Exchange> exchanges_;  // by sequence
};

// ---- Channel.

// Survivors on one host notice a death within milliseconds of each other.
constexpr milliseconds kProbeTimeout{1000};

std::string end_key(const std::string& prefix) { return prefix + "end"; }

// Encodes, in an answer to a liveness probe, that a rank has left; its own
// inverse. Answers >= 0 come from ranks that have not.
int64_t left_after(int64_t iteration) { return -1 - iteration; }

// Empty if none has left.
std::string describe_first_leaver(const LivenessProbe& probe) {
  for (size_t rank = 0; rank < probe.answers.size(); ++rank) {
    const int64_t answer = probe.answers[rank].value_or(0);
    if (answer < 0) {
      return describe_leaver(static_cast<int>(rank), left_after(answer));
    }
  }
  return "";
}

std::string describe_silence(const LivenessProbe& probe, milliseconds limit) {
  const std::vector<int> absent = probe.absent();
  return absl::StrCat(
      absent.empty() ? "a rank" : describe_ranks(absent),
      " did not respond within ", describe_seconds(limit),
      ".\nLook at its stack or log: it is blocked, slow or has ended.");
}

}  // namespace

StatusText status_text(std::string_view words) {
  StatusText text = {};
  words = words.substr(0, words.find("\n\nAt:"));  // pybind11's Python stack
  if (words.size() > text.size()) {
    const size_t line = words.rfind('\n', text.size());
    if (line != words.npos && line >= text.size() / 2) {
      words = words.substr(0, line);
    }
  }
  if (words.size() <= text.size()) {
    std::copy(words.begin(), words.end(), text.begin());
    return text;
  }
  size_t length = text.size() - kCut.size();
  while (length > 0 && continues_a_character(words[length])) --length;
  std::copy_n(words.begin(), length, text.begin());
  std::copy(kCut.begin(), kCut.end(), text.begin() + length);
  return text;
}

std::string_view words_of(const StatusText& text) {
  return {text.data(), strnlen(text.data(), text.size())};
}

std::string describe_leaver(int rank, int64_t iteration) {
  return absl::StrCat(
      "rank ", rank, " destroyed its model after ",
      describe_iteration(iteration),
      ".\nIf it had fewer batches, use join(), or step_without_data() of a "
      "sharded model; otherwise see its log.");
}

std::string describe_status(const RankStatus& rank_status) {
  const std::string iteration = describe_iteration(rank_status.iteration);
  const std::string words(words_of(rank_status.text));
  switch (rank_status.kind) {
    case StatusKind::kBegin:
      return absl::StrCat("began ", iteration,
                          words.empty() ? "" : " (" + words + ")");
    case StatusKind::kAsk:
      return absl::StrCat(words, " after ", iteration);
    case StatusKind::kEnd:
      return "ended " + iteration;
    case StatusKind::kChained:
      return "has launched the second collectives of " + iteration;
    case StatusKind::kArrived:
      return "has the results of " + iteration;
    case StatusKind::kFailed: {
      std::string failure = "failed in " + iteration;
      if (rank_status.unit >= 0) {
        absl::StrAppend(&failure, " at launch ", rank_status.unit);
      }
      if (!words.empty()) absl::StrAppend(&failure, ": ", words);
      return failure;
    }
  }
  return absl::StrCat("sent a status of unknown kind ",
                      static_cast<int64_t>(rank_status.kind));
}

absl::Status check_statuses(std::span<const RankStatus> by_rank,
                            const char* remedy) {
  const RankStatus& first = by_rank.front();
  if (first.kind != StatusKind::kFailed && all_equal(by_rank, place_of) &&
      all_equal(by_rank, &RankStatus::fingerprint) &&
      all_equal(by_rank, &RankStatus::others)) {
    return absl::OkStatus();
  }
  const auto failures =
      by_rank_of(by_rank, [](const RankStatus& s) -> std::string {
        return s.kind == StatusKind::kFailed ? describe_status(s) : "";
      });
  if (std::string text = describe_by_value(failures, " ", " ", "\n");
      !text.empty()) {
    return absl::AbortedError(text);
  }

  // A new hook is compared at once, while peers without it end an iteration.
  const auto has_new_hook = [&](const RankStatus& s) {
    return s.hook_at > 0 &&
           std::ranges::any_of(by_rank, [&](const RankStatus& peer) {
             return peer.kind == StatusKind::kEnd &&
                    peer.fingerprint != s.fingerprint;
           });
  };
  if (std::ranges::any_of(by_rank, has_new_hook)) {
    const auto describe_change = [&](const RankStatus& s) {
      if (!has_new_hook(s)) return describe_status(s);
      return absl::StrCat("changed the comm hook (",
                          std::string(words_of(s.text).substr(s.hook_at)),
                          ") before iteration ", s.iteration);
    };
    return absl::FailedPreconditionError(absl::StrCat(
        describe_by_value(by_rank_of(by_rank, describe_change), " ", " "),
        ".\nRegister the same comm hook on every rank, before the same "
        "iteration."));
  }
  if (!all_equal(by_rank, place_of)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "expected the same state on every rank: ",
        describe_by_value(by_rank_of(by_rank, describe_status), " ", " "),
        ".\n", remedy));
  }
  const std::string iteration = describe_iteration(first.iteration);
  if (!all_equal(by_rank, &RankStatus::fingerprint)) {
    const auto question = [](const RankStatus& s) {
      return std::string(s.kind == StatusKind::kAsk ? words_of(s.text) : "");
    };
    if (!all_equal(by_rank, question)) {
      return absl::FailedPreconditionError(absl::StrCat(
          "expected the same call on every rank after ", iteration, ": ",
          describe_by_value(by_rank_of(by_rank, question), " ", " "),
          ".\nMake the same calls on all ranks, in the same order."));
    }
    return absl::FailedPreconditionError(absl::StrCat(
        "expected the same plan and options on every rank in ", iteration, ": ",
        describe_by_value(by_rank_of(by_rank, describe_fingerprint)),
        ".\nGive every rank the same options."));
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "expected the collectives of comm hook ",
      std::string(words_of(first.text)),
      " and the program's own on this group in the same number and at the "
      "same positions in ",
      iteration,
      " on every rank, found a difference; results may be wrong.\nLaunch the "
      "same collectives on every rank, and those that follow a future with "
      "then_collective()."));
}

bool must_close_groups(std::span<const RankStatus> by_rank) {
  bool has_begun = false;
  bool has_ended = false;
  bool has_failed = false;
  bool has_others = false;
  std::set<uint64_t> others;  // of ranks with kEnd
  for (const RankStatus& s : by_rank) {
    if (s.cannot_continue != 0) return true;
    has_begun |= s.kind == StatusKind::kBegin;
    has_ended |= s.kind == StatusKind::kEnd;
    has_failed |= s.kind == StatusKind::kFailed;
    has_others |= s.has_others != 0;
    if (s.kind == StatusKind::kEnd) others.insert(s.others);
  }
  return others.size() > 1 || (has_others && (has_ended || has_failed)) ||
         (has_ended && has_begun);
}

std::unique_ptr<StatusTransport> make_shared_status_transport(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  auto segment = SharedSegment::make(group, sizeof(Region));
  if (!segment) return nullptr;
  return std::make_unique<SharedStatusTransport>(std::move(segment));
}

std::unique_ptr<StatusTransport> make_gathering_status_transport(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  std::unique_ptr<GroupScope> subgroup;
  if (!group->getDeviceTypes().empty()) {
    std::vector<int> ranks(static_cast<size_t>(group->getSize()));
    std::iota(ranks.begin(), ranks.end(), 0);
    subgroup.reset(new GroupScope(  // not movable
        make_subgroup(group, ranks, control_device(*group))));
  }
  return std::make_unique<GatheringStatusTransport>(group, std::move(subgroup));
}

StatusChannel::StatusChannel(c10::intrusive_ptr<c10d::ProcessGroup> group)
    : group_(std::move(group)),
      process_(getpid()),
      timeout_(group_timeout(*group_)) {
  if (auto* answers = find_simulated_peers(*group_, at::kCPU)) {
    transport_ = answers->make_status_transport();
  } else if (has_peers(*group_)) {
    connect();
  }
}

void StatusChannel::connect() {
  try {
    transport_ = make_shared_status_transport(group_);
    if (!transport_) transport_ = make_gathering_status_transport(group_);
    prefix_ = absl::StrCat("brigade/status/", channel_number(group_), "/");
  } catch (...) {
    throw_peer_error(absl::StrCat("status channel: rank ", group_->getRank(),
                                  " of ", group_->getSize(),
                                  " could not connect to the other ranks"),
                     std::current_exception());
  }
}

StatusChannel::~StatusChannel() {
  if (!transport_) return;
  if (!is_usable_here()) {  // the parent owns memory and connections
    new std::shared_ptr<StatusTransport>(transport_);
    return;
  }
  if (failure_ || prefix_.empty()) return;
  probe_liveness(group_, end_key(prefix_), left_after(last_.iteration),
                 milliseconds{0});
}

RankStatus StatusChannel::exchange(RankStatus own) {
  check_process("StatusChannel", process_);
  if (failure_) std::rethrow_exception(failure_);
  own.sequence = last_.sequence + 1;
  last_ = own;
  if (transport_) transport_->send(own);
  return own;
}

std::vector<RankStatus> StatusChannel::await(
    const RankStatus& own, std::optional<milliseconds> timeout) {
  check_process("StatusChannel", process_);
  if (!transport_) {
    return std::vector<RankStatus>(static_cast<size_t>(group_->getSize()), own);
  }
  if (failure_) std::rethrow_exception(failure_);
  const milliseconds limit = std::min(timeout.value_or(timeout_), timeout_);
  try {
    auto by_rank = transport_->receive(
        own.sequence, std::chrono::steady_clock::now() + limit);
    if (by_rank) return *std::move(by_rank);
  } catch (const RankLost& absent) {
    fail_with(absent.what(), own);
  } catch (...) {
    fail(own, std::current_exception(), limit);
  }
  fail(own, /*cause=*/nullptr, limit);
}

bool StatusChannel::is_complete(const RankStatus& own) {
  return !transport_ || failure_ || transport_->is_complete(own.sequence);
}

std::optional<LivenessProbe> StatusChannel::find_survivors(
    const std::string& key) {
  if (prefix_.empty()) return std::nullopt;
  return probe_liveness(
      group_, absl::StrCat(prefix_, "failed/", key), 1, kProbeTimeout,
      [transport = transport_] { return transport->dead_ranks(); });
}

void StatusChannel::abort(const std::exception_ptr& cause) {
  if (!transport_ || failure_) return;
  failure_ = cause;
  if (!prefix_.empty()) {
    probe_liveness(group_, end_key(prefix_), last_.iteration, milliseconds{0});
  }
  transport_->abort(last_);
}

// `cause`: null at the time limit.
void StatusChannel::fail(const RankStatus& own, const std::exception_ptr& cause,
                         milliseconds limit) {
  LivenessProbe probe;
  if (!prefix_.empty()) {
    const std::string key = end_key(prefix_);
    probe_liveness(group_, key, own.iteration, milliseconds{0});
    transport_->abort(own);  // makes the others notice and answer
    probe = probe_liveness(
        group_, key, own.iteration, kProbeTimeout,
        [transport = transport_] { return transport->dead_ranks(); });
  }
  const std::string leaver = describe_first_leaver(probe);
  if (!leaver.empty()) fail_with(leaver, own);
  fail_with(cause ? "" : describe_silence(probe, limit), own, cause,
            prefix_.empty() ? nullptr : &probe);
}

void StatusChannel::fail_with(const std::string& text, const RankStatus& own,
                              const std::exception_ptr& cause,
                              const LivenessProbe* probe) {
  const std::string place =
      absl::StrCat(group_->getRank(), ", which ", describe_status(own));
  try {
    if (cause) {
      throw_peer_error("waiting for the other ranks' statuses on rank " + place,
                       cause, probe);
    }
    throw_peer_error("",
                     std::make_exception_ptr(std::runtime_error(absl::StrCat(
                         text, text.ends_with('.') ? "" : ".", "\nRank ", place,
                         ", waited for the other ranks' statuses"))),
                     probe);
  } catch (...) {
    failure_ = std::current_exception();
    throw;
  }
}

}  // namespace brigade
