#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include <vector>

#include "brigade/comm/backends/device_backend.h"
#include "brigade/comm/streams/streams.h"

namespace brigade {
namespace {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using Splits = std::vector<int64_t>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class CompletedWork final : public c10d::Work {
 public:
  explicit CompletedWork(const Tensors& outputs)
      : outputs_(outputs), future_(completed_future(outputs)) {
    finish();
  }

  bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  const Tensors outputs_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

WorkPtr done(const Tensors& outputs) {
  return c10::make_intrusive<CompletedWork>(outputs);
}

WorkPtr copied(const Tensors& outputs, const Tensors& inputs) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "expected ", inputs.size(),
                    " outputs, found ", outputs.size(), ".");
  // Like a real backend: autograd does not record the write.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (size_t i = 0; i < inputs.size(); ++i) {
    outputs[i].copy_(inputs[i].reshape(outputs[i].sizes()));
  }
  return done(outputs);
}

WorkPtr reduced(const Tensors& tensors, const c10d::ReduceOp& op) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      op != c10d::ReduceOp::PREMUL_SUM,
      "a world of 1 has no PREMUL_SUM.\nMultiply the tensor, and use SUM.");
  return done(tensors);
}

class SingleProcessBackend final : public c10d::Backend {
 public:
  SingleProcessBackend() : c10d::Backend(0, 1) {}

  const std::string getBackendName() const override { return "single process"; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions&) override {
    return done(tensors);
  }
  WorkPtr allreduce(Tensors& tensors,
                    const c10d::AllreduceOptions& options) override {
    return reduced(tensors, options.reduceOp);
  }
  WorkPtr allreduce_sparse(Tensors& tensors,
                           const c10d::AllreduceOptions& options) override {
    return reduced(tensors, options.reduceOp);
  }
  WorkPtr allreduce_coalesced(
      Tensors& tensors,
      const c10d::AllreduceCoalescedOptions& options) override {
    return reduced(tensors, options.reduceOp);
  }
  WorkPtr reduce(Tensors& tensors,
                 const c10d::ReduceOptions& options) override {
    return reduced(tensors, options.reduceOp);
  }
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions&) override {
    return copied(outputs.at(0), inputs);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions&) override {
    return copied({output}, {input});
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions&) override {
    return copied(outputs.at(0), inputs);
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions&) override {
    return copied(outputs, inputs.at(0));
  }
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    copied(outputs, inputs.at(0));
    return reduced(outputs, options.reduceOp);
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override {
    copied({output}, {input});
    return reduced({output}, options.reduceOp);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, Splits&, Splits&,
                        const c10d::AllToAllOptions&) override {
    return copied({output}, {input});
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions&) override {
    return copied(outputs, inputs);
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override { return done({}); }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_single_process_backend() {
  return c10::make_intrusive<SingleProcessBackend>();
}

}  // namespace brigade
