// Decides which images each rank sees in each step of training.
//
// A step's batch is dealt out evenly, so that the average over ranks of the
// ranks' mean losses is the mean loss of the batch.  Every epoch has an order
// of its own, which depends on seed and epoch only: each rank computes it for
// itself, and any process can ask what any rank sees.
//
// Thread safety: immutable after construction.

#ifndef BRIGADE_EXAMPLES_DIGITS_BATCHES_H_
#define BRIGADE_EXAMPLES_DIGITS_BATCHES_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "brigade/examples/digits/dataset.h"

namespace brigade::digits {

class Batches {
 public:
  // `batch_size` images per step over all ranks, or fewer if it cannot be dealt
  // out evenly.  Images that fill no step are left out of that epoch.
  //
  // Errors: c10::ValueError if there is not one image per rank and step, or not
  // enough images for one step.
  Batches(DigitImages images, int64_t batch_size, int num_ranks, uint32_t seed);

  int num_ranks() const { return num_ranks_; }
  int64_t images_per_rank() const { return images_per_rank_; }
  int64_t images_per_step() const { return images_per_rank_ * num_ranks_; }
  int64_t steps_per_epoch() const {
    return images_.labels.numel() / images_per_step();
  }

  // The order of one epoch.
  class Epoch {
   public:
    // REQUIRES: 0 <= step < steps_per_epoch(), 0 <= rank < num_ranks.
    DigitImages batch(int64_t step, int rank) const;

   private:
    friend class Batches;
    Epoch(const Batches& batches, std::vector<int64_t> order)
        : batches_(batches), order_(std::move(order)) {}

    const Batches& batches_;
    const std::vector<int64_t> order_;
  };
  // REQUIRES: *this outlives the epoch.
  Epoch epoch(int64_t number) const;

 private:
  const DigitImages images_;
  const int num_ranks_;
  const int64_t images_per_rank_;
  const uint32_t seed_;
};

}  // namespace brigade::digits

#endif  // BRIGADE_EXAMPLES_DIGITS_BATCHES_H_
