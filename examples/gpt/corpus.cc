#include "brigade/examples/gpt/corpus.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <random>
#include <stdexcept>
#include <vector>

namespace brigade::gpt {

std::string default_text_file() { return GPT_TEXT_FILE; }

Corpus::Corpus(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  if (text.empty()) {
    throw std::runtime_error(fmt::format(
        "{}: expected a text, found nothing that can be read", path));
  }
  vocabulary_ = text;
  std::ranges::sort(vocabulary_);
  const auto rest = std::ranges::unique(vocabulary_);
  vocabulary_.erase(rest.begin(), rest.end());
  tokens_ = encode(text);
}

at::Tensor Corpus::encode(const std::string& text) const {
  std::vector<int64_t> tokens;
  tokens.reserve(text.size());
  for (const char character : text) {
    const size_t token = vocabulary_.find(character);
    if (token == std::string::npos) {
      throw std::runtime_error(fmt::format(
          "the text has no character '{}' to learn from", character));
    }
    tokens.push_back(static_cast<int64_t>(token));
  }
  return torch::tensor(tokens, torch::kLong);
}

TextBatch Corpus::batch(uint64_t seed, int64_t step, int rank,
                        int64_t num_pieces, int64_t length) const {
  std::mt19937_64 random(seed + (static_cast<uint64_t>(step) << 20));
  random.discard(rank * num_pieces);
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> targets;
  for (int64_t piece = 0; piece < num_pieces; ++piece) {
    const auto begin =
        static_cast<int64_t>(random() % (num_characters() - length));
    inputs.push_back(tokens_.narrow(0, begin, length));
    targets.push_back(tokens_.narrow(0, begin + 1, length));
  }
  return {.inputs = torch::stack(inputs), .targets = torch::stack(targets)};
}

}  // namespace brigade::gpt
