// A network of blocks for tests, plain or sharded, with integer-valued
// parameters where sums must be exact.

#ifndef BRIGADE_TESTS_FSDP_SHARDED_NET_H_
#define BRIGADE_TESTS_FSDP_SHARDED_NET_H_

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "brigade/fsdp/sharded_root.h"

namespace brigade::testing {

// Bits of products must not depend on how many threads are free.
inline const bool kComputesOnOneThread = (at::set_num_threads(1), true);

// Of a generator of its own: ranks are threads of one process.
inline at::Tensor random(at::IntArrayRef sizes, uint64_t seed) {
  return torch::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed));
}

// tanh(x W + b), of sizes that no number of ranks divides.
struct Block {
  Block(int64_t in, int64_t out, uint64_t seed) {
    weight = random({in, out}, 2 * seed).mul_(0.3).requires_grad_();
    bias = random({out}, 2 * seed + 1).mul_(0.3).requires_grad_();
  }
  at::Tensor run(const at::Tensor& x) const {
    return torch::tanh(torch::matmul(x, weight) + bias);
  }
  at::Tensor weight;
  at::Tensor bias;
};

class Net {
 public:
  explicit Net(std::vector<int64_t> sizes = {5, 7, 3, 6, 4}, uint64_t seed = 1)
      : sizes_(std::move(sizes)) {
    for (size_t i = 0; i + 1 < sizes_.size(); ++i) {
      blocks.emplace_back(sizes_[i], sizes_[i + 1], seed + i);
    }
    head = torch::full({1}, 0.5).requires_grad_();
  }

  // Unit 0 is the outermost, of the head; unit i + 1 is block i.
  std::vector<UnitSpec> units() const {
    std::vector<UnitSpec> specs = {{.name = "",
                                    .parameters = {{"head", head}},
                                    .reshards_after_forward = false}};
    for (size_t i = 0; i < blocks.size(); ++i) {
      const std::string name = "blocks." + std::to_string(i);
      specs.push_back({.name = name,
                       .parameters = {{name + ".weight", blocks[i].weight},
                                      {name + ".bias", blocks[i].bias}}});
    }
    return specs;
  }

  // In the order of units().
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all = {head};
    for (const Block& block : blocks) {
      all.push_back(block.weight);
      all.push_back(block.bias);
    }
    return all;
  }

  at::Tensor run(const at::Tensor& x) const {
    at::Tensor h = x;
    for (const Block& block : blocks) h = block.run(h);
    return h * head;
  }

  // Of one width, those of `order`.
  at::Tensor run(at::Tensor h, const std::vector<size_t>& order) const {
    for (const size_t i : order) h = blocks[i].run(h);
    return h * head;
  }

  // The blocks of `order`, which may leave some out.
  at::Tensor run(ShardedRoot& root, const at::Tensor& x,
                 const std::vector<size_t>& order) const {
    return root.call(0, x, [&](const at::Tensor& in) {
      at::Tensor h = in;
      for (const size_t i : order) {
        h = root.call(i + 1, h, [&](const at::Tensor& inner) {
          return blocks[i].run(inner);
        });
      }
      return h * head;
    });
  }
  at::Tensor run(ShardedRoot& root, const at::Tensor& x) const {
    std::vector<size_t> order(blocks.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    return run(root, x, order);
  }

  at::Tensor input(int rank, int step, int64_t rows = 3) const {
    return random({rows, sizes_.front()}, 1000 + 100 * step + rank);
  }

  std::vector<Block> blocks;
  at::Tensor head;

 private:
  const std::vector<int64_t> sizes_;
};

inline at::Tensor loss_of(const at::Tensor& y) { return y.square().sum(); }

// What this rank holds of a whole tensor.
inline at::Tensor part_of(const at::Tensor& whole, const ShardedRoot& root,
                          size_t unit, size_t parameter, int shard_rank) {
  size_t index = parameter;
  for (const auto& segment : root.unit(unit).segments) {
    if (index >= segment->parameters().size()) {
      index -= segment->parameters().size();
      continue;
    }
    const ShardRange range = segment->layout().range(index, shard_rank);
    return whole.flatten().narrow(0, range.in_parameter, range.numel);
  }
  return {};
}

// Single process: the gradients of `ranks` batches, apart, added in rank order
// and divided once, and a step of SGD.
class Reference {
 public:
  explicit Reference(Net& net) : net_(net) {}

  template <typename LossOf>
  void accumulate(int num_ranks, const LossOf& loss_of_rank) {
    std::vector<at::Tensor> sums;
    for (int rank = 0; rank < num_ranks; ++rank) {
      loss_of_rank(rank).backward();
      const auto parameters = net_.parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        at::Tensor gradient = parameters[i].grad().defined()
                                  ? parameters[i].grad().clone()
                                  : torch::zeros_like(parameters[i]);
        parameters[i].mutable_grad() = at::Tensor();
        if (rank == 0) {
          sums.push_back(gradient);
        } else {
          sums[i].add_(gradient);
        }
      }
    }
    gradients.clear();
    for (const at::Tensor& sum : sums) {
      gradients.push_back(sum.mul(1.0 / num_ranks));
    }
  }

  void step(double rate) {
    const torch::NoGradGuard no_grad;
    const auto parameters = net_.parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].sub_(gradients[i], rate);
    }
  }

  std::vector<at::Tensor> gradients;

 private:
  Net& net_;
};

inline void sgd(const std::vector<at::Tensor>& shards, double rate) {
  const torch::NoGradGuard no_grad;
  for (at::Tensor shard : shards) {
    if (shard.grad().defined()) shard.sub_(shard.grad(), rate);
    shard.mutable_grad() = at::Tensor();
  }
}

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_FSDP_SHARDED_NET_H_
