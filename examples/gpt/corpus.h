// Training text, encoded by character, and its batches by step and rank.

#ifndef BRIGADE_EXAMPLES_GPT_CORPUS_H_
#define BRIGADE_EXAMPLES_GPT_CORPUS_H_

#include <torch/torch.h>

#include <cstdint>
#include <fstream>
#include <iterator>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace brigade::gpt {

struct TextBatch {
  at::Tensor inputs;   // int64, [batch_size, length]
  at::Tensor targets;  // same shape, shifted by one character
};

// Thread safety: immutable.
class Corpus {
 public:
  // A character is a byte. Throws ValueError if the file can't be read or is
  // empty.
  explicit Corpus(const std::string& path = GPT_TEXT_FILE) {
    std::ifstream file(path, std::ios::binary);
    const std::string text(std::istreambuf_iterator<char>(file), {});
    TORCH_CHECK_VALUE(!text.empty(), path, ": the text is missing or empty");
    const std::set<char> distinct(text.begin(), text.end());
    vocabulary_.assign(distinct.begin(), distinct.end());
    tokens_ = encode(text);
  }

  int64_t num_characters() const { return tokens_.numel(); }
  int64_t vocabulary_size() const {
    return static_cast<int64_t>(vocabulary_.size());
  }

  // Returns int64, [text.size()]. Throws ValueError for a character outside the
  // vocabulary.
  at::Tensor encode(const std::string& text) const {
    std::vector<int64_t> tokens;
    for (const char character : text) {
      const size_t token = vocabulary_.find(character);
      TORCH_CHECK_VALUE(token != std::string::npos,
                        "the vocabulary has no character '", character, "'");
      tokens.push_back(static_cast<int64_t>(token));
    }
    return torch::tensor(tokens, torch::kLong);
  }

  char decode(int64_t token) const { return vocabulary_.at(token); }

  // Returns this rank's excerpts of a step, `batch_size` of them. Seed and step
  // determine those of all ranks. REQUIRES: length < num_characters().
  TextBatch batch(uint64_t seed, int64_t step, int rank, int64_t batch_size,
                  int64_t length) const {
    std::mt19937_64 random(seed + (static_cast<uint64_t>(step) << 20));
    random.discard(rank * batch_size);
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> targets;
    for (int64_t i = 0; i < batch_size; ++i) {
      const auto begin =
          static_cast<int64_t>(random() % (num_characters() - length));
      inputs.push_back(tokens_.narrow(0, begin, length));
      targets.push_back(tokens_.narrow(0, begin + 1, length));
    }
    return {.inputs = torch::stack(inputs), .targets = torch::stack(targets)};
  }

 private:
  std::string vocabulary_;  // distinct characters, ascending
  at::Tensor tokens_;       // int64, [num_characters()]
};

}  // namespace brigade::gpt

#endif  // BRIGADE_EXAMPLES_GPT_CORPUS_H_
