#include "brigade/comm/agreement.h"

#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/group_collectives.h"

namespace brigade {
namespace {

// Size of a text in an all-gather; longer texts are cut.
constexpr size_t kTextBytes = 2048;

using Numbers = std::vector<int64_t>;

// "Reducer: parameter" -> "parameter"
std::string_view noun_of(std::string_view item) {
  const size_t colon = item.find(": ");
  return colon == item.npos ? item : item.substr(colon + 2);
}

// The collectives of one comparison.
class Comparison {
 public:
  Comparison(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
             std::string_view item)
      : group_(group),
        failure_(c10::str("could not compare its ", noun_of(item),
                          "s with the other ranks'")) {}

  std::vector<Numbers> exchange(const Numbers& own) {
    const Numbers all = all_gather_ints(group_, own, failure_);
    std::vector<Numbers> by_rank;
    for (auto begin = all.begin(); begin != all.end(); begin += own.size()) {
      by_rank.emplace_back(begin, begin + own.size());
    }
    return by_rank;
  }

  std::vector<std::string> exchange_text(std::string own) {
    if (own.size() > kTextBytes)
      own.replace(kTextBytes - 3, std::string::npos, "...");
    Numbers words(kTextBytes / sizeof(int64_t), 0);
    std::memcpy(words.data(), own.data(), own.size());
    std::vector<std::string> texts;
    for (const Numbers& theirs : exchange(words)) {
      const char* bytes = reinterpret_cast<const char*>(theirs.data());
      texts.emplace_back(bytes, strnlen(bytes, kTextBytes));
    }
    return texts;
  }

 private:
  const c10::intrusive_ptr<c10d::ProcessGroup>& group_;
  const std::string failure_;
};

std::string describe_failures(const std::vector<std::string>& messages) {
  if (ranks_by_value(messages).size() == 1) return messages.front();
  return describe_by_value(messages, ": ", ": ", "\n");
}

// Names the item once if all texts have its name: "option a: 1" and "a: 2".
std::string describe_difference(const std::string& item, size_t index,
                                std::vector<std::string> texts) {
  std::string name = absl::StrCat(index);
  const std::string first = texts.front();
  const size_t colon = first.find(": ");
  if (colon != first.npos &&
      std::ranges::all_of(texts, [&](const std::string& text) {
        return text.starts_with(first.substr(0, colon + 2));
      })) {
    name = first.substr(0, colon);
    for (std::string& text : texts) text.erase(0, colon + 2);
  }
  for (std::string& text : texts) text.insert(0, ": ");  // never empty
  return absl::StrCat(item, " ", name, " differs between ranks:\n  ",
                      describe_by_value(texts, "", "", "\n  "));
}

const char* remedy_of(std::string_view item) {
  if (item.ends_with("option")) {
    return "\nPass the same options on every rank.";
  }
  if (item.ends_with("setting")) {
    return "\nMake the same changes on every rank, between the same forwards.";
  }
  return item.ends_with("parameter") || item.ends_with("buffer")
             ? "\nConstruct the same module on every rank."
             : "";
}

// Returns the same text on every rank; empty if all agree.
std::string find_disagreement(Comparison comparison, const std::string& item,
                              std::span<const std::string> items,
                              const absl::Status& local_status) {
  Numbers hashes;
  uint64_t hash = 0;  // of all items
  for (const std::string& text : items) {
    hashes.push_back(static_cast<int64_t>(c10::get_hash(text)));
    hash = c10::hash_combine(hash, hashes.back());
  }
  const std::vector<Numbers> all = comparison.exchange(
      {local_status.ok() ? 0 : 1, static_cast<int64_t>(items.size()),
       static_cast<int64_t>(hash)});
  if (std::ranges::any_of(all, [](const auto& row) { return row[0] != 0; })) {
    const std::string message(local_status.message());
    return describe_failures(comparison.exchange_text(
        local_status.ok() || !message.empty() ? message : "unknown error"));
  }
  if (ranks_by_value(all).size() == 1) return "";

  Numbers counts;
  for (const Numbers& row : all) counts.push_back(row[1]);
  hashes.resize(std::ranges::max(counts));
  const std::vector<Numbers> hashes_by_rank = comparison.exchange(hashes);
  size_t index = 0;  // the first one that differs
  while (index + 1 < hashes.size() &&
         std::ranges::all_of(hashes_by_rank, [&](const Numbers& theirs) {
           return theirs[index] == hashes[index];
         })) {
    ++index;
  }
  std::string message = describe_difference(
      item, index,
      comparison.exchange_text(index < items.size() ? items[index] : "none"));
  if (ranks_by_value(counts).size() > 1) {
    absl::StrAppend(&message, "\n", describe_by_value(counts), " ",
                    std::string(noun_of(item)), "s.");
  }
  return message + remedy_of(item);
}

}  // namespace

void require_agreement(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                       std::string_view item_name,
                       std::span<const std::string> items,
                       const absl::Status& local_status) {
  if (group->getSize() == 1) return throw_if_error(local_status);
  const std::string disagreement = find_disagreement(
      {group, item_name}, std::string(item_name), items, local_status);
  TORCH_CHECK_VALUE(disagreement.empty(), disagreement);
}

}  // namespace brigade
