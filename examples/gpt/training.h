// A GPT that is sharded over a group, its optimizer, and the text that it
// learns.
//
//   Training training(group, corpus, {.strategy = Strategy::kFull});
//   for (int64_t step = 0; step < 100; ++step) training.step(step);
//   training.save("checkpoint", 100);
//   std::cout << training.sample("ROSALIND\t", 200);

#ifndef BRIGADE_EXAMPLES_GPT_TRAINING_H_
#define BRIGADE_EXAMPLES_GPT_TRAINING_H_

#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "brigade/examples/gpt/corpus.h"
#include "brigade/examples/gpt/network.h"
#include "brigade/fsdp/fully_shard.h"

namespace brigade::gpt {

// What ranks hold parts of.
enum class Strategy {
  kFull,    // parameters, gradients, optimizer state
  kGrad,    // the same, but parameters are whole from forward to backward
  kState,   // optimizer state; parameters while it steps
  kHybrid,  // as kFull, within each half of the ranks
  kSlices,  // as kFull, but each half holds all from forward to backward
  kNone,    // nothing: each rank has all
};

struct TrainingOptions {
  Strategy strategy = Strategy::kFull;
  size_t prefetch = 1;  // blocks gathered ahead
  std::optional<at::ScalarType> param_dtype = std::nullopt;
  GptShape shape = {};      // but for the vocabulary, which is the text's
  int64_t batch_size = 16;  // pieces of text in a step, over all ranks
  double learning_rate = 1e-3;
  uint64_t seed = 1;  // of the first weights and of the pieces
};

// Thread safety: none.
class Training {
 public:
  // Collective. `corpus` outlives it. Errors: ValueError if the ranks divide
  // the batch unevenly, or have no halves for kHybrid, of 2 ranks at least for
  // kSlices; fully_shard()'s.
  Training(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
           const Corpus& corpus, const TrainingOptions& options);

  // Collective: one step of the optimizer; the loss before it, averaged over
  // the ranks. The same number on all ranks.
  double step(int64_t number);

  // Characters that a step goes through, on all ranks.
  int64_t tokens_per_step() const;

  // Collective: each rank its part; `step`: the one to go on with, which
  // resume() returns.
  void save(const std::string& folder, int64_t step);
  int64_t resume(const std::string& folder);

  // Collective: `prompt` and what the network makes of it, on rank 0; empty on
  // the others.
  std::string sample(const std::string& prompt, int64_t num_characters);

  ShardedModel& model() { return *model_; }

 private:
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const Corpus& corpus_;
  const TrainingOptions options_;
  Gpt network_;
  std::unique_ptr<ShardedModel> model_;
  torch::optim::AdamW optimizer_;
};

}  // namespace brigade::gpt

#endif  // BRIGADE_EXAMPLES_GPT_TRAINING_H_
