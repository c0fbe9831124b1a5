// Gradients that are summed in the order of the ranks on a device: those that
// ranks on CPUs get, to the last bit.

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/simulated_device/host_backend.h"
#include "brigade/tests/support/local_ranks.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using testing::run_ranks_on_devices;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Tensors = std::vector<at::Tensor>;

constexpr int kSteps = 3;
// Of the gradients; what a number of ranks divides and what it does not.
constexpr int64_t kNumels[] = {7, 64, 1, 300, 12};

at::Tensor values(int rank, int step, int64_t numel, at::ScalarType dtype) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(
      static_cast<uint64_t>(10000 * rank + 100 * step) +
      static_cast<uint64_t>(numel));
  return at::randn({numel}, generator, at::TensorOptions(dtype)) *
         (rank % 2 == 0 ? 1 : 1000);
}

// Each step's, copied to the host when all is over.
std::vector<Tensors> train(const Group& group, c10::Device device,
                           at::ScalarType dtype,
                           const ReducerOptions& options) {
  Tensors parameters;
  for (const int64_t numel : kNumels) {
    parameters.push_back(
        at::ones({numel}, at::TensorOptions(dtype).device(device))
            .requires_grad_());
  }
  Reducer reducer(parameters, group, options);
  std::vector<Tensors> found(kSteps);
  for (int step = 0; step < kSteps; ++step) {
    at::Tensor loss = at::zeros({}, at::TensorOptions(dtype).device(device));
    for (const at::Tensor& parameter : parameters) {
      loss =
          loss +
          (parameter *
           values(group->getRank(), step, parameter.numel(), dtype).to(device))
              .sum();
    }
    loss = at::real(loss);
    reducer.prepare_for_backward(loss);
    loss.backward();
    for (const at::Tensor& parameter : parameters) {
      found[step].push_back(parameter.grad().detach().clone());
      parameter.mutable_grad().reset();
    }
  }
  for (Tensors& gradients : found) {
    for (at::Tensor& gradient : gradients) gradient = gradient.cpu();
  }
  return found;
}

class ReproducibleOnDevicesTest
    : public simulated::StreamTest,
      public ::testing::WithParamInterface<std::tuple<int, at::ScalarType>> {};

TEST_P(ReproducibleOnDevicesTest, BitsAreThoseOfTheCpu) {
  const auto [world_size, dtype] = GetParam();
  for (int row_size = 1; row_size <= world_size; ++row_size) {
    if (world_size % row_size != 0) continue;
    SCOPED_TRACE(absl::StrCat("rows of ", row_size));
    ReducerOptions options;
    options.reproducible = true;
    options.reproducible_row_size = row_size;
    std::mutex mutex;
    std::map<int, std::vector<Tensors>> expected;  // by rank
    testing::run_ranks(world_size, [&](const Group& group) {
      auto found = train(group, at::kCPU, dtype, options);
      const std::lock_guard<std::mutex> lock(mutex);
      expected[group->getRank()] = std::move(found);
    });
    for (const int64_t cap_bytes : {64, 1 << 20}) {
      for (const bool is_view : {false, true}) {
        options.bucket_caps_bytes = {cap_bytes};
        options.gradient_as_bucket_view = is_view;
        run_ranks_on_devices(world_size, [&](const Group& group, int rank) {
          const auto found =
              train(group, simulated::device(rank), dtype, options);
          for (int step = 0; step < kSteps; ++step) {
            for (size_t i = 0; i < std::size(kNumels); ++i) {
              EXPECT_TRUE(at::equal(found[step][i], expected[rank][step][i]))
                  << "rank " << rank << ", step " << step << ", gradient " << i;
            }
          }
        });
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Ranks, ReproducibleOnDevicesTest,
    ::testing::Combine(::testing::Values(1, 2, 3, 4),
                       ::testing::Values(at::kFloat, at::kDouble, at::kHalf,
                                         at::kBFloat16, at::kComplexFloat)));

}  // namespace
}  // namespace brigade
