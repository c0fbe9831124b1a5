#include "brigade/benchmarks/bucket_size/workload.h"
#include "brigade/examples/digits/batches.h"
#include "brigade/examples/digits/dataset.h"
#include "brigade/examples/digits/network.h"
#include "brigade/examples/digits/reference.h"

namespace brigade::benchmarks {
namespace {

constexpr uint32_t kSeed = 1;
constexpr double kMaxUlp =
    4;  // with more than two ranks, sums are rounded anew

class DigitsWorkload : public Workload {
 public:
  DigitsWorkload(c10::intrusive_ptr<c10d::ProcessGroup> group,
                 int64_t images_per_rank) {
    torch::manual_seed(kSeed);
    net_ = digits::DigitsNet();
    parameters_ = net_->parameters();

    const int world_size = group->getSize();
    const digits::DigitImages all =
        digits::read_digits(digits::default_data_file());
    const digits::Batches batches(all, images_per_rank * world_size, world_size,
                                  kSeed);
    batch_ = batches.epoch(0).batch(0, group->getRank());

    set_up_step();
    forward().backward();
    averages_ = digits::gradients_of(net_);
    for (at::Tensor& gradient : averages_) {
      gradient.mul_(1.0F / static_cast<float>(world_size));
      std::vector<at::Tensor> sum = {gradient};
      group->allreduce(sum)->wait();
    }
  }

  const std::vector<at::Tensor>& parameters() const override {
    return parameters_;
  }
  void set_up_step() override { net_->zero_grad(); }
  at::Tensor forward() override {
    return torch::nn::functional::cross_entropy(net_->forward(batch_.pixels),
                                                batch_.labels);
  }
  bool gradients_are_averages() const override {
    return digits::distance_in_ulp(digits::gradients_of(net_), averages_) <=
           kMaxUlp;
  }

 private:
  digits::DigitsNet net_{nullptr};
  std::vector<at::Tensor> parameters_;
  digits::DigitImages batch_;
  std::vector<at::Tensor> averages_;
};

}  // namespace

std::unique_ptr<Workload> make_digits_workload(
    c10::intrusive_ptr<c10d::ProcessGroup> group, int64_t images_per_rank) {
  return std::make_unique<DigitsWorkload>(std::move(group), images_per_rank);
}

}  // namespace brigade::benchmarks
