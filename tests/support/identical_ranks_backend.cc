#include "brigade/tests/support/identical_ranks_backend.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <utility>

#include "brigade/comm/streams/streams.h"

namespace brigade {
namespace {

using c10d::OpType;
using Tensors = IdenticalRanksBackend::Tensors;
using WorkPtr = IdenticalRanksBackend::WorkPtr;

// Sums equal tensors; other reductions leave them unchanged.
void reduce_equal(at::Tensor tensor, const c10d::ReduceOp& op, int num_ranks) {
  if (op == c10d::ReduceOp::SUM) tensor.mul_(num_ranks);
}

// Returns the flat slices of a contiguous tensor, of `numel` elements each.
Tensors slices_of(const at::Tensor& tensor, int num_slices, int64_t numel) {
  TORCH_CHECK_VALUE(tensor.numel() == num_slices * numel, "expected ",
                    num_slices * numel, " elements, got ", tensor.numel(), ".");
  return tensor.view({num_slices, -1}).unbind(0);
}

// Reads the complete tensor on a device, like a real backend, so that race
// detection includes it.
at::Tensor read_whole(const at::Tensor& tensor) {
  return tensor.is_cpu() ? tensor : tensor.clone();
}

std::vector<at::Device> devices_of(const CollectiveCall& collective) {
  const std::optional<at::Device> device = accelerator_of(collective);
  return device ? std::vector{*device} : std::vector<at::Device>{};
}

std::function<void()> copy_to_all(Tensors to, const at::Tensor& from) {
  return [to = std::move(to), from] {
    for (const at::Tensor& tensor : to) tensor.copy_(from.view_as(tensor));
  };
}

}  // namespace

std::optional<at::Device> accelerator_of(const CollectiveCall& collective) {
  for (const Tensors* tensors : {&collective.outputs, &collective.inputs}) {
    for (const at::Tensor& tensor : *tensors) {
      if (!tensor.is_cpu()) return tensor.device();
    }
  }
  return std::nullopt;
}

AnsweredWork::AnsweredWork(const CollectiveCall& collective)
    : outputs_(collective.outputs),
      future_(c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()),
          devices_of(collective))) {}

void AnsweredWork::answer(const std::function<void()>& compute) {
  try {
    // Like a real backend: autograd does not record the write.
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    compute();
  } catch (...) {
    return fail(std::current_exception());
  }
  future_->markCompleted(c10::IValue(outputs_));
}

CommunicationStreams::~CommunicationStreams() {
  for (const InFlight& collective : in_flight_) collective.done.synchronize();
}

c10::Event CommunicationStreams::record_launch(c10::Device device) {
  c10::Event launch(device.type());
  launch.record(current_stream(device));
  return launch;
}

void CommunicationStreams::run(const c10::Event& launch, Tensors tensors,
                               const std::function<void()>& body) {
  const c10::Device device = launch.device();
  std::unique_lock<std::mutex> lock(mutex_);
  auto known = streams_.find(device.index());
  if (known == streams_.end()) {
    known = streams_.emplace(device.index(), side_stream(device)).first;
  }
  const c10::Stream stream = known->second;
  lock.unlock();
  const c10::StreamGuard on_stream(stream);
  // The inputs are ready on the launching stream.
  launch.block(stream);
  body();
  c10::Event done(stream.device_type());
  done.record(stream);
  lock.lock();
  // The tensors' own streams do not wait for this one: keeps the tensors until
  // the device is done.
  in_flight_.remove_if(
      [](const InFlight& collective) { return collective.done.query(); });
  in_flight_.push_back(
      {.done = std::move(done), .tensors = std::move(tensors)});
}

IdenticalRanksBackend::IdenticalRanksBackend(int rank, int world_size)
    : c10d::Backend(rank, world_size),
      options_(c10::make_intrusive<c10d::Backend::Options>(
          "identical ranks", std::chrono::minutes(1))) {}

WorkPtr IdenticalRanksBackend::launch(CollectiveCall collective,
                                      std::function<void()> compute) {
  auto work = c10::make_intrusive<AnsweredWork>(collective);
  work->answer(compute);
  return work;
}

WorkPtr IdenticalRanksBackend::broadcast(Tensors& tensors,
                                         const c10d::BroadcastOptions&) {
  return launch({OpType::BROADCAST, tensors, tensors}, [] {});
}

WorkPtr IdenticalRanksBackend::allreduce(
    Tensors& tensors, const c10d::AllreduceOptions& options) {
  return launch({OpType::ALLREDUCE, tensors, tensors},
                [tensors, op = options.reduceOp, size = getSize()] {
                  for (const at::Tensor& t : tensors) reduce_equal(t, op, size);
                });
}

WorkPtr IdenticalRanksBackend::allgather(std::vector<Tensors>& outputs,
                                         Tensors& inputs,
                                         const c10d::AllgatherOptions&) {
  return launch({OpType::ALLGATHER, inputs, outputs[0]},
                copy_to_all(outputs[0], inputs[0]));
}

WorkPtr IdenticalRanksBackend::_allgather_base(at::Tensor& output,
                                               at::Tensor& input,
                                               const c10d::AllgatherOptions&) {
  return launch(
      {OpType::_ALLGATHER_BASE, {input}, {output}},
      copy_to_all(slices_of(output, getSize(), input.numel()), input));
}

WorkPtr IdenticalRanksBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input,
    const c10d::ReduceScatterOptions& options) {
  slices_of(input, getSize(), output.numel());
  return launch(
      {OpType::_REDUCE_SCATTER_BASE, {input}, {output}},
      [output, input, op = options.reduceOp, rank = getRank(),
       size = getSize()] {
        const int64_t numel = output.numel();
        output.view(-1).copy_(slices_of(read_whole(input), size, numel)[rank]);
        reduce_equal(output, op, size);
      });
}

// Each peer sends the slice that this rank has for itself.
WorkPtr IdenticalRanksBackend::alltoall_base(at::Tensor& output,
                                             at::Tensor& input,
                                             std::vector<int64_t>&,
                                             std::vector<int64_t>&,
                                             const c10d::AllToAllOptions&) {
  const int64_t numel = input.numel() / getSize();
  return launch({OpType::ALLTOALL_BASE, {input}, {output}},
                copy_to_all(slices_of(output, getSize(), numel),
                            slices_of(input, getSize(), numel)[getRank()]));
}

WorkPtr IdenticalRanksBackend::barrier(const c10d::BarrierOptions&) {
  return launch({.type = OpType::BARRIER}, [] {});
}

}  // namespace brigade
