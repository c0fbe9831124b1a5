#include "brigade/examples/digits/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace brigade::digits {
namespace {

// Leaves the average of the ranks' gradients in the network.
void average_gradients(DigitsNet& net, const Batches::Epoch& epoch,
                       int64_t step, int num_ranks) {
  const float share = 1.0F / static_cast<float>(num_ranks);
  std::vector<at::Tensor> sums;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const DigitImages batch = epoch.batch(step, rank);
    net->zero_grad();
    torch::nn::functional::cross_entropy(net->forward(batch.pixels),
                                         batch.labels)
        .backward();
    std::vector<at::Tensor> gradients = gradients_of(net);
    for (size_t i = 0; i < gradients.size(); ++i) {
      gradients[i].mul_(share);
      if (rank > 0) sums[i].add_(gradients[i]);
    }
    if (rank == 0) sums = std::move(gradients);
  }
  const std::vector<at::Tensor> parameters = net->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].mutable_grad() = sums[i];
  }
}

}  // namespace

Reference train_reference(const Batches& batches,
                          const TrainingOptions& options,
                          const std::function<void(int64_t)>& after_step) {
  torch::manual_seed(options.seed);
  Reference reference;
  DigitsNet& net = reference.net;
  torch::optim::SGD optimizer = make_optimizer(net, options);
  const int64_t num_steps = options.epochs * batches.steps_per_epoch();
  int64_t step = 0;
  for (int64_t number = 0; number < options.epochs; ++number) {
    const Batches::Epoch epoch = batches.epoch(number);
    for (int64_t i = 0; i < batches.steps_per_epoch(); ++i, ++step) {
      average_gradients(net, epoch, i, batches.num_ranks());
      if (step == 0) reference.first_gradients = gradients_of(net);
      set_learning_rate(optimizer, options, step, num_steps);
      optimizer.step();
      after_step(step + 1);
    }
  }
  return reference;
}

std::vector<at::Tensor> gradients_of(const DigitsNet& net) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : net->parameters()) {
    gradients.push_back(parameter.grad().clone());
  }
  return gradients;
}

bool equal_bits(const std::vector<at::Tensor>& a,
                const std::vector<at::Tensor>& b) {
  const auto same = [](const at::Tensor& x, const at::Tensor& y) {
    return at::equal(x.detach().view(at::kInt), y.detach().view(at::kInt));
  };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), same);
}

double distance_in_ulp(const std::vector<at::Tensor>& actual,
                       const std::vector<at::Tensor>& expected) {
  double farthest = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const at::Tensor difference =
        actual[i].to(at::kDouble) - expected[i].to(at::kDouble);
    const auto largest = expected[i].abs().max().item<float>();
    const float next =
        std::nextafter(largest, std::numeric_limits<float>::infinity());
    const double ulp = static_cast<double>(next) - largest;
    const double distance = difference.abs().max().item<double>() / ulp;
    if (std::isnan(distance)) return std::numeric_limits<double>::infinity();
    farthest = std::max(farthest, distance);
  }
  return farthest;
}

}  // namespace brigade::digits
