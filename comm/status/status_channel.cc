#include "brigade/comm/status/status_channel.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/group_collectives.h"
#include "brigade/comm/group/group_info.h"

namespace brigade {
namespace {

using std::chrono::milliseconds;

// Survivors on one host notice a death within milliseconds of each other.
constexpr milliseconds kProbeTimeout{3000};

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

void StatusChannel::check_process() const {
  TORCH_CHECK(is_usable_here(), "StatusChannel: expected use in process ",
              process_, ", which made it, found process ", getpid(),
              ", which was forked from it.\nMake the group and its users after "
              "the fork.");
}

RankStatus StatusChannel::exchange(RankStatus own) {
  check_process();
  if (failure_) std::rethrow_exception(failure_);
  own.sequence = last_.sequence + 1;
  last_ = own;
  if (transport_) transport_->send(own);
  return own;
}

std::vector<RankStatus> StatusChannel::await(
    const RankStatus& own, std::optional<milliseconds> timeout) {
  check_process();
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
    fail_naming(absent.what(), own, /*probe=*/nullptr);
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
  const std::string context =
      absl::StrCat("waiting for the other ranks' statuses on rank ",
                   group_->getRank(), ", which ", describe_status(own));
  LivenessProbe probe;
  if (!prefix_.empty()) {
    const std::string key = end_key(prefix_);
    probe_liveness(group_, key, own.iteration, milliseconds{0});
    transport_->abort(own);  // makes the others notice and answer
    probe = probe_liveness(
        group_, key, own.iteration, kProbeTimeout,
        [transport = transport_] { return transport->dead_ranks(); });
  }
  const LivenessProbe* const shown = prefix_.empty() ? nullptr : &probe;
  const std::string leaver = describe_first_leaver(probe);
  if (!leaver.empty()) fail_naming(leaver, own, /*probe=*/nullptr);
  if (!cause) fail_naming(describe_silence(probe, limit), own, shown);
  fail_with(context, cause, shown);
}

void StatusChannel::fail_naming(const std::string& text, const RankStatus& own,
                                const LivenessProbe* probe) {
  fail_with("",
            std::make_exception_ptr(std::runtime_error(absl::StrCat(
                text, text.ends_with('.') ? "" : ".", "\nRank ",
                group_->getRank(), ", which ", describe_status(own),
                ", waited for the other ranks' statuses"))),
            probe);
}

void StatusChannel::fail_with(const std::string& context,
                              const std::exception_ptr& cause,
                              const LivenessProbe* probe) {
  try {
    throw_peer_error(context, cause, probe);
  } catch (...) {
    failure_ = std::current_exception();
    throw;
  }
}

}  // namespace brigade
