// Trains a small convolutional network on 1,797 handwritten digits, on as many
// ranks as the launcher starts:
//
//   torchrun --standalone --nproc-per-node 2 --no-python digits
//
// Then it trains the same network again in one process (reference.h), and
// compares.  train() below is all that a program needs to do to use brigade.
//
// Exit code: 0 if all went well and the promises that it prints are kept,
// else 1.

#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/ddp/distributed_data_parallel.h"
#include "brigade/examples/digits/batches.h"
#include "brigade/examples/digits/dataset.h"
#include "brigade/examples/digits/network.h"
#include "brigade/examples/digits/reference.h"
#include "brigade/examples/digits/training.h"
#include "brigade/examples/support/progress_bar.h"

namespace brigade::digits {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  TrainingOptions training;
  std::string data = default_data_file();
  double cap_mb = 0.0625;    // the network is small; so are its buckets
  double min_accuracy = 97;  // percent
  bool compare = true;
};

struct Trained {
  DigitsNet net;
  std::vector<at::Tensor> first_gradients;
};

// Says on rank 0 how far the training is.
class Narrator {
 public:
  Narrator(int rank, int64_t num_epochs, const Batches& batches)
      : speaks_(rank == 0),
        num_epochs_(num_epochs),
        batches_(batches),
        bar_(stdout, num_epochs * batches.steps_per_epoch()) {}

  // `loss`: of this rank's images in the step that is done.
  void after_step(int64_t epoch, int64_t step_in_epoch, double loss) {
    if (!speaks_) return;
    const int64_t steps = batches_.steps_per_epoch();
    if (step_in_epoch == 0) epoch_loss_ = 0;
    epoch_loss_ += loss;
    const int64_t done = epoch * steps + step_in_epoch + 1;
    const std::chrono::duration<double> elapsed = Clock::now() - start_;
    const std::string state = fmt::format(
        "epoch {:2}/{}  loss {:.4f}  {:6.0f} images/s", epoch + 1, num_epochs_,
        epoch_loss_ / static_cast<double>(step_in_epoch + 1),
        static_cast<double>(done * batches_.images_per_step()) /
            elapsed.count());
    bar_.show(done, state);
    if (!bar_.on_terminal() && step_in_epoch + 1 == steps) bar_.print(state);
  }

 private:
  const bool speaks_;
  const int64_t num_epochs_;
  const Batches& batches_;
  ProgressBar bar_;
  const Clock::time_point start_ = Clock::now();
  double epoch_loss_ = 0;
};

Trained train(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
              const Batches& batches, const Options& options) {
  const int rank = group->getRank();
  const TrainingOptions& training = options.training;

  // Each rank draws weights of its own; all of them get those of rank 0.
  torch::manual_seed(training.seed + rank);
  DigitsNet net;
  DistributedDataParallelOptions parallel;
  parallel.reducer.bucket_caps_bytes = {
      static_cast<int64_t>(options.cap_mb * 1024 * 1024)};
  DistributedDataParallel model(net, group, parallel);

  Trained trained{.net = net, .first_gradients = {}};
  torch::optim::SGD optimizer = make_optimizer(net, training);
  const int64_t num_steps = training.epochs * batches.steps_per_epoch();
  Narrator narrator(rank, training.epochs, batches);
  int64_t step = 0;
  for (int64_t number = 0; number < training.epochs; ++number) {
    const Batches::Epoch epoch = batches.epoch(number);
    for (int64_t i = 0; i < batches.steps_per_epoch(); ++i, ++step) {
      const DigitImages batch = epoch.batch(i, rank);
      optimizer.zero_grad();
      const at::Tensor scores = model(batch.pixels);
      const at::Tensor loss =
          torch::nn::functional::cross_entropy(scores, batch.labels);
      loss.backward();  // averages the gradients over the ranks
      if (step == 0) trained.first_gradients = gradients_of(net);
      set_learning_rate(optimizer, training, step, num_steps);
      optimizer.step();
      narrator.after_step(number, i, loss.item<double>());
    }
  }
  return trained;
}

double percent(int64_t part, int64_t whole) {
  return 100.0 * static_cast<double>(part) / static_cast<double>(whole);
}

// Prints a promise and whether it is kept; returns the latter.
bool report(bool kept, const std::string& text) {
  fmt::print("{}{}\n", kept ? "" : "FAILED: ", text);
  return kept;
}

bool report_accuracy(DigitsNet& net, const DigitImages& test,
                     double min_accuracy) {
  const int64_t total = test.labels.numel();
  const int64_t correct = count_correct(net, test);
  const double accuracy = percent(correct, total);
  return report(accuracy >= min_accuracy,
                fmt::format("test accuracy {:.2f} % ({} of {}; promised: at "
                            "least {:g} %)",
                            accuracy, correct, total, min_accuracy));
}

