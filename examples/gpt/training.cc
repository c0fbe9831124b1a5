#include "brigade/examples/gpt/training.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "brigade/fsdp/sharded_model.h"

namespace brigade::gpt {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr char kStepKey[] = "step";

FullyShardOptions sharding_of(const Group& group,
                              const TrainingOptions& options) {
  FullyShardOptions sharding = {.prefetch_depth = options.prefetch,
                                .param_dtype = options.param_dtype,
                                .output_dtype = at::kFloat};
  const int size = group->getSize();
  switch (options.strategy) {
    case Strategy::kFull:
      break;
    case Strategy::kGrad:
      sharding.reshard_after_forward = false;
      break;
    case Strategy::kState:  // see Training's constructor
      break;
    case Strategy::kHybrid:
      TORCH_CHECK_VALUE(size % 2 == 0,
                        "hybrid: expected an even number of ranks, found ",
                        size, ".\nUse another strategy.");
      sharding.num_shards = size / 2;
      break;
    case Strategy::kSlices:
      TORCH_CHECK_VALUE(size % 2 == 0 && size > 2,
                        "slices: expected an even number of ranks, 4 at least, "
                        "found ",
                        size, ".\nUse another strategy.");
      sharding.reshard_after_forward = size / 2;
      break;
    case Strategy::kNone:
      sharding.num_shards = 1;
      break;
  }
  return sharding;
}

Gpt make_gpt(const Group& group, const Corpus& corpus,
             const TrainingOptions& options) {
  TORCH_CHECK_VALUE(options.batch_size % group->getSize() == 0,
                    "expected a batch that ", group->getSize(),
                    " ranks divide evenly, found ", options.batch_size,
                    ".\nChange the batch size.");
  GptShape shape = options.shape;
  shape.vocabulary_size = corpus.vocabulary_size();
  return Gpt(shape, options.seed);
}

// Rises in a line, as AdamW's averages are poor at first; then it stays, so
// that it does not depend on how many steps there will be.
double learning_rate(double full, int64_t step) {
  constexpr double kRisingSteps = 20;
  return full * std::min(1.0, static_cast<double>(step + 1) / kRisingSteps);
}

}  // namespace

Training::Training(const Group& group, const Corpus& corpus,
                   const TrainingOptions& options)
    : group_(group),
      corpus_(corpus),
      options_(options),
      network_(make_gpt(group, corpus, options)),
      model_(fully_shard(*network_, group, sharding_of(group, options))),
      optimizer_(network_->parameters(),
                 torch::optim::AdamWOptions(options.learning_rate)) {
  if (options.strategy == Strategy::kState) shard_optimizer_state(*model_);
}

double Training::step(int64_t number) {
  const TextBatch batch = corpus_.batch(
      options_.seed, number, group_->getRank(),
      options_.batch_size / group_->getSize(), options_.shape.context);
  for (torch::optim::OptimizerParamGroup& group : optimizer_.param_groups()) {
    group.options().set_lr(learning_rate(options_.learning_rate, number));
  }
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

int64_t Training::tokens_per_step() const {
  return options_.batch_size * options_.shape.context;
}

void Training::save(const std::string& folder, int64_t step) {
  save_checkpoint(folder, checkpoint_model(*model_), optimizer_,
                  {{kStepKey, std::to_string(step)}});
}

int64_t Training::resume(const std::string& folder) {
  return std::stoll(
      load_checkpoint(folder, checkpoint_model(*model_), optimizer_)
          .at(kStepKey));
}

std::string Training::sample(const std::string& prompt,
                             int64_t num_characters) {
  constexpr double kTemperature = 0.8;  // below 1: fewer surprises
  const torch::NoGradGuard no_grad;
  const auto unsharded = model_->unsharded();
  if (group_->getRank() != 0) return "";
  at::Generator random =
      at::make_generator<at::CPUGeneratorImpl>(options_.seed);
  std::string text = prompt;
  at::Tensor tokens = corpus_.encode(prompt).unsqueeze(0);
  for (int64_t i = 0; i < num_characters; ++i) {
    const int64_t seen = std::min(tokens.size(1), options_.shape.context);
    const at::Tensor scores =
        network_(tokens.narrow(1, tokens.size(1) - seen, seen))
            .select(1, seen - 1)
            .to(torch::kFloat);
    const at::Tensor next = torch::multinomial(
        (scores / kTemperature).softmax(-1), 1, /*replacement=*/false, random);
    text += corpus_.decode(next.item<int64_t>());
    tokens = torch::cat({tokens, next}, 1);
  }
  return text;
}

}  // namespace brigade::gpt
