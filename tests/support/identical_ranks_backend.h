// Backend that simulates N ranks with identical values: a sum is N times the
// input, an all-gather repeats it. Implements the collectives that brigade
// uses.

#ifndef BRIGADE_TESTS_SUPPORT_IDENTICAL_RANKS_BACKEND_H_
#define BRIGADE_TESTS_SUPPORT_IDENTICAL_RANKS_BACKEND_H_

#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace brigade {

// A collective on the launching rank.
struct CollectiveCall {
  c10d::OpType type = c10d::OpType::UNKNOWN;
  std::vector<at::Tensor> inputs = {};   // contributed by this rank
  std::vector<at::Tensor> outputs = {};  // the value of the work's future
};

// Returns the device of its tensors; nullopt for CPU tensors.
std::optional<at::Device> accelerator_of(const CollectiveCall& collective);

// A collective in flight, until answer() or fail().
class AnsweredWork final : public c10d::Work {
 public:
  explicit AnsweredWork(const CollectiveCall& collective);

  // Calls `compute`, which writes the outputs. Its exception fails the work.
  void answer(const std::function<void()>& compute);
  void fail(std::exception_ptr error) { future_->setError(std::move(error)); }

  bool wait(std::chrono::milliseconds /*timeout*/) override {
    future_->waitAndThrow();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  const std::vector<at::Tensor> outputs_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Streams for a group's collectives, one per device, like those of NCCL.
class CommunicationStreams {
 public:
  // Blocks until the devices are done.
  ~CommunicationStreams();

  // Records an event on the current stream of `device`.
  static c10::Event record_launch(c10::Device device);

  // Calls `body` with this group's stream of the device as the current one,
  // after it waits for `launch`. Keeps `tensors` until the device is done with
  // them.
  void run(const c10::Event& launch, std::vector<at::Tensor> tensors,
           const std::function<void()>& body);

 private:
  struct InFlight {
    c10::Event done;
    std::vector<at::Tensor> tensors;
  };

  std::mutex mutex_;
  // Guarded by mutex_.
  std::map<c10::DeviceIndex, c10::Stream> streams_;
  std::list<InFlight> in_flight_;
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
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override {
    return options_;
  }

  WorkPtr broadcast(Tensors& tensors,
                    const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors,
                    const c10d::AllreduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

 protected:
  // Runs a collective. `compute` writes the outputs, now or later, on any
  // thread.
  virtual WorkPtr launch(CollectiveCall collective,
                         std::function<void()> compute);

 private:
  const c10::intrusive_ptr<c10d::Backend::Options> options_;
};

}  // namespace brigade

#endif  // BRIGADE_TESTS_SUPPORT_IDENTICAL_RANKS_BACKEND_H_
