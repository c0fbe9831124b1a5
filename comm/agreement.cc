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
#include "brigade/comm/errors/liveness_probe.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/errors/ranks_by_value.h"
#include "brigade/comm/errors/status_bridge.h"

namespace brigade {
namespace {

// One text of a rank in an exchange; longer ones are cut.
constexpr size_t kTextBytes = 2048;

using Digest = std::array<int64_t, 2>;

// Every rank's `own`, by rank.
std::vector<std::vector<int64_t>> exchange(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, at::Device device,
    const std::vector<int64_t>& own) {
  const int64_t length = static_cast<int64_t>(own.size());
  std::vector<at::Tensor> inputs = {at::tensor(own, at::kLong).to(device)};
  std::vector<std::vector<at::Tensor>> outputs(1);  // by rank, [length]
  for (int rank = 0; rank < group->getSize(); ++rank) {
    outputs.front().push_back(at::empty({length}, inputs.front().options()));
  }
  // Not into one tensor: groups written in Python can't override that.
  group->allgather(outputs, inputs)->wait();
  std::vector<std::vector<int64_t>> all;
  for (const at::Tensor& output : outputs.front()) {
    const at::Tensor theirs = output.cpu();
    const int64_t* data = theirs.const_data_ptr<int64_t>();
    all.emplace_back(data, data + length);
  }
  return all;
}

std::vector<std::string> exchange_text(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, at::Device device,
    std::string own) {
  if (own.size() > kTextBytes)
    own.replace(kTextBytes - 3, std::string::npos, "...");
  std::vector<int64_t> words(kTextBytes / sizeof(int64_t), 0);
  std::memcpy(words.data(), own.data(), own.size());
  std::vector<std::string> texts;
  for (const std::vector<int64_t>& theirs : exchange(group, device, words)) {
    const char* bytes = reinterpret_cast<const char*>(theirs.data());
    texts.emplace_back(bytes, strnlen(bytes, kTextBytes));
  }
  return texts;
}

// Of the first `count` items, and of how many there are of them.
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
  return std::all_of(rows.begin(), rows.end(),
                     [&](const auto& row) { return row == rows.front(); });
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

// The first index at which the ranks' items differ, by bisection over digests
// of what comes before.  REQUIRES: they differ.
size_t first_difference(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                        at::Device device, std::span<const std::string> items,
                        size_t longest) {
  size_t equal = 0;  // the first `equal` items are the same everywhere
  size_t different = longest;  // the first `different` items are not
  while (different - equal > 1) {
    const size_t middle = equal + (different - equal) / 2;
    const Digest digest = digest_of_first(items, middle);
    if (all_equal(exchange(group, device, {digest[0], digest[1]}))) {
      equal = middle;
    } else {
      different = middle;
    }
  }
  return equal;
}

// What every rank says alike, or nothing when all agree.
std::string find_disagreement(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, at::Device device,
    std::string_view what, std::span<const std::string> items,
    const absl::Status& local_status) {
  const Digest digest = digest_of_first(items, items.size());
  const auto all =
      exchange(group, device,
               {local_status.ok() ? 0 : 1, static_cast<int64_t>(items.size()),
                digest[0], digest[1]});

  const bool failed = std::any_of(all.begin(), all.end(),
                                  [](const auto& row) { return row[0] != 0; });
  if (failed) {
    const std::string message(local_status.message());
    return describe_failures(exchange_text(
        group, device,
        local_status.ok() || !message.empty() ? message : "unknown error"));
  }
  if (all_equal(all)) return "";

  std::vector<int64_t> counts;
  for (const auto& row : all) counts.push_back(row[1]);
  const size_t longest = *std::max_element(counts.begin(), counts.end());
  const size_t index = first_difference(group, device, items, longest);
  const std::string own = index < items.size()
                              ? items[index]
                              : absl::StrCat("no such ", std::string(what));
  return describe_difference(what, index, exchange_text(group, device, own),
                             counts);
}

}  // namespace

void require_agreement(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                       at::Device device, std::string_view what,
                       std::span<const std::string> items,
                       const absl::Status& local_status) {
  if (group->getSize() == 1) {
    throw_if_error(local_status);
    return;
  }
  std::string disagreement;
  try {
    disagreement = find_disagreement(group, device, what, items, local_status);
  } catch (...) {
    throw_peer_error(
        c10::str("rank ", group->getRank(), " of ", group->getSize(),
                 " could not compare its ", what, "s with the other ranks'"),
        std::current_exception());
  }
  TORCH_CHECK_VALUE(disagreement.empty(), disagreement);
}

}  // namespace brigade
