// The parameter shapes of well-known models, made from their architectures, in
// registration order: what a reducer sees of a model, without its computation.
//
// Thread safety: pure functions.

#ifndef BRIGADE_BENCHMARKS_SUPPORT_GRADIENT_SHAPES_H_
#define BRIGADE_BENCHMARKS_SUPPORT_GRADIENT_SHAPES_H_

#include <cstdint>
#include <vector>

namespace brigade::benchmarks {

using Shapes = std::vector<std::vector<int64_t>>;

// 25,557,032 elements in 161 parameters.  `width_divisor` makes all hidden
// layers that much narrower: 1, 2 or 4. Source: He et al. 2015, with
// torchvision's layers and their order.
Shapes resnet50_shapes(int64_t width_divisor = 1);

// 109,482,240 elements in 199 parameters, pooler included, without a head.
// Source: Devlin et al. 2018, uncased vocabulary.
Shapes bert_base_shapes();

// 124,439,808 elements in 148 parameters; the output layer shares the token
// embedding.  Source: Radford et al. 2019, the smallest model.
Shapes gpt2_small_shapes();

int64_t numel(const std::vector<int64_t>& shape);
int64_t total_numel(const Shapes& shapes);

}  // namespace brigade::benchmarks

#endif  // BRIGADE_BENCHMARKS_SUPPORT_GRADIENT_SHAPES_H_
