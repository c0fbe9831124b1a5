// Data set of handwritten digits, and its batches by step and rank.

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

// Reads a file of the format of data/digits.u8: 65 bytes per image, which are
// 64 pixels from 0 to 16 and the digit.
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

// Returns a random permutation of `count` rows that depends on `seed` only.
inline at::Tensor shuffled_rows(int64_t count, uint64_t seed) {
  return at::randperm(count, at::make_generator<at::CPUGeneratorImpl>(seed),
                      at::kLong);
}

// Batches of the same size on each rank. The mean over ranks of their mean
// losses is therefore the mean loss of the step. Thread safety: immutable.
class Batches {
 public:
  // Throws ValueError unless num_ranks <= batch_size <= images.size().
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

  // Returns the images of `rank` in step `step`, counted over all epochs. Each
  // epoch has its own order.
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
