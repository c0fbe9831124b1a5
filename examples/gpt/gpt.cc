// Trains a small GPT on the characters of a play, sharded over as many ranks as
// the launcher starts:
//
//   torchrun --standalone --nproc-per-node 2 --no-python gpt
//
// All ways to shard print the same losses. A run that goes on from a checkpoint
// prints those that the run before would have printed, on as many ranks:
//
//   ... gpt --steps 100 --checkpoint made
//   ... gpt --steps 200 --resume made
//
// network.h and training.h are all that a program needs to do to use sharding.

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
           bool speaks) {
  const auto start = std::chrono::steady_clock::now();
  for (int64_t step = first_step; step < num_steps; ++step) {
    const double loss = training.step(step);
    const int64_t done = step + 1;
    const bool shows =
        done % std::max<int64_t>(1, num_steps / 10) == 0 || done == num_steps;
    if (!speaks || !shows) continue;
    const std::chrono::duration<double> elapsed =
        std::chrono::steady_clock::now() - start;
    fmt::print(
        "step {:4}/{}  loss {:.9f}  {:6.0f} tokens/s\n", done, num_steps, loss,
        (done - first_step) * training.tokens_per_step() / elapsed.count());
    std::fflush(stdout);
  }
}

int run(const Options& options) {
  at::set_num_threads(1);  // sums in one order, and one core per rank

  const Corpus corpus;
  GroupScope scope(group_of_launcher());
  const auto& group = scope.group();
  const bool speaks = group->getRank() == 0;
  Training training(group, corpus, options.training);
  if (speaks) {
    fmt::print("{} characters, {} of them different; {} ranks, {}",
               corpus.num_characters(), corpus.vocabulary_size(),
               group->getSize(), training.model().explain());
    std::fflush(stdout);
  }

  const int64_t first_step =
      options.resume.empty() ? 0 : training.resume(options.resume);
  train(training, first_step, options.steps, speaks);
  if (!options.checkpoint.empty()) {
    training.save(options.checkpoint, std::max(first_step, options.steps));
  }
  const std::string sample = training.sample("ROSALIND\t", options.sample);
  if (speaks) {
    const ShardedModelStatistics statistics = training.model().statistics();
    fmt::print(
        "rank 0 held {} bytes of parameters, and at most {} of unsharded units "
        "and gradients\n---\n{}\n",
        statistics.shard_bytes, statistics.peak_buffer_bytes, sample);
  }
  return 0;
}

int main(int argc, char** argv) {
  Options options;
  TrainingOptions& training = options.training;
  FullyShardOptions& sharding = training.sharding;
  CLI::App app{
      "Trains a small GPT on the characters of a play, sharded over all ranks "
      "that torchrun (or srun, or mpirun) starts, and lets it write some."};
  app.option_defaults()->always_capture_default();
  app.add_option("--num-shards", sharding.num_shards,
                 "Ranks that parameters, gradients and optimizer state are "
                 "sharded over; all by default, 1 holds all");
  app.add_flag_callback(
      "--keep-unsharded", [&] { sharding.reshard_after_forward = false; },
      "Blocks stay unsharded from forward to backward");
  app.add_option("--prefetch", sharding.prefetch_depth,
                 "Blocks that are gathered before they are needed");
  app.add_flag_callback(
      "--bfloat16", [&] { sharding.param_dtype = at::kBFloat16; },
      "Forward and backward compute in it; the optimizer keeps float32");
  app.add_option("--steps", options.steps, "Steps of the optimizer");
  app.add_option("--batch-size", training.batch_size,
                 "Pieces of text per step, over all ranks");
  app.add_option("--blocks", training.shape.num_blocks, "Of the network")
      ->check(CLI::PositiveNumber);
  app.add_option("--width", training.shape.width,
                 "Of the network, a multiple of 4")
      ->check(CLI::PositiveNumber);
  app.add_option("--checkpoint", options.checkpoint,
                 "Folder, seen by all ranks, to save to in the end");
  app.add_option("--resume", options.resume, "Such a folder to go on from");
  app.add_option("--sample", options.sample, "Characters to write in the end");
  CLI11_PARSE(app, argc, argv);
  return run_program("gpt", [&] { return run(options); });
}

}  // namespace
}  // namespace brigade::gpt

int main(int argc, char** argv) { return brigade::gpt::main(argc, argv); }
