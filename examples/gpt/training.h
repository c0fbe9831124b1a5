// Training of a GPT sharded over a process group.

#ifndef BRIGADE_EXAMPLES_GPT_TRAINING_H_
#define BRIGADE_EXAMPLES_GPT_TRAINING_H_

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/examples/gpt/corpus.h"
#include "brigade/examples/gpt/network.h"
#include "brigade/fsdp/fully_shard.h"
#include "brigade/fsdp/sharded_model.h"

namespace brigade::gpt {

struct TrainingOptions {
  FullyShardOptions sharding = {.output_dtype = at::kFloat};
  GptShape shape = {};      // `vocabulary_size` is set from the text
  int64_t batch_size = 16;  // excerpts per step on all ranks together
  double learning_rate = 1e-3;
  uint64_t seed = 1;  // for the initial weights and the excerpts
};

// Thread safety: none.
class Training {
 public:
  // Collective. `corpus` must outlive this. Throws ValueError unless the batch
  // size is a multiple of the world size, and the errors of fully_shard().
  Training(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
           const Corpus& corpus, const TrainingOptions& options)
      : group_(group),
        corpus_(corpus),
        options_(options),
        network_(with_vocabulary(options.shape, corpus), options.seed),
        model_(fully_shard(*network_, group, options.sharding)),
        optimizer_(network_->parameters(),
                   torch::optim::AdamWOptions(options.learning_rate)) {
    TORCH_CHECK_VALUE(options.batch_size % group->getSize() == 0,
                      "expected a batch size that is a multiple of the world "
                      "size ",
                      group->getSize(), ", found ", options.batch_size,
                      ".\nChange the batch size.");
  }

  // Collective. Runs one step and returns its loss, averaged over the ranks:
  // the same number on all ranks.
  double step(int64_t number) {
    const TextBatch batch = corpus_.batch(
        options_.seed, number, group_->getRank(),
        options_.batch_size / group_->getSize(), options_.shape.context);
    // Linear warm-up for AdamW, then constant, so that a resumed run with more
    // steps has the same rates.
    const double rate =
        options_.learning_rate * std::min(1.0, (number + 1) / 20.0);
    optimizer_.param_groups()[0].options().set_lr(rate);
    optimizer_.zero_grad();
    const at::Tensor scores =
        model_->forward([&] { return network_(batch.inputs); });
    const at::Tensor loss = torch::nn::functional::cross_entropy(
        scores.flatten(0, 1), batch.targets.flatten());
    loss.backward();  // averages the gradients over the ranks
    optimizer_.step();

    std::vector<at::Tensor> sum = {loss.detach().to(torch::kDouble)};
    group_->allreduce(sum)->wait();
    return sum.front().item<double>() / group_->getSize();
  }

  int64_t tokens_per_step() const {  // on all ranks together
    return options_.batch_size * options_.shape.context;
  }

  // Collective. Each rank saves its shards. `step` is the next step to run,
  // which resume() returns.
  void save(const std::string& folder, int64_t step) {
    save_checkpoint(folder, checkpoint_model(*model_), optimizer_,
                    {{"step", std::to_string(step)}});
  }
  int64_t resume(const std::string& folder) {
    return std::stoll(
        load_checkpoint(folder, checkpoint_model(*model_), optimizer_)
            .at("step"));
  }

  // Collective. Returns `prompt` and its continuation on rank 0, "" on other
  // ranks.
  std::string sample(const std::string& prompt, int64_t num_characters) {
    constexpr double kTemperature = 0.8;
    const torch::NoGradGuard no_grad;
    const auto unsharded = model_->unsharded();
    if (group_->getRank() != 0) return "";
    at::Generator random =
        at::make_generator<at::CPUGeneratorImpl>(options_.seed);
    std::string text = prompt;
    at::Tensor tokens = corpus_.encode(prompt).unsqueeze(0);
    for (int64_t i = 0; i < num_characters; ++i) {
      const int64_t length = std::min(tokens.size(1), options_.shape.context);
      const at::Tensor scores =
          network_(tokens.narrow(1, tokens.size(1) - length, length))
              .select(1, length - 1)
              .to(torch::kFloat);
      const at::Tensor next =
          torch::multinomial((scores / kTemperature).softmax(-1), 1,
                             /*replacement=*/false, random);
      text += corpus_.decode(next.item<int64_t>());
      tokens = torch::cat({tokens, next}, 1);
    }
    return text;
  }

  ShardedModel& model() { return *model_; }

 private:
  static GptShape with_vocabulary(GptShape shape, const Corpus& corpus) {
    shape.vocabulary_size = corpus.vocabulary_size();
    return shape;
  }

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const Corpus& corpus_;
  const TrainingOptions options_;
  Gpt network_;
  std::unique_ptr<ShardedModel> model_;
  torch::optim::AdamW optimizer_;
};

}  // namespace brigade::gpt

#endif  // BRIGADE_EXAMPLES_GPT_TRAINING_H_
