#include "brigade/examples/digits/batches.h"

#include <numeric>
#include <random>

#include "brigade/examples/digits/shuffle.h"

namespace brigade::digits {

Batches::Batches(DigitImages images, int64_t batch_size, int num_ranks,
                 uint32_t seed)
    : images_(std::move(images)),
      num_ranks_(num_ranks),
      images_per_rank_(batch_size / num_ranks),
      seed_(seed) {
  TORCH_CHECK_VALUE(images_per_rank_ > 0, "a batch of ", batch_size,
                    " images is too small for ", num_ranks,
                    " ranks; --batch-size must be at least one image per rank");
  TORCH_CHECK_VALUE(steps_per_epoch() > 0, "a batch of ", batch_size,
                    " images is too large; there are ", images_.labels.numel(),
                    " images to train with; choose a smaller --batch-size");
}

Batches::Epoch Batches::epoch(int64_t number) const {
  std::vector<int64_t> order(images_.labels.numel());
  std::iota(order.begin(), order.end(), 0);
  std::seed_seq seeds{seed_, static_cast<uint32_t>(number)};
  std::mt19937 random(seeds);
  shuffle(order, random);
  return Epoch(*this, std::move(order));
}

DigitImages Batches::Epoch::batch(int64_t step, int rank) const {
  const int64_t count = batches_.images_per_rank();
  const auto first =
      order_.begin() + (step * batches_.num_ranks_ + rank) * count;
  return select(batches_.images_, {first, first + count});
}

}  // namespace brigade::digits
