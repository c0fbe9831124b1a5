#include "brigade/fsdp/schedule/buffer_plan.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <tuple>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace brigade {
namespace {

struct PlannedBuffer {
  int64_t bytes;
  int64_t free_from;  // the end of its last use
};

absl::Status check(std::span<const BufferUse> uses) {
  int64_t room = std::numeric_limits<int64_t>::max();
  for (size_t i = 0; i < uses.size(); ++i) {
    const BufferUse& use = uses[i];
    if (use.begin >= use.end) {
      return absl::InvalidArgumentError(absl::StrCat(
          "a use of a buffer must end behind its begin, but use ", i, " of ",
          uses.size(), " begins at ", use.begin, " and ends at ", use.end,
          "; leave out what is never used"));
    }
    if (use.bytes < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("a use of a buffer needs bytes >= 0, but use ", i,
                       " of ", uses.size(), " has ", use.bytes));
    }
    if (use.bytes > room) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the uses of buffers may have 2^63 - 1 bytes together, exceeded by "
          "use ",
          i, " of ", uses.size(), " with ", use.bytes,
          "; check that lengths are bytes"));
    }
    room -= use.bytes;
  }
  return absl::OkStatus();
}

// What is preferred is less: those that are large enough before those that must
// grow, the smallest of the former, the largest of the latter.
auto preference(const PlannedBuffer& buffer, int64_t bytes) {
  const bool must_grow = buffer.bytes < bytes;
  return std::tuple(must_grow, must_grow ? -buffer.bytes : buffer.bytes,
                    buffer.free_from);
}

std::optional<size_t> choose(std::span<const PlannedBuffer> buffers,
                             const BufferUse& use) {
  std::optional<size_t> best;
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].free_from > use.begin) continue;
    if (!best || preference(buffers[i], use.bytes) <
                     preference(buffers[*best], use.bytes)) {
      best = i;
    }
  }
  return best;
}

std::vector<size_t> by_begin(std::span<const BufferUse> uses) {
  std::vector<size_t> order(uses.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, {}, [&](size_t i) { return uses[i].begin; });
  return order;
}

}  // namespace

absl::StatusOr<BufferPlan> BufferPlan::create(std::span<const BufferUse> uses) {
  if (absl::Status status = check(uses); !status.ok()) return status;
  std::vector<size_t> buffer_of(uses.size());
  std::vector<PlannedBuffer> buffers;
  for (const size_t i : by_begin(uses)) {
    const BufferUse& use = uses[i];
    const std::optional<size_t> chosen = choose(buffers, use);
    buffer_of[i] = chosen.value_or(buffers.size());
    if (!chosen) buffers.push_back({});
    PlannedBuffer& buffer = buffers[buffer_of[i]];
    buffer = {.bytes = std::max(buffer.bytes, use.bytes), .free_from = use.end};
  }
  std::vector<int64_t> buffer_bytes;
  buffer_bytes.reserve(buffers.size());
  for (const PlannedBuffer& buffer : buffers)
    buffer_bytes.push_back(buffer.bytes);
  return BufferPlan(std::move(buffer_of), std::move(buffer_bytes));
}

int64_t BufferPlan::total_bytes() const {
  return std::accumulate(buffer_bytes_.begin(), buffer_bytes_.end(),
                         int64_t{0});
}

}  // namespace brigade
