// Used-parameter bitmap on a CUDA device: the host does not wait for the copy
// and may change marks during it.

#include <ATen/ATen.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/cuda.h>

#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/reducer/used_parameters.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

TEST(UsedParametersGpuTest, HostDoesNotWaitForTheCopy) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  const at::Device device(at::kCUDA, 0);
  const auto group = single_process_group();
  const c10::Stream stream =
      c10::impl::VirtualGuardImpl(at::kCUDA).getStream(device);
  std::vector<std::vector<at::Tensor>> replicas(2);
  for (std::vector<at::Tensor>& replica : replicas) {
    for (int i = 0; i < 3; ++i) {
      replica.push_back(at::ones({1}, device).requires_grad_());
    }
  }
  const ParameterTable table(replicas, {}, {});
  UsedParameters map(table, *group, /*goes_first=*/false);
  const at::Tensor matrix = at::ones({8192, 8192}, device);
  at::Tensor product = at::empty_like(matrix);
  // A first launch loads kernels and pins memory, which may wait.
  at::mm_out(product, matrix, matrix);
  map.launch(/*on_zeros=*/false);
  map.counts();

  for (int s = 0; s < 2; ++s) {
    stream.synchronize();
    map.mark(0);  // parameter 0 of replica 0
    map.mark(3);  // and of replica 1
    map.mark(4);
    // Seconds of work before the copy.
    for (int i = 0; i < 60; ++i) at::mm_out(product, matrix, matrix);
    ASSERT_FALSE(stream.query());
    map.launch(/*on_zeros=*/false);
    EXPECT_FALSE(stream.query()) << "launch() has waited for the device";
    map.clear_marks();
    map.mark(2);  // of the next iteration; not in this all-reduce
    EXPECT_FALSE(stream.query());
    EXPECT_TRUE(at::equal(map.counts(), at::tensor({2, 1, 0}, at::kInt)));
    map.clear_marks();
  }
}

}  // namespace
}  // namespace brigade
