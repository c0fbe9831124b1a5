#include "brigade/benchmarks/bucket_size/workloads.h"
#include "brigade/bucket_sweep/module_workload.h"
#include "brigade/examples/digits/batches.h"
#include "brigade/examples/digits/dataset.h"
#include "brigade/examples/digits/network.h"

namespace brigade::benchmarks {
namespace {

constexpr uint32_t kSeed = 1;

}  // namespace

std::unique_ptr<SweepWorkload> make_digits_workload(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    int64_t images_per_rank) {
  torch::manual_seed(kSeed);
  const digits::DigitsNet net;
  const int world_size = group->getSize();
  const digits::Batches batches(
      digits::read_digits(digits::default_data_file()),
      images_per_rank * world_size, world_size, kSeed);
  const auto loss = [batch = batches.epoch(0).batch(0, group->getRank())](
                        digits::DigitsNet& net) {
    return torch::nn::functional::cross_entropy(net->forward(batch.pixels),
                                                batch.labels);
  };
  using Digits =
      ModuleWorkload<digits::DigitsNet, std::decay_t<decltype(loss)>>;
  return std::make_unique<Digits>(net, loss, group);
}

}  // namespace brigade::benchmarks
