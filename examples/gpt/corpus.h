// A text to learn, as numbers of its characters, and the pieces of it that each
// rank sees in each step.

#ifndef BRIGADE_EXAMPLES_GPT_CORPUS_H_
#define BRIGADE_EXAMPLES_GPT_CORPUS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace brigade::gpt {

// as_you_like_it.txt, where it was when this was built.
std::string default_text_file();

struct TextBatch {
  at::Tensor inputs;   // int64, [num_pieces, length]
  at::Tensor targets;  // the same, one character further
};

// Thread safety: immutable.
class Corpus {
 public:
  // Characters are bytes. Errors: std::runtime_error if the file can't be read
  // or is empty.
  explicit Corpus(const std::string& path);

  int64_t num_characters() const { return tokens_.numel(); }
  int64_t vocabulary_size() const {  // characters that differ
    return static_cast<int64_t>(vocabulary_.size());
  }

  // [text.size()], int64. Errors: std::runtime_error for a character that the
  // file does not have.
  at::Tensor encode(const std::string& text) const;
  char decode(int64_t token) const { return vocabulary_.at(token); }

  // What `rank` learns in a step: `num_pieces` of the text, of the
  // `num_ranks * num_pieces` that the seed and the step draw for all ranks.
  // REQUIRES: length < num_characters().
  TextBatch batch(uint64_t seed, int64_t step, int rank, int64_t num_pieces,
                  int64_t length) const;

 private:
  std::string vocabulary_;  // ascending
  at::Tensor tokens_;       // int64, [num_characters()]
};

}  // namespace brigade::gpt

#endif  // BRIGADE_EXAMPLES_GPT_CORPUS_H_
