// Ranks on devices that run out of inputs at different times: what ranks on
// CPUs get, exactly.

#include <torch/torch.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/ddp/distributed_data_parallel.h"
#include "brigade/tests/simulated_device/host_backend.h"
#include "brigade/tests/support/local_ranks.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gtest/gtest.h"

namespace brigade {
namespace uneven_join_test {

using testing::run_ranks_on_devices;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Tensors = std::vector<at::Tensor>;
using Inputs = std::vector<int>;  // by rank: how many it has

// Gradients of integers; a buffer counts forwards.
struct CountingModuleImpl : torch::nn::Module {
  explicit CountingModuleImpl(c10::Device device) {
    for (const int64_t numel : {7, 64, 1, 12}) {
      register_parameter(absl::StrCat("p", numel),
                         at::ones({numel}, at::TensorOptions(device)));
    }
    seen = register_buffer("seen", at::zeros({1}, at::TensorOptions(device)));
  }

  at::Tensor forward(int rank, int step) {
    seen.add_(rank + 1);
    at::Tensor loss = at::zeros({}, seen.options());
    int64_t factor = 12 * (rank + 1) * (step + 1);
    for (const at::Tensor& parameter : parameters(/*recurse=*/false)) {
      if (leaves_out_last && rank % 2 == step % 2 && parameter.numel() == 12) {
        continue;
      }
      loss = loss + parameter.sum() * factor++;
    }
    return loss;
  }

  at::Tensor seen;
  bool leaves_out_last = false;
};
TORCH_MODULE(CountingModule);

struct Mode {
  JoinDivisor divisor;
  bool broadcasts_buffers;
  bool views;
  bool finds_unused;
};

// Parameters and the buffer, when all is over.
Tensors train(const Group& group, c10::Device device, const Inputs& inputs,
              const Mode& mode) {
  CountingModule module(device);
  module->leaves_out_last = mode.finds_unused;
  DistributedDataParallel model(
      module, group,
      {.reducer = {.bucket_caps_bytes = {64},
                   .find_unused_parameters = mode.finds_unused,
                   .gradient_as_bucket_view = mode.views},
       .broadcast_buffers = mode.broadcasts_buffers});
  const int rank = group->getRank();
  const auto train_on = [&](int num_steps) {
    for (int step = 0; step < num_steps; ++step) {
      model(rank, step).backward();
      const at::NoGradGuard no_grad;
      for (at::Tensor& parameter : module->parameters()) {
        if (parameter.grad().defined()) parameter.sub_(parameter.grad());
        parameter.mutable_grad().reset();
      }
    }
  };
  join(model, [&] { train_on(inputs[rank]); }, {.divide_by = mode.divisor});
  train_on(2);
  Tensors found = module->parameters();
  found.push_back(module->seen);
  for (at::Tensor& tensor : found) tensor = tensor.detach().cpu();
  return found;
}

class UnevenJoinTest : public simulated::StreamTest,
                       public ::testing::WithParamInterface<
                           std::tuple<Inputs, JoinDivisor, bool, bool, bool>> {
};

TEST_P(UnevenJoinTest, IsWhatCpusGet) {
  const auto& [inputs, divisor, buffers, views, finds_unused] = GetParam();
  const Mode mode = {divisor, buffers, views, finds_unused};
  const int world_size = static_cast<int>(inputs.size());
  std::mutex mutex;
  std::map<int, Tensors> expected;  // by rank
  testing::run_ranks(world_size, [&](const Group& group) {
    Tensors found = train(group, at::kCPU, inputs, mode);
    const std::lock_guard<std::mutex> lock(mutex);
    expected[group->getRank()] = std::move(found);
  });
  run_ranks_on_devices(world_size, [&](const Group& group, int rank) {
    const Tensors found = train(group, simulated::device(rank), inputs, mode);
    ASSERT_EQ(found.size(), expected[rank].size());
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(at::equal(found[i], expected[rank][i]))
          << "rank " << rank << ", tensor " << i;
    }
  });
  simulated::expect_no_races();
}

INSTANTIATE_TEST_SUITE_P(
    Modes, UnevenJoinTest,
    ::testing::Combine(
        ::testing::Values(Inputs{1, 4}, Inputs{3, 0}, Inputs{1, 3, 2}),
        ::testing::Values(JoinDivisor::kWorldSize, JoinDivisor::kRanksWithData),
        ::testing::Bool(), ::testing::Bool(), ::testing::Bool()));

}  // namespace uneven_join_test
}  // namespace brigade
