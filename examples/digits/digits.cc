// Data-parallel training of a small network on handwritten digits:
//
//   torchrun --standalone --nproc-per-node 2 --no-python digits
//
// Afterwards rank 0 trains the network again, computes the gradients of all
// ranks itself, and compares the weights bit for bit.

#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>

#include "brigade/ddp/distributed_data_parallel.h"
#include "brigade/examples/digits/dataset.h"
#include "brigade/examples/support/program.h"

namespace brigade::digits {
namespace {

// Convolutional network for 8 x 8 pixels: from float32, [n, 1, 8, 8], to a
// score per digit, [n, 10]. It has no batch normalization, so that gradients
// depend only on images and weights.
using DigitsNet = torch::nn::Sequential;

// Braces draw the weights in this order.
DigitsNet make_net() {
  return DigitsNet{
      torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 32, 3).padding(1)),
      torch::nn::ReLU(),
      torch::nn::Conv2d(torch::nn::Conv2dOptions(32, 64, 3).padding(1)),
      torch::nn::ReLU(),
      torch::nn::MaxPool2d(2),
      torch::nn::Flatten(),
      torch::nn::Linear(64 * 4 * 4, 64),
      torch::nn::ReLU(),
      torch::nn::Linear(64, kNumClasses)};
}

constexpr int64_t kNumTestImages = 360;  // of 1,797
constexpr uint64_t kSeed = 1;          // for the split, the order, the weights
constexpr double kLearningRate = 0.1;  // in the first step; decays linearly

struct Options {
  int64_t epochs = 20;
  int64_t batch_size = 60;  // images per step on all ranks together
  double min_accuracy = 95;
};

// Runs `num_steps` steps. `backward(step)` accumulates gradients in `net`.
void train(DigitsNet& net, int64_t num_steps,
           const std::function<void(int64_t)>& backward) {
  torch::optim::SGD optimizer(
      net->parameters(),
      torch::optim::SGDOptions(kLearningRate).momentum(0.9).weight_decay(1e-3));
  for (int64_t step = 0; step < num_steps; ++step) {
    optimizer.zero_grad();
    backward(step);
    const double left = 1.0 - static_cast<double>(step) / num_steps;
    optimizer.param_groups()[0].options().set_lr(kLearningRate * left);
    optimizer.step();
  }
}

at::Tensor loss_of(const at::Tensor& scores, const DigitImages& images) {
  return torch::nn::functional::cross_entropy(scores, images.labels);
}

DigitsNet train_on_all_ranks(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, const Batches& batches,
    const Options& options) {
  const int rank = group->getRank();
  // Ranks draw different weights; the wrapper broadcasts rank 0's.
  torch::manual_seed(kSeed + rank);
  DigitsNet net = make_net();
  DistributedDataParallel model(net, group,
                                {.reducer = {.reproducible = true}});
  const auto start = std::chrono::steady_clock::now();
  const int64_t per_epoch = batches.steps_per_epoch();
  double epoch_loss = 0;
  train(net, options.epochs * per_epoch, [&](int64_t step) {
    const DigitImages batch = batches.batch(step, rank);
    const at::Tensor loss = loss_of(model(batch.pixels), batch);
    loss.backward();  // averages the gradients over the ranks
    epoch_loss += loss.item<double>() / per_epoch;
    if (rank != 0 || (step + 1) % per_epoch != 0) return;
    const std::chrono::duration<double> elapsed =
        std::chrono::steady_clock::now() - start;
    fmt::print("epoch {:2}/{}  loss {:.4f}  {:6.0f} images/s\n",
               (step + 1) / per_epoch, options.epochs, epoch_loss,
               (step + 1) * batches.images_per_step() / elapsed.count());
    std::fflush(stdout);
    epoch_loss = 0;
  });
  return net;
}

// Trains in one process: adds the gradients of all ranks in rank order and
// divides the sums.
DigitsNet train_alone(const Batches& batches, const Options& options) {
  torch::manual_seed(kSeed);
  DigitsNet net = make_net();
  train(net, options.epochs * batches.steps_per_epoch(), [&](int64_t step) {
    for (int rank = 0; rank < batches.num_ranks(); ++rank) {
      const DigitImages batch = batches.batch(step, rank);
      loss_of(net->forward(batch.pixels), batch).backward();
    }
    for (const at::Tensor& parameter : net->parameters()) {
      parameter.mutable_grad().mul_(1.0 / batches.num_ranks());
    }
  });
  return net;
}

double accuracy_percent(DigitsNet& net, const DigitImages& test) {
  const torch::NoGradGuard no_grad;
  return 100 * net->forward(test.pixels)
                   .argmax(1)
                   .eq(test.labels)
                   .to(at::kDouble)
                   .mean()
                   .item<double>();
}

bool have_same_bits(const at::Tensor& a, const at::Tensor& b) {
  return at::equal(a.detach().view(at::kInt), b.detach().view(at::kInt));
}

int run(const Options& options) {
  at::set_num_threads(1);  // reproducible sums, and one core per rank
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);

  const DigitImages digits = read_digits();
  const at::Tensor rows = shuffled_rows(digits.size(), kSeed);
  const DigitImages test = digits.select(rows.narrow(0, 0, kNumTestImages));
  const DigitImages images = digits.select(
      rows.narrow(0, kNumTestImages, digits.size() - kNumTestImages));

  GroupScope scope(group_of_launcher());
  const auto& group = scope.group();
  const Batches batches(images, options.batch_size, group->getSize(), kSeed);
  if (group->getRank() == 0) {
    fmt::print("{} training images, {} test images; {} per step on {} ranks\n",
               images.size(), test.size(), batches.images_per_step(),
               group->getSize());
    std::fflush(stdout);
  }
  DigitsNet net = train_on_all_ranks(group, batches, options);
  if (group->getRank() != 0) return 0;
  const double accuracy = accuracy_percent(net, test);
  fmt::print("test accuracy {:.2f} % (required: at least {:g} %)\n", accuracy,
             options.min_accuracy);
  DigitsNet alone = train_alone(batches, options);
  const bool is_equal = std::ranges::equal(net->parameters(),
                                           alone->parameters(), have_same_bits);
  fmt::print("weights {} those of a single process, bit for bit\n",
             is_equal ? "equal" : "DIFFER from");
  return is_equal && accuracy >= options.min_accuracy ? 0 : 1;
}

int main(int argc, char** argv) {
  Options options;
  CLI::App app{
      "Trains a small network on handwritten digits, on the ranks started by "
      "torchrun, srun or mpirun. Compares the weights with those of training "
      "in a single process."};
  app.option_defaults()->always_capture_default();
  app.add_option("--epochs", options.epochs, "Passes over the training images")
      ->check(CLI::Range(1, 10'000));
  app.add_option("--batch-size", options.batch_size,
                 "Images per step on all ranks together");
  app.add_option("--min-accuracy", options.min_accuracy,
                 "Required test accuracy in percent; exit status 1 below it");
  CLI11_PARSE(app, argc, argv);
  return run_program("digits", [&] { return run(options); });
}

}  // namespace
}  // namespace brigade::digits

int main(int argc, char** argv) { return brigade::digits::main(argc, argv); }
