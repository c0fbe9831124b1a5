// A backend that answers every collective by itself, as if N ranks held what
// this one holds.
//
// With N = 1 that is exact, and single_process_group() is made of it.  With
// N > 1 it is what a test wants of a group that needs no network
// (comm/recording_group.h): a sum over identical ranks is N times the input, an
// all-gather repeats it.
//
// What identical inputs do not determine is refused: send, receive, and a
// scatter seen by a rank that is not the root.

#ifndef BRIGADE_COMM_BACKENDS_IDENTICAL_RANKS_BACKEND_H_
#define BRIGADE_COMM_BACKENDS_IDENTICAL_RANKS_BACKEND_H_

#include <functional>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace brigade {

// What a collective looks like to the rank that launches it.
struct CollectiveCall {
  c10d::OpType type = c10d::OpType::UNKNOWN;
  std::vector<at::Tensor> inputs = {};   // what this rank contributes
  std::vector<at::Tensor> outputs = {};  // the value of the work's future
  int root = -1;                         // -1 when the operation has none
};

// Of its tensors; nothing if they are on the CPU.
std::optional<at::Device> accelerator_of(const CollectiveCall& collective);

// A collective in flight.  Its future's value is a list of tensors, which comm
// hooks rely on; on devices with streams it orders them as futures do.
class AnsweredWork final : public c10d::Work {
 public:
  AnsweredWork(int rank, const CollectiveCall& collective,
               std::chrono::milliseconds timeout);

  // Computes the answer and finishes; an exception from it finishes the work
  // with that error.
  void answer(const std::function<void()>& compute);
  void fail(std::exception_ptr error);

  // Errors: c10::DistBackendError when nobody finishes the work in time;
  // kNoTimeout means the backend's.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override;
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  const std::chrono::milliseconds timeout_;
  const std::vector<at::Tensor> outputs_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Thread safety: any thread may call; no collective is remembered.
class IdenticalRanksBackend : public c10d::Backend {
 public:
  IdenticalRanksBackend(int rank, int world_size);

  const std::string getBackendName() const override {
    return "identical ranks";
  }
  void setTimeout(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override {
    return options_;
  }

  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors,
      const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce_sparse(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceCoalescedOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce(
      std::vector<at::Tensor>& tensors,
      const c10d::ReduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> gather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::GatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> scatter(
      std::vector<at::Tensor>& outputs,
      std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      std::vector<at::Tensor>& outputs,
      std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output, at::Tensor& input,
      std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<c10d::Work> alltoall(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<c10d::Work> barrier(
      const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options,
                        bool wait_all_ranks) override;

 protected:
  // Every collective comes by here.  `compute` writes the outputs; it may run
  // now or later, on any thread.
  virtual c10::intrusive_ptr<c10d::Work> launch(CollectiveCall collective,
                                                std::function<void()> compute);

  // A minute unless set: an answer that waits for a test may never come.
  std::chrono::milliseconds timeout() const { return options_->timeout; }

 private:
  const c10::intrusive_ptr<c10d::Backend::Options> options_;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_BACKENDS_IDENTICAL_RANKS_BACKEND_H_
