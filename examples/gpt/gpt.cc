// Trains a small GPT on the characters of a play, sharded over as many ranks as
// the launcher starts:
//
//   torchrun --standalone --nproc-per-node 2 --no-python gpt --strategy full
//
// Every strategy prints the same losses. A run that goes on from a checkpoint
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
#include <cstdlib>
#include <exception>
#include <map>
#include <string>

#include "brigade/comm/process_group.h"
#include "brigade/examples/gpt/corpus.h"
#include "brigade/examples/gpt/training.h"
#include "brigade/examples/support/progress_bar.h"

namespace brigade::gpt {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  TrainingOptions training;
  std::string text = default_text_file();
  int64_t steps = 300;
  std::string checkpoint;  // empty: none
  std::string resume;
  std::string prompt = "ROSALIND\t";
  int64_t sample = 300;  // characters
};

// Says on rank 0 how far the training is.
class Narrator {
 public:
  Narrator(bool speaks, int64_t first_step, int64_t num_steps,
           int64_t tokens_per_step)
      : speaks_(speaks),
        first_step_(first_step),
        num_steps_(num_steps),
        tokens_per_step_(tokens_per_step),
        bar_(stdout, num_steps) {}

  void after_step(int64_t step, double loss) {
    if (!speaks_) return;
    const int64_t done = step + 1;
    const std::chrono::duration<double> elapsed = Clock::now() - start_;
    const std::string state = fmt::format(
        "step {:4}/{}  loss {:.9f}  {:6.0f} tokens/s", done, num_steps_, loss,
        static_cast<double>((done - first_step_) * tokens_per_step_) /
            elapsed.count());
    bar_.show(done, state);
    const int64_t between = std::max<int64_t>(1, num_steps_ / 10);
    if (done % between == 0 || done == num_steps_) bar_.print(state);
  }

 private:
  const bool speaks_;
  const int64_t first_step_;
  const int64_t num_steps_;
  const int64_t tokens_per_step_;
  ProgressBar bar_;
  const Clock::time_point start_ = Clock::now();
};

bool started_by_launcher() {
  const auto is_set = [](const char* name) { return std::getenv(name); };
  return is_set("RANK") || is_set("WORLD_SIZE") || is_set("SLURM_PROCID") ||
         is_set("OMPI_COMM_WORLD_RANK");
}

void run(const Options& options) {
  at::set_num_threads(1);  // sums in one order, and one core per rank

  const Corpus corpus(options.text);
  GroupScope scope(started_by_launcher() ? init_process_group()
                                         : single_process_group());
  const auto& group = scope.group();
  const bool speaks = group->getRank() == 0;
  Training training(group, corpus, options.training);
  if (speaks) {
    fmt::print("{} characters, {} of them different; {} rank{}, {}",
               corpus.num_characters(), corpus.vocabulary_size(),
               group->getSize(), group->getSize() == 1 ? "" : "s",
               training.model().explain());
    std::fflush(stdout);
  }

  const int64_t first_step =
      options.resume.empty() ? 0 : training.resume(options.resume);
  {
    Narrator narrator(speaks, first_step, options.steps,
                      training.tokens_per_step());
    for (int64_t step = first_step; step < options.steps; ++step) {
      narrator.after_step(step, training.step(step));
    }
  }
  if (!options.checkpoint.empty()) {
    training.save(options.checkpoint, std::max(first_step, options.steps));
  }
  const std::string sample = training.sample(options.prompt, options.sample);
  if (speaks) {
    const ShardedModelStatistics statistics = training.model().statistics();
    fmt::print(
        "rank 0 held {} bytes of parameters, and at most {} of unsharded units "
        "and "
        "gradients\n---\n{}\n",
        statistics.shard_bytes, statistics.peak_buffer_bytes, sample);
  }
}

void add_options(CLI::App& app, Options& options) {
  TrainingOptions& training = options.training;
  app.add_option("--strategy", training.strategy,
                 "What ranks hold parts of: all (full), all but parameters "
                 "between forward and backward (grad), the optimizer's state "
                 "(state), all within each half of the ranks (hybrid), all, "
                 "which each half holds from forward to backward (slices), "
                 "nothing (none)")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, Strategy>{{"full", Strategy::kFull},
                                          {"grad", Strategy::kGrad},
                                          {"state", Strategy::kState},
                                          {"slices", Strategy::kSlices},
                                          {"hybrid", Strategy::kHybrid},
                                          {"none", Strategy::kNone}}));
  app.add_option("--prefetch", training.prefetch,
                 "Blocks that are gathered before they are needed")
      ->check(CLI::Range(0, 1000))
      ->capture_default_str();
  app.add_option_function<std::string>(
         "--param-dtype",
         [&training](const std::string& name) {
           if (name == "bfloat16") training.param_dtype = at::kBFloat16;
         },
         "What forward and backward compute in; the optimizer keeps float32")
      ->check(CLI::IsMember({"float32", "bfloat16"}));
  app.add_option("--steps", options.steps, "Steps of the optimizer")
      ->check(CLI::Range(0, 1'000'000))
      ->capture_default_str();
  app.add_option("--batch-size", training.batch_size,
                 "Pieces of text per step, over all ranks")
      ->check(CLI::Range(1, 100'000))
      ->capture_default_str();
  app.add_option("--blocks", training.shape.num_blocks, "Of the network")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--width", training.shape.width,
                 "Of the network, a multiple of 4")
      ->check(CLI::Range(4, 100'000))
      ->capture_default_str();
  app.add_option("--learning-rate", training.learning_rate,
                 "From the 20th step on; it rises to it in a line")
      ->check(CLI::Range(1e-6, 10.0))
      ->capture_default_str();
  app.add_option("--seed", training.seed,
                 "Of the first weights, the order of the text and the sample")
      ->capture_default_str();
  app.add_option("--checkpoint", options.checkpoint,
                 "Folder, seen by all ranks, to save to in the end");
  app.add_option("--resume", options.resume, "Such a folder to go on from");
  app.add_option("--text", options.text, "What to learn")
      ->capture_default_str();
  app.add_option("--prompt", options.prompt, "What the sample begins with");
  app.add_option("--sample", options.sample, "Characters to write in the end")
      ->check(CLI::Range(0, 100'000))
      ->capture_default_str();
}

int main(int argc, char** argv) {
  Options options;
  CLI::App app{
      "Trains a small GPT on the characters of a play, sharded over all ranks "
      "that torchrun (or srun, or mpirun) starts, and lets it write some."};
  add_options(app, options);
  CLI11_PARSE(app, argc, argv);

  // One line, also of errors that have several.
  std::string error;
  try {
    run(options);
    return 0;
  } catch (const c10::Error& e) {
    error = e.what_without_backtrace();
  } catch (const std::exception& e) {
    error = e.what();
  }
  std::ranges::replace(error, '\n', ' ');
  fmt::print(stderr, "gpt: {}\n", error);
  return 1;
}

}  // namespace
}  // namespace brigade::gpt

int main(int argc, char** argv) { return brigade::gpt::main(argc, argv); }
