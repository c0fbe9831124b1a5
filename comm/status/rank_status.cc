#include "brigade/comm/status/rank_status.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <set>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "brigade/comm/errors/error_texts.h"

namespace brigade {
namespace {

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

}  // namespace brigade
