#include "brigade/comm/progress_board.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace brigade {
namespace {

std::string questions_key(const std::string& prefix) {
  return absl::StrCat(prefix, "questions");
}

}  // namespace

ProgressBoard::ProgressBoard(c10::intrusive_ptr<c10d::Store> store,
                             std::string prefix, int rank, int world_size)
    : store_(std::move(store)),
      rank_(rank),
      world_size_(world_size),
      prefix_(std::move(prefix)) {}

int64_t ProgressBoard::ask() { return store_->add(questions_key(prefix_), 1); }

int64_t ProgressBoard::num_questions() {
  const std::string key = questions_key(prefix_);
  return store_->check({key}) ? store_->add(key, 0) : 0;
}

void ProgressBoard::post(const std::string& line) {
  store_->set(line_key(rank_), line);
}

std::optional<std::string> ProgressBoard::read(int rank) {
  const std::string key = line_key(rank);
  if (!store_->check({key})) return std::nullopt;
  return store_->get_to_str(key);
}

std::string ProgressBoard::line_key(int rank) const {
  return absl::StrCat(prefix_, "line/", rank);
}

}  // namespace brigade
