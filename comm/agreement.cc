#include "brigade/comm/agreement.h"

#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/group_collectives.h"

namespace brigade {
namespace {

// One text of a rank in an exchange; longer ones are cut.
constexpr size_t kTextBytes = 2048;

using Digest = std::array<int64_t, 2>;

// The collectives of one comparison.
class Comparison {
 public:
  Comparison(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
             std::string_view item)
      : group_(group),
        doing_(c10::str("could not compare its ", item,
                        "s with the other ranks'")) {}

  // Every rank's `own`, by rank.
  std::vector<std::vector<int64_t>> exchange(const std::vector<int64_t>& own) {
    const std::vector<int64_t> all = numbers_of_ranks(group_, own, doing_);
    std::vector<std::vector<int64_t>> by_rank;
    for (auto begin = all.begin(); begin != all.end(); begin += own.size()) {
      by_rank.emplace_back(begin, begin + own.size());
    }
    return by_rank;
  }

  std::vector<std::string> exchange_text(std::string own) {
    if (own.size() > kTextBytes)
      own.replace(kTextBytes - 3, std::string::npos, "...");
    std::vector<int64_t> words(kTextBytes / sizeof(int64_t), 0);
    std::memcpy(words.data(), own.data(), own.size());
    std::vector<std::string> texts;
    for (const std::vector<int64_t>& theirs : exchange(words)) {
      const char* bytes = reinterpret_cast<const char*>(theirs.data());
      texts.emplace_back(bytes, strnlen(bytes, kTextBytes));
    }
    return texts;
  }

 private:
  const c10::intrusive_ptr<c10d::ProcessGroup>& group_;
  const std::string doing_;
};

// Hash of the first `count` items and of their number.
Digest digest_of_first(std::span<const std::string> items, size_t count) {
  count = std::min(count, items.size());
  std::string joined = absl::StrCat(count, ":");
  for (const std::string& item : items.first(count)) {
    absl::StrAppend(&joined, item.size(), ":", item);
  }
  const std::string hex = c10::sha1(joined).str();  // 40 digits
  return {static_cast<int64_t>(std::stoull(hex.substr(0, 16), nullptr, 16)),
          static_cast<int64_t>(std::stoull(hex.substr(16, 16), nullptr, 16))};
}

bool all_equal(const std::vector<std::vector<int64_t>>& rows) {
  return std::ranges::all_of(
      rows, [&](const auto& row) { return row == rows.front(); });
}

std::string describe_failures(const std::vector<std::string>& messages) {
  const std::vector<RanksOfValue<std::string>> groups =
      ranks_by_value(messages);
  if (groups.size() == 1) return groups.front().value;
  std::vector<std::string> parts;
  for (const RanksOfValue<std::string>& group : groups) {
    if (group.value.empty()) continue;  // these ranks are fine
    parts.push_back(
        absl::StrCat(describe_ranks(group.ranks), ": ", group.value));
  }
  return absl::StrJoin(parts, "\n");
}

std::string describe_difference(std::string_view what, size_t index,
                                const std::vector<std::string>& texts,
                                const std::vector<int64_t>& counts) {
  const std::string item(what);
  std::string message =
      absl::StrCat("expected the same ", item, "s on every rank; ", item, " ",
                   index, " differs: ", describe_by_value(texts), ".");
  if (ranks_by_value(counts).size() > 1) {
    absl::StrAppend(&message, " Number of ", item,
                    "s: ", describe_by_value(counts), ".");
  }
  return message;
}

// The first index at which the ranks' items differ, by bisection over hashes of
// the items before it. REQUIRES: they differ.
size_t first_difference(Comparison& comparison,
                        std::span<const std::string> items, size_t longest) {
  size_t equal = 0;  // the first `equal` items are the same everywhere
  size_t different = longest;  // the first `different` items are not
  while (different - equal > 1) {
    const size_t middle = equal + (different - equal) / 2;
    const Digest digest = digest_of_first(items, middle);
    if (all_equal(comparison.exchange({digest[0], digest[1]}))) {
      equal = middle;
    } else {
      different = middle;
    }
  }
  return equal;
}

// The same text on every rank; empty if all agree.
std::string find_disagreement(Comparison& comparison, std::string_view what,
                              std::span<const std::string> items,
                              const absl::Status& local_status) {
  const Digest digest = digest_of_first(items, items.size());
  const auto all = comparison.exchange({local_status.ok() ? 0 : 1,
                                        static_cast<int64_t>(items.size()),
                                        digest[0], digest[1]});
  if (std::ranges::any_of(all, [](const auto& row) { return row[0] != 0; })) {
    const std::string message(local_status.message());
    return describe_failures(comparison.exchange_text(
        local_status.ok() || !message.empty() ? message : "unknown error"));
  }
  if (all_equal(all)) return "";

  std::vector<int64_t> counts;
  for (const auto& row : all) counts.push_back(row[1]);
  const size_t index =
      first_difference(comparison, items, std::ranges::max(counts));
  const std::string own = index < items.size()
                              ? items[index]
                              : absl::StrCat("no such ", std::string(what));
  return describe_difference(what, index, comparison.exchange_text(own),
                             counts);
}

}  // namespace

void require_agreement(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                       std::string_view what,
                       std::span<const std::string> items,
                       const absl::Status& local_status) {
  if (group->getSize() == 1) return throw_if_error(local_status);
  Comparison comparison(group, what);
  const std::string disagreement =
      find_disagreement(comparison, what, items, local_status);
  TORCH_CHECK_VALUE(disagreement.empty(), disagreement);
}

}  // namespace brigade
