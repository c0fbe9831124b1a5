#include "brigade/comm/stall_status.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace brigade {
namespace {

std::string questions_key(const std::string& prefix) {
  return absl::StrCat(prefix, "questions");
}

}  // namespace

StallStatus::StallStatus(c10::intrusive_ptr<c10d::Store> store,
                         std::string prefix, int rank, int world_size)
    : store_(std::move(store)),
      rank_(rank),
      world_size_(world_size),
      prefix_(std::move(prefix)) {}

int64_t StallStatus::ask() { return store_->add(questions_key(prefix_), 1); }

int64_t StallStatus::num_questions() {
  const std::string key = questions_key(prefix_);
  return store_->check({key}) ? store_->add(key, 0) : 0;
}

void StallStatus::post(const std::string& line) {
  store_->set(line_key(rank_), line);
}

std::optional<std::string> StallStatus::read(int rank) {
  const std::string key = line_key(rank);
  if (!store_->check({key})) return std::nullopt;
  return store_->get_to_str(key);
}

std::string StallStatus::line_key(int rank) const {
  return absl::StrCat(prefix_, "line/", rank);
}

}  // namespace brigade
