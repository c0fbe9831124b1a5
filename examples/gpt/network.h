// Small GPT: a plain LibTorch module.

#ifndef BRIGADE_EXAMPLES_GPT_NETWORK_H_
#define BRIGADE_EXAMPLES_GPT_NETWORK_H_

#include <torch/torch.h>

#include <cstdint>
#include <vector>

namespace brigade::gpt {

struct GptShape {
  int64_t vocabulary_size = 0;
  int64_t num_blocks = 4;
  int64_t width = 128;
  int64_t num_heads = 4;  // divides the width
  int64_t context = 64;   // characters, at most
};

// Transformer block: attention and an MLP, each with a residual connection.
class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const GptShape& shape)
      : num_heads_(shape.num_heads),
        attention_norm_(torch::nn::LayerNormOptions({shape.width})),
        heads_(shape.width, 3 * shape.width),
        projection_(shape.width, shape.width),
        hidden_norm_(torch::nn::LayerNormOptions({shape.width})),
        hidden_(shape.width, 4 * shape.width),
        output_(4 * shape.width, shape.width) {
    register_module("attention_norm", attention_norm_);
    register_module("heads", heads_);
    register_module("projection", projection_);
    register_module("hidden_norm", hidden_norm_);
    register_module("hidden", hidden_);
    register_module("output", output_);
  }

  // x: [n, t, width]. Returns the same shape.
  at::Tensor forward(at::Tensor x) {
    x = x + attend(attention_norm_(x));
    return x + output_(torch::gelu(hidden_(hidden_norm_(x))));
  }

 private:
  at::Tensor attend(const at::Tensor& x) {
    const int64_t n = x.size(0);
    const int64_t t = x.size(1);
    // Queries, keys and values, each [n, heads, t, width / heads].
    const std::vector<at::Tensor> parts = heads_(x)
                                              .view({n, t, 3, num_heads_, -1})
                                              .permute({2, 0, 3, 1, 4})
                                              .unbind(0);
    const at::Tensor attended = at::scaled_dot_product_attention(
        parts[0], parts[1], parts[2], /*attn_mask=*/{}, /*dropout_p=*/0.0,
        /*is_causal=*/true);
    return projection_(attended.transpose(1, 2).reshape({n, t, -1}));
  }

  const int64_t num_heads_;
  torch::nn::LayerNorm attention_norm_;
  torch::nn::Linear heads_;
  torch::nn::Linear projection_;
  torch::nn::LayerNorm hidden_norm_;
  torch::nn::Linear hidden_;
  torch::nn::Linear output_;
};
TORCH_MODULE(Block);

class GptImpl : public torch::nn::Module {
 public:
  GptImpl(const GptShape& shape, uint64_t seed)
      : characters_(shape.vocabulary_size, shape.width),
        positions_(shape.context, shape.width),
        norm_(torch::nn::LayerNormOptions({shape.width})),
        scores_(torch::nn::LinearOptions(shape.width, shape.vocabulary_size)
                    .bias(false)) {
    for (int64_t i = 0; i < shape.num_blocks; ++i) {
      blocks_->push_back(Block(shape));
    }
    register_module("characters", characters_);
    register_module("positions", positions_);
    register_module("norm", norm_);
    register_module("scores", scores_);
    register_module("blocks", blocks_);
    draw_weights(seed);
  }

  // tokens: int64, [n, t], t <= context. Returns the logits of the next
  // character, [n, t, vocabulary_size].
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x =
        characters_(tokens) + positions_(torch::arange(tokens.size(1)));
    for (const auto& block : *blocks_) x = block->as<Block>()->forward(x);
    return scores_(norm_(x));
  }

 private:
  // Uses its own generator, so that the weights depend on `seed` only.
  void draw_weights(uint64_t seed) {
    const torch::NoGradGuard no_grad;
    at::Generator random = at::make_generator<at::CPUGeneratorImpl>(seed);
    for (const auto& parameter : named_parameters()) {
      if (parameter->dim() > 1) {
        parameter->normal_(0.0, 0.02, random);
      } else if (parameter.key().ends_with("bias")) {
        parameter->zero_();
      }
    }
  }

  torch::nn::Embedding characters_;
  torch::nn::Embedding positions_;
  torch::nn::ModuleList blocks_;
  torch::nn::LayerNorm norm_;
  torch::nn::Linear scores_;
};
TORCH_MODULE(Gpt);

}  // namespace brigade::gpt

#endif  // BRIGADE_EXAMPLES_GPT_NETWORK_H_
