// Backend of the simulated device, in the role of a vendor's backend.
//
// Ranks are threads with one device each. A collective runs on a stream of the
// group and goes through the host, where the backend's thread waits for the
// peers, one collective at a time.

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
  // Waits for all launched collectives.
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

  // Waits for the peers' shutdown(), as NCCL communicators may.
  void shutdown() override;

 private:
  using Tensors = std::vector<at::Tensor>;
  using Collective = std::function<c10::intrusive_ptr<c10d::Work>(
      Tensors& outputs, Tensors& inputs)>;
  // Calls `launch` with host copies of both.
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

// Makes a group of the same ranks for device tensors only, like an NCCL group
// in Python.
c10::intrusive_ptr<c10d::ProcessGroup> without_cpu(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// Calls `train` on one thread per rank, with device r current on rank r. Throws
// the exception of the lowest rank that failed.
void run_ranks_on_devices(
    int world_size,
    const std::function<void(const c10::intrusive_ptr<c10d::ProcessGroup>&,
                             int rank)>& train);

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_SIMULATED_DEVICE_HOST_BACKEND_H_
