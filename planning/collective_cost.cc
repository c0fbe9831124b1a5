#include "brigade/planning/collective_cost.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace brigade {
namespace {

template <typename... Parts>
absl::Status bad_cost(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat("cost: ", parts...));
}

double value_at(const CostPiece& piece, double bytes) {
  return piece.latency_s + bytes * piece.s_per_byte;
}

// Tolerates rounding where two pieces meet.
bool is_less(double a, double b) {
  return a < b - 1e-9 * std::max(std::abs(a), std::abs(b));
}

absl::Status check_pieces(const std::vector<CostPiece>& pieces,
                          int concurrency) {
  if (concurrency < 1) {
    return bad_cost("expected a concurrency >= 1, found ", concurrency);
  }
  if (pieces.empty() || pieces.front().from_bytes != 0) {
    return bad_cost("expected a first piece from 0 bytes on");
  }
  const CostPiece* last = nullptr;
  for (const CostPiece& piece : pieces) {
    const auto begin = static_cast<double>(piece.from_bytes);
    if (!std::isfinite(piece.latency_s) || !std::isfinite(piece.s_per_byte) ||
        piece.s_per_byte < 0 || value_at(piece, begin) < 0) {
      return bad_cost("expected finite times and slopes >= 0 from ",
                      piece.from_bytes, " bytes on, found ", piece.latency_s,
                      " s + ", piece.s_per_byte, " s per byte");
    }
    if (last != nullptr && piece.from_bytes <= last->from_bytes) {
      return bad_cost("expected increasing sizes, found ", piece.from_bytes,
                      " after ", last->from_bytes);
    }
    if (last != nullptr &&
        is_less(value_at(piece, begin), value_at(*last, begin))) {
      return bad_cost("expected times that don't decrease, found ",
                      value_at(piece, begin), " s after ",
                      value_at(*last, begin), " s at ", piece.from_bytes,
                      " bytes");
    }
    last = &piece;
  }
  return absl::OkStatus();
}

// Times that don't decrease and are nearest to `points` by least squares.
std::vector<double> isotonic(std::span<const CostPoint> points) {
  struct Block {
    double mean = 0;
    int count = 0;
  };
  std::vector<Block> blocks;
  for (const CostPoint& point : points) {
    blocks.push_back({point.seconds, 1});
    while (blocks.size() > 1 &&
           blocks.back().mean < blocks[blocks.size() - 2].mean) {
      const Block b = blocks.back();
      blocks.pop_back();
      Block& a = blocks.back();
      a.mean = (a.mean * a.count + b.mean * b.count) / (a.count + b.count);
      a.count += b.count;
    }
  }
  std::vector<double> times;
  for (const Block& block : blocks) {
    times.insert(times.end(), block.count, block.mean);
  }
  return times;
}

// Lines of non-negative latency below cost - `shift` everywhere: the edges of
// its lower convex hull, and the steepest line through the origin.
std::vector<CostPiece> supporting_lines(const std::vector<CostPiece>& pieces,
                                        double shift) {
  struct Corner {
    double bytes = 0;
    double seconds = 0;
    double slope_to(const Corner& other) const {
      return (other.seconds - seconds) / (other.bytes - bytes);
    }
  };
  double per_byte = pieces.back().s_per_byte;
  std::vector<Corner> hull;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto begin = static_cast<double>(pieces[i].from_bytes);
    // The lower value, where the cost jumps.
    const CostPiece& before = pieces[i == 0 ? 0 : i - 1];
    const Corner corner = {begin, value_at(before, begin) - shift};
    while (hull.size() > 1 && hull[hull.size() - 2].slope_to(hull.back()) >=
                                  hull.back().slope_to(corner)) {
      hull.pop_back();
    }
    hull.push_back(corner);
    if (i > 0) per_byte = std::min(per_byte, corner.seconds / begin);
  }
  // The last piece has no end, so no line may be steeper.
  const double last_slope = pieces.back().s_per_byte;
  while (hull.size() > 1 &&
         hull[hull.size() - 2].slope_to(hull.back()) > last_slope) {
    hull.pop_back();
  }
  std::vector<CostPiece> lines = {{.s_per_byte = per_byte}};
  for (size_t i = 0; i < hull.size(); ++i) {
    const double slope =
        i + 1 < hull.size() ? hull[i].slope_to(hull[i + 1]) : last_slope;
    const double latency = hull[i].seconds - slope * hull[i].bytes;
    if (latency >= 0) {
      lines.push_back({.latency_s = latency, .s_per_byte = slope});
    }
  }
  return lines;
}

}  // namespace

CollectiveCost::CollectiveCost(std::vector<CostPiece> pieces, int concurrency)
    : pieces_(std::move(pieces)), concurrency_(concurrency) {
  lines_below_ = supporting_lines(pieces_, overlapped_s());
}

absl::StatusOr<CollectiveCost> CollectiveCost::create(
    std::vector<CostPiece> pieces, int concurrency) {
  if (absl::Status status = check_pieces(pieces, concurrency); !status.ok()) {
    return status;
  }
  return CollectiveCost(std::move(pieces), concurrency);
}

absl::StatusOr<CollectiveCost> CollectiveCost::linear(double latency_s,
                                                      double s_per_byte,
                                                      int concurrency) {
  return create({{.latency_s = latency_s, .s_per_byte = s_per_byte}},
                concurrency);
}

absl::StatusOr<CollectiveCost> CollectiveCost::fit(
    std::span<const CostPoint> points, int concurrency) {
  if (points.size() < 2) {
    return bad_cost("expected at least 2 points, found ", points.size());
  }
  int64_t last_bytes = 0;
  for (const auto& [bytes, seconds] : points) {
    if (bytes <= last_bytes) {
      return bad_cost("expected positive, increasing sizes, found ", bytes,
                      " after ", last_bytes);
    }
    if (!std::isfinite(seconds) || seconds < 0) {
      return bad_cost("expected a time >= 0, found ", seconds, " s for ", bytes,
                      " bytes");
    }
    last_bytes = bytes;
  }
  const std::vector<double> times = isotonic(points);
  std::vector<CostPiece> pieces = {{.latency_s = times.front()}};
  for (size_t i = 0; i + 1 < points.size(); ++i) {
    const auto begin = static_cast<double>(points[i].bytes);
    const auto end = static_cast<double>(points[i + 1].bytes);
    const double slope = (times[i + 1] - times[i]) / (end - begin);
    pieces.push_back({.from_bytes = points[i].bytes,
                      .latency_s = times[i] - slope * begin,
                      .s_per_byte = slope});
  }
  return create(std::move(pieces), concurrency);
}

absl::StatusOr<CollectiveCost> CollectiveCost::sample(
    const std::function<double(int64_t)>& seconds, int concurrency) {
  std::vector<CostPoint> points;
  for (int log2 = 10; log2 <= 36; ++log2) {
    const int64_t bytes = int64_t{1} << log2;
    points.push_back({.bytes = bytes, .seconds = seconds(bytes)});
  }
  return fit(points, concurrency);
}

double CollectiveCost::seconds(int64_t bytes) const {
  const auto next =
      std::ranges::upper_bound(pieces_, bytes, {}, &CostPiece::from_bytes);
  return value_at(*std::prev(next), static_cast<double>(bytes));
}

}  // namespace brigade
