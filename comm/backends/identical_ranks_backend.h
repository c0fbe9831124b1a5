// A backend that answers every collective by itself, as if N ranks held the
// values that this one holds: a sum is N times the input, an all-gather repeats
// it.
//
// With N = 1 that is exact, and single_process_group() is made of it. With N >
// 1 it serves tests without a network (comm/recording_group.h). It refuses what
// identical inputs do not determine: send, receive, and a scatter on a rank
// that is not the root.

#ifndef BRIGADE_COMM_BACKENDS_IDENTICAL_RANKS_BACKEND_H_
#define BRIGADE_COMM_BACKENDS_IDENTICAL_RANKS_BACKEND_H_

#include <functional>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace brigade {

// A collective as the rank that launches it sees it.
struct CollectiveCall {
  c10d::OpType type = c10d::OpType::UNKNOWN;
  std::vector<at::Tensor> inputs = {};   // contributed by this rank
  std::vector<at::Tensor> outputs = {};  // the value of the work's future
};

// Returns the device of its tensors; nothing if they are on the CPU.
std::optional<at::Device> accelerator_of(const CollectiveCall& collective);

// A collective in flight. Its future's value is a list of tensors, which comm
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

// Thread safety: any thread.
class IdenticalRanksBackend : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  IdenticalRanksBackend(int rank, int world_size);

  const std::string getBackendName() const override {
    return "identical ranks";
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    options_->timeout = timeout;
  }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override {
    return options_;
  }

  WorkPtr broadcast(Tensors& tensors,
                    const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors,
                    const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors,
                           const c10d::AllreduceOptions& options) override {
    return allreduce(tensors, options);
  }
  WorkPtr allreduce_coalesced(
      Tensors& tensors,
      const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs,
      const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs,
      const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options,
                        bool wait_all_ranks) override {
    barrier(options)->wait();
  }

 protected:
  // Runs every collective. `compute` writes the outputs; it may run now or
  // later, on any thread.
  virtual WorkPtr launch(CollectiveCall collective,
                         std::function<void()> compute);

  // A minute unless set: an answer that waits for a test may never come.
  std::chrono::milliseconds timeout() const { return options_->timeout; }

 private:
  WorkPtr gather_parts(c10d::OpType type, const Tensors& outputs,
                       const Tensors& inputs);
  WorkPtr reduce_parts(c10d::OpType type, const Tensors& outputs,
                       const Tensors& inputs, const c10d::ReduceOp& op);

  const c10::intrusive_ptr<c10d::Backend::Options> options_;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_BACKENDS_IDENTICAL_RANKS_BACKEND_H_
