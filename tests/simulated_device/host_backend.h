// A backend for the simulated device, as a vendor's would be for its own. Ranks
// are threads with a device each: each collective runs on a stream of the
// group's and goes through the host, where it waits for its peers on a thread
// of the backend's, one after the other.

#ifndef BRIGADE_TESTS_SIMULATED_DEVICE_HOST_BACKEND_H_
#define BRIGADE_TESTS_SIMULATED_DEVICE_HOST_BACKEND_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/tests/support/identical_ranks_backend.h"

namespace brigade::testing {

class HostBackend final : public c10d::Backend {
 public:
  explicit HostBackend(const BackendPlace& place);
  // Waits for all that was launched.
  ~HostBackend() override;

  const std::string getBackendName() const override { return "host"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors,
      const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output, at::Tensor& input,
      std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override;

  // Waits for its peers', as NCCL's communicators may.
  void shutdown() override;

 private:
  using Tensors = std::vector<at::Tensor>;
  using Collective = std::function<c10::intrusive_ptr<c10d::Work>(
      Tensors& outputs, Tensors& inputs)>;
  // Calls `launch` with copies of both on the host.
  c10::intrusive_ptr<c10d::Work> run(const Tensors& outputs,
                                     const Tensors& inputs,
                                     const Collective& launch);
  void enqueue(std::function<void()> collective);
  void run_all();

  const c10::intrusive_ptr<Options> options_;
  const c10::intrusive_ptr<c10d::Backend> gloo_;
  CommunicationStreams streams_;

  std::mutex mutex_;
  std::condition_variable is_launched_;
  std::deque<std::function<void()>> launched_;  // guarded by mutex_
  bool is_over_ = false;                        // guarded by mutex_
  std::thread thread_;
};

ProcessGroupOptions with_host_backend();

// The same ranks, for tensors of their devices alone, as a group of NCCL is
// from Python.
c10::intrusive_ptr<c10d::ProcessGroup> without_cpu(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// Rank r is on device r, which is its thread's current one. Throws what the
// lowest rank that fails throws.
void run_ranks_on_devices(
    int world_size,
    const std::function<void(const c10::intrusive_ptr<c10d::ProcessGroup>&,
                             int rank)>& train);

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_SIMULATED_DEVICE_HOST_BACKEND_H_