// One or two ranks must give the bits of one process: only two numbers are
// added. With more ranks the order of additions is the backend's business.
bool report_comparison(Trained& trained, const Batches& batches,
                       const DigitImages& test, const Options& options) {
  const int num_ranks = batches.num_ranks();
  const TrainingOptions& training = options.training;
  Reference reference = [&] {
    ProgressBar bar(stdout, training.epochs * batches.steps_per_epoch());
    Reference result = train_reference(batches, training, [&](int64_t step) {
      bar.show(step, "the same in one process, to compare");
    });
    bar.clear();
    return result;
  }();

  const std::vector<at::Tensor> weights = trained.net->parameters();
  const std::vector<at::Tensor> expected = reference.net->parameters();
  if (num_ranks <= 2) {
    return report(equal_bits(weights, expected),
                  fmt::format("weights equal the single-process reference bit "
                              "for bit ({} tensors)",
                              weights.size()));
  }
  const double max_ulp = std::max(4, num_ranks);
  const double ulp =
      distance_in_ulp(trained.first_gradients, reference.first_gradients);
  const int64_t total = test.labels.numel();
  const double accuracy = percent(count_correct(trained.net, test), total);
  const double reference_accuracy =
      percent(count_correct(reference.net, test), total);
  const bool gradients_kept =
      report(ulp <= max_ulp,
             fmt::format("first gradients within {:.2f} ulp of the largest "
                         "element of the single-process reference's "
                         "(promised: {:g})",
                         ulp, max_ulp));
  const bool accuracy_kept = report(
      std::abs(accuracy - reference_accuracy) <= 0.5,
      fmt::format("accuracy within {:.2f} % of the single-process "
                  "reference's {:.2f} % (promised: 0.5 %)",
                  std::abs(accuracy - reference_accuracy), reference_accuracy));
  return gradients_kept && accuracy_kept;
}

bool started_by_launcher() {
  const auto is_set = [](const char* name) { return std::getenv(name); };
  return is_set("RANK") || is_set("WORLD_SIZE") || is_set("SLURM_PROCID") ||
         is_set("OMPI_COMM_WORLD_RANK");
}

// Returns whether the promises are kept.
bool run(const Options& options) {
  at::set_num_threads(1);  // sums in one order, and one core per rank
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);

  const DigitImages digits = read_digits(options.data);
  const DigitSplit split = split_digits(digits.labels, options.training.seed);
  const DigitImages test = select(digits, split.test);

  GroupScope scope(started_by_launcher() ? init_process_group()
                                         : single_process_group());
  const auto& group = scope.group();
  const bool speaks = group->getRank() == 0;
  const Batches batches(select(digits, split.train),
                        options.training.batch_size, group->getSize(),
                        options.training.seed);
  if (speaks) {
    if (!started_by_launcher()) {
      fmt::print(
          "no launcher: one rank. For two: torchrun --standalone "
          "--nproc-per-node 2 --no-python digits\n");
    }
    fmt::print(
        "{} images to train with, {} to test; {} rank{} x {} images, {} "
        "steps an epoch\n",
        split.train.size(), split.test.size(), group->getSize(),
        group->getSize() == 1 ? "" : "s", batches.images_per_rank(),
        batches.steps_per_epoch());
    std::fflush(stdout);
  }

  Trained trained = train(group, batches, options);
  if (!speaks) return true;
  bool kept = report_accuracy(trained.net, test, options.min_accuracy);
  if (options.compare) {
    kept = report_comparison(trained, batches, test, options) && kept;
  }
  return kept;
}

int main(int argc, char** argv) {
  Options options;
  CLI::App app{
      "Trains a small network on handwritten digits, on all ranks that "
      "torchrun (or srun, or mpirun) starts, and compares the weights "
      "with those of a single process."};
  app.add_option("--epochs", options.training.epochs,
                 "Times that every image is seen")
      ->check(CLI::Range(1, 10'000))
      ->capture_default_str();
  app.add_option("--batch-size", options.training.batch_size,
                 "Images per step, over all ranks")
      ->check(CLI::Range(1, 1437))
      ->capture_default_str();
  app.add_option("--seed", options.training.seed,
                 "Of the split, the order of images and the first weights")
      ->capture_default_str();
  app.add_option("--learning-rate", options.training.learning_rate,
                 "Of the first step; it falls to 0 in a line")
      ->check(CLI::Range(1e-6, 10.0))
      ->capture_default_str();
  app.add_option("--cap-mb", options.cap_mb,
                 "Size at which a bucket of gradients is sent, in MiB")
      ->check(CLI::Range(1e-6, 1e6))
      ->capture_default_str();
  app.add_option("--data", options.data, "digits.csv.gz")
      ->capture_default_str();
  app.add_option("--min-accuracy", options.min_accuracy,
                 "Percent of the test images; less is a failure")
      ->check(CLI::Range(0.0, 100.0))
      ->capture_default_str();
  app.add_flag("!--no-compare", options.compare,
               "Leave out the single-process reference");
  CLI11_PARSE(app, argc, argv);

  // One line, also of errors that have several.
  std::string error;
  try {
    return run(options) ? 0 : 1;
  } catch (const c10::Error& e) {
    error = e.what_without_backtrace();
  } catch (const std::exception& e) {
    error = e.what();
  }
  std::replace(error.begin(), error.end(), '\n', ' ');
  fmt::print(stderr, "digits: {}\n", error);
  return 1;
}

}  // namespace
}  // namespace brigade::digits

int main(int argc, char** argv) { return brigade::digits::main(argc, argv); }
