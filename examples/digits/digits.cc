// Trains a small network on handwritten digits:
//
//   torchrun --standalone --nproc-per-node 2 --no-python digits
//
// Then trains it again in one process, which computes the gradients of all
// ranks in turn, and compares the weights bit for bit.

#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <vector>

#include "brigade/ddp/distributed_data_parallel.h"
#include "brigade/examples/digits/dataset.h"
#include "brigade/examples/digits/network.h"
#include "brigade/examples/support/program.h"

namespace brigade::digits {
namespace {

constexpr int64_t kNumTestImages = 360;  // of 1,797
constexpr uint64_t kSeed = 1;  // of the split, the images' order, the weights
constexpr double kLearningRate = 0.1;  // of the first step; falls linearly

struct Options {
  int64_t epochs = 20;
  int64_t batch_size = 60;  // images per step, over all ranks
  double min_accuracy = 95;
};

// Takes `num_steps` steps. `backward(step)` leaves the gradients in `net`.
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
  // Each rank draws weights of its own; all of them get those of rank 0.
  torch::manual_seed(kSeed + rank);
  DigitsNet net;
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

// Adds the gradients of all ranks in rank order and divides the sums.
DigitsNet train_alone(const Batches& batches, const Options& options) {
  torch::manual_seed(kSeed);
  DigitsNet net;
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

bool report(bool kept, const std::string& text) {
  fmt::print("{}{}\n", kept ? "" : "FAILED: ", text);
  return kept;
}

bool report_accuracy(DigitsNet& net, const DigitImages& test,
                     double min_accuracy) {
  const torch::NoGradGuard no_grad;
  const auto correct =
      net->forward(test.pixels).argmax(1).eq(test.labels).sum().item<int64_t>();
  const double accuracy = 100.0 * correct / test.size();
  return report(accuracy >= min_accuracy,
                fmt::format("test accuracy {:.2f} % ({} of {}; promised: at "
                            "least {:g} %)",
                            accuracy, correct, test.size(), min_accuracy));
}

bool report_weights(DigitsNet& net, DigitsNet& expected) {
  const std::vector<at::Tensor> weights = net->parameters();
  const auto same_bits = [](const at::Tensor& a, const at::Tensor& b) {
    return at::equal(a.detach().view(at::kInt), b.detach().view(at::kInt));
  };
  const bool equal =
      std::ranges::equal(weights, expected->parameters(), same_bits);
  return report(equal, fmt::format("weights equal the single-process reference "
                                   "bit for bit ({} tensors)",
                                   weights.size()));
}

int run(const Options& options) {
  at::set_num_threads(1);  // sums in one order, and one core per rank
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
    fmt::print("{} images to train with, {} to test; {} per step on {} ranks\n",
               images.size(), test.size(), batches.images_per_step(),
               group->getSize());
    std::fflush(stdout);
  }
  DigitsNet net = train_on_all_ranks(group, batches, options);
  if (group->getRank() != 0) return 0;
  const bool accurate = report_accuracy(net, test, options.min_accuracy);
  DigitsNet expected = train_alone(batches, options);
  return report_weights(net, expected) && accurate ? 0 : 1;
}

int main(int argc, char** argv) {
  Options options;
  CLI::App app{
      "Trains a small network on handwritten digits, on all ranks that "
      "torchrun (or srun, or mpirun) starts, and compares the weights "
      "with those of a single process."};
  app.option_defaults()->always_capture_default();
  app.add_option("--epochs", options.epochs, "Times that every image is seen")
      ->check(CLI::Range(1, 10'000));
  app.add_option("--batch-size", options.batch_size,
                 "Images per step, over all ranks");
  app.add_option("--min-accuracy", options.min_accuracy,
                 "Percent of the test images; less is a failure");
  CLI11_PARSE(app, argc, argv);
  return run_program("digits", [&] { return run(options); });
}

}  // namespace
}  // namespace brigade::digits

int main(int argc, char** argv) { return brigade::digits::main(argc, argv); }
