#include "brigade/benchmarks/support/gradient_shapes.h"

#include <functional>
#include <numeric>

namespace brigade::benchmarks {
namespace {

void add_scale_and_shift(Shapes& shapes, int64_t width) {  // of a norm
  shapes.insert(shapes.end(), {{width}, {width}});
}

void add_linear(Shapes& shapes, int64_t out, int64_t in) {
  shapes.insert(shapes.end(), {{out, in}, {out}});
}

// With its batch norm.
void add_convolution(Shapes& shapes, int64_t out, int64_t in, int64_t side) {
  shapes.push_back({out, in, side, side});
  add_scale_and_shift(shapes, out);
}

}  // namespace

Shapes resnet50_shapes(int64_t width_divisor) {
  constexpr int64_t kBlocksPerStage[] = {3, 4, 6, 3};
  Shapes shapes;
  int64_t width = 64 / width_divisor;
  int64_t in = width;
  add_convolution(shapes, in, 3, 7);
  for (const int64_t num_blocks : kBlocksPerStage) {
    const int64_t out = 4 * width;
    for (int64_t block = 0; block < num_blocks; ++block) {
      add_convolution(shapes, width, in, 1);
      add_convolution(shapes, width, width, 3);
      add_convolution(shapes, out, width, 1);
      if (block == 0) add_convolution(shapes, out, in, 1);  // the shortcut
      in = out;
    }
    width *= 2;
  }
  add_linear(shapes, 1000, in);
  return shapes;
}

Shapes bert_base_shapes() {
  constexpr int64_t kWidth = 768;
  // Tokens, positions and sentences.
  Shapes shapes = {{30522, kWidth}, {512, kWidth}, {2, kWidth}};
  add_scale_and_shift(shapes, kWidth);
  for (int layer = 0; layer < 12; ++layer) {
    for (int i = 0; i < 4; ++i) {  // query, key, value, output
      add_linear(shapes, kWidth, kWidth);
    }
    add_scale_and_shift(shapes, kWidth);
    add_linear(shapes, 4 * kWidth, kWidth);
    add_linear(shapes, kWidth, 4 * kWidth);
    add_scale_and_shift(shapes, kWidth);
  }
  add_linear(shapes, kWidth, kWidth);  // pooler
  return shapes;
}

Shapes gpt2_small_shapes() {
  constexpr int64_t kWidth = 768;
  Shapes shapes = {{50257, kWidth}, {1024, kWidth}};  // tokens and positions
  for (int layer = 0; layer < 12; ++layer) {
    add_scale_and_shift(shapes, kWidth);
    add_linear(shapes, 3 * kWidth, kWidth);  // query, key and value in one
    add_linear(shapes, kWidth, kWidth);
    add_scale_and_shift(shapes, kWidth);
    add_linear(shapes, 4 * kWidth, kWidth);
    add_linear(shapes, kWidth, 4 * kWidth);
  }
  add_scale_and_shift(shapes, kWidth);
  return shapes;
}

int64_t numel(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1},
                         std::multiplies<>());
}

int64_t total_numel(const Shapes& shapes) {
  return std::transform_reduce(shapes.begin(), shapes.end(), int64_t{0},
                               std::plus<>(), numel);
}

}  // namespace brigade::benchmarks
