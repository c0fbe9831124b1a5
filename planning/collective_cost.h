// Time of a collective as a function of its size.
//
//   CollectiveCost link = *CollectiveCost::linear(100e-6, 1 / 3e9);
//   link.seconds(1 << 20);  // 100 us + 350 us
//
// Sizes are bytes of the whole tensor, times are seconds.
//
// Thread safety: costs are immutable; functions are pure.

#ifndef BRIGADE_PLANNING_COLLECTIVE_COST_H_
#define BRIGADE_PLANNING_COLLECTIVE_COST_H_

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"

namespace brigade {

// One linear piece: latency_s + bytes * s_per_byte, for sizes from `from_bytes`
// to the next piece's.
struct CostPiece {
  int64_t from_bytes = 0;
  double latency_s = 0;  // may be negative, if the piece is not the first
  double s_per_byte = 0;
};

struct CostPoint {
  int64_t bytes = 0;
  double seconds = 0;
};

// Non-decreasing and piecewise linear.
class CollectiveCost {
 public:
  // `concurrency`: collectives that may run at once. Their latencies overlap;
  // they share the link, so their bytes don't (Gloo runs 2 per device; NCCL
  // runs 1 per communicator).
  //
  // Errors: InvalidArgument if there is no piece, the first does not begin at 0
  // bytes, beginnings don't increase, a number is not finite, a slope or time
  // is negative, the time decreases anywhere, or `concurrency` < 1.
  static absl::StatusOr<CollectiveCost> create(std::vector<CostPiece> pieces,
                                               int concurrency = 1);

  // latency_s + bytes * s_per_byte. Errors as create().
  static absl::StatusOr<CollectiveCost> linear(double latency_s,
                                               double s_per_byte,
                                               int concurrency = 1);

  // Interpolates between measured points. Smaller sizes cost as much as the
  // first point, larger ones grow with the slope of the last two.
  //
  // Measured times may decrease by noise: neighbours are then replaced by their
  // mean (isotonic regression by pool-adjacent-violators, Ayer et al. 1955).
  //
  // Errors: InvalidArgument if there are fewer than 2 points, sizes are not
  // positive and increasing, or a time is negative or not finite.
  static absl::StatusOr<CollectiveCost> fit(std::span<const CostPoint> points,
                                            int concurrency = 1);

  // Interpolates a formula at the powers of 2 from 1 KiB to 64 GiB.
  // Errors as fit().
  static absl::StatusOr<CollectiveCost> sample(
      const std::function<double(int64_t)>& seconds, int concurrency = 1);

  // REQUIRES: bytes >= 0.
  double seconds(int64_t bytes) const;

  const std::vector<CostPiece>& pieces() const { return pieces_; }
  int concurrency() const { return concurrency_; }

  // Lines of non-negative latency (from_bytes is 0) below the cost, less
  // overlapped_s(), everywhere. Their maximum is a bound from below on the time
  // of any number (>= 1) of collectives that move these bytes together.
  const std::vector<CostPiece>& lines_below() const { return lines_below_; }

  // Latency of a collective that others may hide: 0 if they run one at a time.
  double overlapped_s() const {
    return concurrency_ > 1 ? pieces_.front().latency_s : 0;
  }

 private:
  CollectiveCost(std::vector<CostPiece> pieces, int concurrency);

  std::vector<CostPiece> pieces_;
  std::vector<CostPiece> lines_below_;
  int concurrency_ = 1;
};

}  // namespace brigade

#endif  // BRIGADE_PLANNING_COLLECTIVE_COST_H_
