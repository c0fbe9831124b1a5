#include "brigade/benchmarks/support/gradient_shapes.h"

#include <functional>
#include <numeric>

namespace brigade::benchmarks {
namespace {

// A list of shapes that grows layer by layer.
class Layers {
 public:
  void convolution(int64_t out, int64_t in, int64_t side) {
    shapes_.push_back({out, in, side, side});
  }
  void scale_and_shift(int64_t width) {  // of a batch or layer norm
    shapes_.push_back({width});
    shapes_.push_back({width});
  }
  void linear(int64_t out, int64_t in) {
    shapes_.push_back({out, in});
    shapes_.push_back({out});
  }
  void embedding(int64_t count, int64_t width) {
    shapes_.push_back({count, width});
  }
  Shapes shapes() const { return shapes_; }

 private:
  Shapes shapes_;
};

void bottleneck(Layers& layers, int64_t in, int64_t width, bool first) {
  const int64_t out = 4 * width;
  layers.convolution(width, in, 1);
  layers.scale_and_shift(width);
  layers.convolution(width, width, 3);
  layers.scale_and_shift(width);
  layers.convolution(out, width, 1);
  layers.scale_and_shift(out);
  if (first) {  // the shortcut changes its width
    layers.convolution(out, in, 1);
    layers.scale_and_shift(out);
  }
}

}  // namespace

Shapes resnet50_shapes(int64_t width_divisor) {
  constexpr int64_t kBlocksPerStage[] = {3, 4, 6, 3};
  Layers layers;
  int64_t width = 64 / width_divisor;
  int64_t in = width;
  layers.convolution(in, 3, 7);
  layers.scale_and_shift(in);
  for (const int64_t num_blocks : kBlocksPerStage) {
    for (int64_t block = 0; block < num_blocks; ++block) {
      bottleneck(layers, in, width, block == 0);
      in = 4 * width;
    }
    width *= 2;
  }
  layers.linear(1000, in);
  return layers.shapes();
}

Shapes bert_base_shapes() {
  constexpr int64_t kWidth = 768;
  Layers layers;
  layers.embedding(30522, kWidth);  // tokens
  layers.embedding(512, kWidth);    // positions
  layers.embedding(2, kWidth);      // sentences
  layers.scale_and_shift(kWidth);
  for (int layer = 0; layer < 12; ++layer) {
    for (int i = 0; i < 4; ++i) {  // query, key, value, output
      layers.linear(kWidth, kWidth);
    }
    layers.scale_and_shift(kWidth);
    layers.linear(4 * kWidth, kWidth);
    layers.linear(kWidth, 4 * kWidth);
    layers.scale_and_shift(kWidth);
  }
  layers.linear(kWidth, kWidth);  // pooler
  return layers.shapes();
}

Shapes gpt2_small_shapes() {
  constexpr int64_t kWidth = 768;
  Layers layers;
  layers.embedding(50257, kWidth);  // tokens
  layers.embedding(1024, kWidth);   // positions
  for (int layer = 0; layer < 12; ++layer) {
    layers.scale_and_shift(kWidth);
    layers.linear(3 * kWidth, kWidth);  // query, key and value in one
    layers.linear(kWidth, kWidth);
    layers.scale_and_shift(kWidth);
    layers.linear(4 * kWidth, kWidth);
    layers.linear(kWidth, 4 * kWidth);
  }
  layers.scale_and_shift(kWidth);
  return layers.shapes();
}

int64_t numel(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1},
                         std::multiplies<>());
}

int64_t total_numel(const Shapes& shapes) {
  int64_t total = 0;
  for (const std::vector<int64_t>& shape : shapes) total += numel(shape);
  return total;
}

}  // namespace brigade::benchmarks
