#include "brigade/simulation/model_shape.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "absl/strings/str_cat.h"

namespace brigade {
namespace {

enum class Family : uint8_t { kBert, kGpt, kLlama };

struct Transformer {
  std::string_view name;
  Family family;
  int64_t layers;
  int64_t hidden;
  int64_t heads;
  int64_t kv_width;  // of keys; of values
  int64_t feed_forward;
  int64_t vocabulary;
  int64_t sequence;
};

// Sources: Devlin et al. 2019; Radford et al. 2019; Brown et al. 2020, table
// 2.1; Touvron et al. 2023 (Llama 2), table 1 and its config.json; Llama 3
// 2024, table 3.
constexpr std::array<Transformer, 8> kTransformers = {{
    {"bert-base", Family::kBert, 12, 768, 12, 768, 3072, 30522, 512},
    {"bert-large", Family::kBert, 24, 1024, 16, 1024, 4096, 30522, 512},
    {"gpt2", Family::kGpt, 12, 768, 12, 768, 3072, 50257, 1024},
    {"gpt2-xl", Family::kGpt, 48, 1600, 25, 1600, 6400, 50257, 1024},
    {"gpt3", Family::kGpt, 96, 12288, 96, 12288, 49152, 50257, 2048},
    {"llama-7b", Family::kLlama, 32, 4096, 32, 4096, 11008, 32000, 4096},
    {"llama-70b", Family::kLlama, 80, 8192, 64, 1024, 28672, 32000, 4096},
    {"llama-405b", Family::kLlama, 126, 16384, 128, 1024, 53248, 128256, 8192},
}};

ModelLayer make_block(const Transformer& t, int64_t number, double sequence) {
  const int64_t h = t.hidden;
  const int64_t kv = t.kv_width;
  const int64_t f = t.feed_forward;
  const auto hidden = static_cast<double>(h);
  ModelLayer block = {.name = absl::StrCat("layers.", number)};
  int64_t multiplied = 0;  // elements of matrices
  if (t.family == Family::kLlama) {
    block.tensors = {h, h * h, kv * h, kv * h, h * h, h, f * h, f * h, h * f};
    multiplied = 2 * h * h + 2 * kv * h + 3 * f * h;
    // With flash attention: the outputs of q, k, v, o, gate, up and down, each
    // in 16 bits; a block's output is the next block's input.
    block.activation_bytes =
        sequence * 2 * static_cast<double>(3 * h + 2 * kv + 2 * f);
  } else {
    block.tensors = {h, h, 3 * h * h, 3 * h, h * h, h,
                     h, h, f * h,     f,     h * f, h};
    multiplied = 4 * h * h + 2 * f * h;
    // Korthikanti et al. 2022, equation 1.
    block.activation_bytes =
        sequence * hidden *
        (34 + 5 * static_cast<double>(t.heads) * sequence / hidden);
  }
  // 2 per multiplied parameter and token, and two products of sequence x
  // sequence x hidden. Chowdhery et al. 2022 (PaLM), appendix B, and Narayanan
  // et al. 2021 count a causal attention in full, too.
  block.forward_flops = sequence * 2 * static_cast<double>(multiplied) +
                        4 * sequence * sequence * hidden;
  block.checkpoint_bytes = 2 * sequence * hidden;  // the block's input
  return block;
}

ModelShape make_transformer(const Transformer& t, int64_t sequence_length) {
  const int64_t h = t.hidden;
  const auto sequence = static_cast<double>(sequence_length);
  const auto hidden = static_cast<double>(h);
  const double width = sequence * hidden;
  ModelShape model = {.name = std::string(t.name)};
  ModelLayer embedding = {.name = "embedding",
                          .tensors = {t.vocabulary * h},
                          .activation_bytes = width,  // a dropout mask
                          .checkpoint_bytes = width};
  if (t.family != Family::kLlama) {
    embedding.tensors.push_back(t.sequence * h);  // positions
  }
  if (t.family == Family::kBert) {
    embedding.tensors.insert(embedding.tensors.end(), {2 * h, h, h});
  }
  model.layers.push_back(std::move(embedding));
  for (int64_t i = 0; i < t.layers; ++i) {
    model.layers.push_back(make_block(t, i, sequence));
  }
  if (t.family == Family::kBert) {
    model.layers.push_back({.name = "pooler",
                            .tensors = {h * h, h},
                            .forward_flops = 2 * hidden * hidden,
                            .activation_bytes = 4 * hidden,
                            .checkpoint_bytes = 4 * hidden});
    return model;
  }
  // A final norm and the product with the vocabulary, whose input and output
  // (4 bytes) are kept: Korthikanti et al. 2022, section 4.3. GPT's is tied to
  // the embedding.
  const double logits = sequence * static_cast<double>(t.vocabulary);
  ModelLayer head = {.name = "head",
                     .tensors = {h},
                     .forward_flops = 2 * logits * hidden,
                     .activation_bytes = 4 * width + 4 * logits,
                     .checkpoint_bytes = 2 * width};
  head.tensors.push_back(t.family == Family::kGpt ? h : t.vocabulary * h);
  model.layers.push_back(std::move(head));
  return model;
}

// Adds a convolution and its batch norm. The convolution's output and the
// norm's are kept, with 2 bytes per element.
void add_convolution(ModelLayer& layer, int64_t in, int64_t out, int64_t kernel,
                     int64_t side) {
  const int64_t weights = in * out * kernel * kernel;
  layer.tensors.insert(layer.tensors.end(), {weights, out, out});
  const int64_t area = side * side;
  layer.forward_flops += static_cast<double>(2 * weights * area);
  layer.activation_bytes += static_cast<double>(4 * out * area);
}

// He et al. 2016, table 1; strides as in torchvision (in the 3 x 3).
ModelShape make_resnet50() {
  ModelShape model = {.name = "resnet50"};
  ModelLayer stem = {.name = "stem", .checkpoint_bytes = 2.0 * 3 * 224 * 224};
  add_convolution(stem, 3, 64, 7, 112);
  model.layers.push_back(std::move(stem));
  int64_t in = 64;
  int64_t side = 56;
  int64_t width = 64;
  int stage = 1;
  for (const int blocks : {3, 4, 6, 3}) {
    for (int i = 0; i < blocks; ++i) {
      ModelLayer block = {.name = absl::StrCat("layer", stage, ".", i)};
      const int64_t in_side = i == 0 && stage > 1 ? 2 * side : side;
      block.checkpoint_bytes = static_cast<double>(2 * in * in_side * in_side);
      add_convolution(block, in, width, 1, in_side);
      add_convolution(block, width, width, 3, side);
      add_convolution(block, width, 4 * width, 1, side);
      if (i == 0) add_convolution(block, in, 4 * width, 1, side);
      in = 4 * width;
      model.layers.push_back(std::move(block));
    }
    side /= 2;
    width *= 2;
    ++stage;
  }
  const auto features = static_cast<double>(in);
  model.layers.push_back({.name = "fc",
                          .tensors = {in * 1000, 1000},
                          .forward_flops = 2 * features * 1000,
                          .activation_bytes = 2 * features,
                          .checkpoint_bytes = 2 * features});
  return model;
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

int64_t ModelLayer::elements() const {
  return std::accumulate(tensors.begin(), tensors.end(), int64_t{0});
}

int64_t ModelShape::elements() const {
  int64_t sum = 0;
  for (const ModelLayer& layer : layers) sum += layer.elements();
  return sum;
}

absl::StatusOr<ModelShape> named_model(std::string_view name,
                                       int64_t sequence_length) {
  if (name == "resnet50") return make_resnet50();
  std::string names = "resnet50";
  for (const Transformer& t : kTransformers) {
    absl::StrAppend(&names, ", ", std::string(t.name));
    if (name != t.name) continue;
    if (sequence_length == 0) sequence_length = t.sequence;
    const int64_t longest = t.family == Family::kLlama ? 1 << 24 : t.sequence;
    if (sequence_length < 1 || sequence_length > longest) {
      return absl::InvalidArgumentError(
          absl::StrCat("model: expected sequence_length from 1 to ", longest,
                       ", found ", sequence_length));
    }
    return make_transformer(t, sequence_length);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("model: expected one of ", names, " or an object, found '",
                   std::string(name), "'"));
}

int64_t shard_elements(const ModelLayer& layer, int ranks, bool by_tensor) {
  if (!by_tensor) return divide_up(layer.elements(), ranks);
  int64_t sum = 0;
  for (const int64_t tensor : layer.tensors) sum += divide_up(tensor, ranks);
  return sum;
}

double peak_activation_bytes(const ModelShape& model, double batch,
                             std::span<const char> checkpointed) {
  double kept = 0;  // by this layer and earlier ones
  double peak = 0;
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const ModelLayer& layer = model.layers[i];
    kept +=
        checkpointed[i] != 0 ? layer.checkpoint_bytes : layer.activation_bytes;
    const double recomputed = checkpointed[i] != 0 ? layer.activation_bytes : 0;
    peak = std::max(peak, kept + recomputed);
  }
  return batch * peak;
}

std::optional<std::vector<char>> checkpoints_to_fit(
    const ModelShape& model, double batch, std::span<const double> recompute_s,
    double budget, double* least_bytes) {
  const auto& layers = model.layers;
  const auto saved = [&](size_t i) {
    return layers[i].activation_bytes - layers[i].checkpoint_bytes;
  };
  std::vector<size_t> order;
  for (size_t i = 0; i < layers.size(); ++i) {
    if (saved(i) > 0) order.push_back(i);
  }
  std::ranges::stable_sort(order, [&](size_t a, size_t b) {
    return recompute_s[a] * saved(b) < recompute_s[b] * saved(a);
  });

  std::vector<char> chosen(layers.size(), 0);
  double peak = peak_activation_bytes(model, batch, chosen);
  *least_bytes = peak;
  size_t count = 0;
  while (peak > budget && count < order.size()) {
    chosen[order[count++]] = 1;
    peak = peak_activation_bytes(model, batch, chosen);
    *least_bytes = std::min(*least_bytes, peak);
  }
  if (peak > budget) return std::nullopt;
  for (size_t i = 0; i + 1 < count; ++i) {
    chosen[order[i]] = 0;
    if (peak_activation_bytes(model, batch, chosen) > budget) {
      chosen[order[i]] = 1;
    }
  }
  return chosen;
}

}  // namespace brigade
