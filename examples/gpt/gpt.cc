// Sharded training of a small GPT on the characters of a play:
//
//   torchrun --standalone --nproc-per-node 2 --no-python gpt
//
// All sharding options print the same losses. A run resumed on the same number
// of ranks prints the losses that an uninterrupted run would have printed:
//
//   ... gpt --steps 100 --checkpoint saved
//   ... gpt --steps 200 --resume saved
//
// training.h shows how a program uses sharding.

#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>

#include "brigade/examples/gpt/corpus.h"
#include "brigade/examples/gpt/training.h"
#include "brigade/examples/support/program.h"

namespace brigade::gpt {
namespace {

struct Options {
  TrainingOptions training;
  int64_t steps = 300;
  std::string checkpoint;  // empty: none
  std::string resume;
  int64_t sample = 300;  // characters
};

void train(Training& training, int64_t first_step, int64_t num_steps,
           bool is_logging) {
  const auto start = std::chrono::steady_clock::now();
  for (int64_t step = first_step; step < num_steps; ++step) {
    const double loss = training.step(step);
    const int64_t done = step + 1;
    const bool is_due =
        done % std::max<int64_t>(1, num_steps / 10) == 0 || done == num_steps;
    if (!is_logging || !is_due) continue;
    const std::chrono::duration<double> elapsed =
        std::chrono::steady_clock::now() - start;
    fmt::print(
        "step {:4}/{}  loss {:.9f}  {:6.0f} tokens/s\n", done, num_steps, loss,
        (done - first_step) * training.tokens_per_step() / elapsed.count());
    std::fflush(stdout);
  }
}

int run(const Options& options) {
  at::set_num_threads(1);  // reproducible sums, and one core per rank

  const Corpus corpus;
  GroupScope scope(group_of_launcher());
  const auto& group = scope.group();
  const bool is_logging = group->getRank() == 0;
  Training training(group, corpus, options.training);
  if (is_logging) {
    fmt::print("{} characters, vocabulary of {}\n{}", corpus.num_characters(),
               corpus.vocabulary_size(), training.model().explain());
    std::fflush(stdout);
  }

  const int64_t first_step =
      options.resume.empty() ? 0 : training.resume(options.resume);
  train(training, first_step, options.steps, is_logging);
  if (!options.checkpoint.empty()) {
    training.save(options.checkpoint, std::max(first_step, options.steps));
  }
  const std::string sample = training.sample("ROSALIND\t", options.sample);
  if (is_logging) {
    const ShardedModelStatistics statistics = training.model().statistics();
    fmt::print(
        "rank 0: {} bytes of sharded parameters, at most {} bytes of unsharded "
        "parameters and gradients\n---\n{}\n",
        statistics.shard_bytes, statistics.peak_buffer_bytes, sample);
  }
  return 0;
}

int main(int argc, char** argv) {
  Options options;
  TrainingOptions& training = options.training;
  FullyShardOptions& sharding = training.sharding;
  CLI::App app{
      "Trains a small GPT on the characters of a play, sharded over the ranks "
      "started by torchrun, srun or mpirun. Prints a sample at the end."};
  app.option_defaults()->always_capture_default();
  app.add_option("--num-shards", sharding.num_shards,
                 "Ranks over which parameters, gradients and optimizer state "
                 "are sharded; default: all; 1: no sharding");
  app.add_flag_callback(
      "--keep-unsharded", [&] { sharding.reshard_after_forward = false; },
      "Keep blocks unsharded from forward to backward");
  app.add_option("--prefetch", sharding.prefetch_depth,
                 "Blocks whose all-gather starts ahead of use");
  app.add_flag_callback(
      "--bfloat16", [&] { sharding.param_dtype = at::kBFloat16; },
      "Compute forward and backward in bfloat16; the optimizer uses float32");
  app.add_option("--steps", options.steps, "Number of the last step");
  app.add_option("--batch-size", training.batch_size,
                 "Excerpts per step on all ranks together");
  app.add_option("--blocks", training.shape.num_blocks, "Transformer blocks")
      ->check(CLI::PositiveNumber);
  app.add_option("--width", training.shape.width,
                 "Width of the network, a multiple of 4")
      ->check(CLI::PositiveNumber);
  app.add_option("--checkpoint", options.checkpoint,
                 "Folder shared by all ranks; the run ends by saving to it");
  app.add_option("--resume", options.resume,
                 "Folder of a checkpoint to start from");
  app.add_option("--sample", options.sample, "Characters of the sample");
  CLI11_PARSE(app, argc, argv);
  return run_program("gpt", [&] { return run(options); });
}

}  // namespace
}  // namespace brigade::gpt

int main(int argc, char** argv) { return brigade::gpt::main(argc, argv); }
