// Images of handwritten digits, and the images that each rank sees in a step.

#ifndef BRIGADE_EXAMPLES_DIGITS_DATASET_H_
#define BRIGADE_EXAMPLES_DIGITS_DATASET_H_

#include <torch/torch.h>

#include <cstdint>
#include <string>

namespace brigade::digits {

constexpr int64_t kNumClasses = 10;

struct DigitImages {
  at::Tensor pixels;  // float32, [n, 1, 8, 8], from 0 to 1
  at::Tensor labels;  // int64, [n], from 0 to 9

  int64_t size() const { return labels.numel(); }
  DigitImages select(const at::Tensor& rows) const {
    return {.pixels = pixels.index_select(0, rows),
            .labels = labels.index_select(0, rows)};
  }
};

// Reads data/digits.u8 or a file like it: 65 bytes per image, 64 pixels from 0
// to 16 and the digit.
inline DigitImages read_digits(const std::string& path = DIGITS_DATA_FILE) {
  constexpr int64_t kNumImages = 1797;
  const at::Tensor rows =
      at::from_file(path, /*shared=*/false, kNumImages * 65, at::kByte)
          .view({kNumImages, 65});
  return {.pixels = rows.narrow(1, 0, 64)
                        .to(at::kFloat)
                        .div(16)
                        .view({kNumImages, 1, 8, 8}),
          .labels = rows.select(1, 64).to(at::kLong)};
}

// An order of `count` rows that depends on `seed` alone.
inline at::Tensor shuffled_rows(int64_t count, uint64_t seed) {
  return at::randperm(count, at::make_generator<at::CPUGeneratorImpl>(seed),
                      at::kLong);
}

// Deals each step's batch out evenly, so that the mean over ranks of their mean
// losses is the mean loss of the batch. Thread safety: immutable.
class Batches {
 public:
  // Errors: ValueError if `batch_size` is less than one image per rank, or more
  // than there are.
  Batches(DigitImages images, int64_t batch_size, int num_ranks, uint64_t seed)
      : images_(std::move(images)),
        num_ranks_(num_ranks),
        images_per_rank_(batch_size / num_ranks),
        seed_(seed) {
    TORCH_CHECK_VALUE(images_per_rank_ > 0 && steps_per_epoch() > 0,
                      "expected a batch of ", num_ranks, " to ", images_.size(),
                      " images, found ", batch_size);
  }

  int num_ranks() const { return num_ranks_; }
  int64_t images_per_step() const { return images_per_rank_ * num_ranks_; }
  int64_t steps_per_epoch() const { return images_.size() / images_per_step(); }

  // The images of `rank` in step `step`, counted from the first epoch on. Each
  // epoch has an order of its own.
  DigitImages batch(int64_t step, int rank) const {
    const int64_t epoch = step / steps_per_epoch();
    const int64_t in_epoch = step % steps_per_epoch();
    return images_.select(
        shuffled_rows(images_.size(), seed_ + epoch)
            .narrow(0, (in_epoch * num_ranks_ + rank) * images_per_rank_,
                    images_per_rank_));
  }

 private:
  const DigitImages images_;
  const int num_ranks_;
  const int64_t images_per_rank_;
  const uint64_t seed_;
};

}  // namespace brigade::digits

#endif  // BRIGADE_EXAMPLES_DIGITS_DATASET_H_
