#include "brigade/comm/backends/identical_ranks_backend.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include <utility>

namespace brigade {
namespace {

using c10d::OpType;
using c10d::ReduceOp;
using Tensors = IdenticalRanksBackend::Tensors;
using WorkPtr = IdenticalRanksBackend::WorkPtr;

std::optional<at::Device> accelerator_of(const Tensors& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_cpu()) return tensor.device();
  }
  return std::nullopt;
}

std::vector<at::Device> devices_of(const Tensors& tensors) {
  const std::optional<at::Device> device = accelerator_of(tensors);
  return device ? std::vector{*device} : std::vector<at::Device>{};
}

double premultiplier(const ReduceOp& op) {
  const auto* supplement =
      dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(supplement != nullptr,
                    "PREMUL_SUM needs a factor, got none.");
  return supplement->tensor_factor.defined()
             ? supplement->tensor_factor.item<double>()
             : supplement->double_factor;
}

// `tensor` becomes the reduction of `num_ranks` tensors that are equal to it.
void reduce_in_place(at::Tensor tensor, const ReduceOp& op, int num_ranks) {
  if (tensor.is_sparse()) {
    TORCH_CHECK_VALUE(op == ReduceOp::SUM,
                      "sparse tensors can only be summed, got another "
                      "reduction.");
    tensor.copy_(tensor.coalesce().mul(num_ranks));
    return;
  }
  const bool is_bool = tensor.scalar_type() == at::kBool;
  switch (op) {
    case ReduceOp::SUM:
      if (!is_bool && num_ranks > 1) tensor.mul_(num_ranks);
      return;
    case ReduceOp::PREMUL_SUM:
      tensor.mul_(premultiplier(op) * num_ranks);
      return;
    case ReduceOp::PRODUCT:
      if (!is_bool && num_ranks > 1) tensor.pow_(num_ranks);
      return;
    case ReduceOp::BXOR:
      if (num_ranks % 2 == 0) tensor.zero_();
      return;
    case ReduceOp::AVG:
    case ReduceOp::MIN:
    case ReduceOp::MAX:
    case ReduceOp::BAND:
    case ReduceOp::BOR:
      return;
    default:
      TORCH_CHECK_VALUE(false, "unknown reduction ", static_cast<int>(op.op_),
                        ".");
  }
}

void check_count(const char* what, size_t found, size_t expected) {
  TORCH_CHECK_VALUE(found == expected, "expected ", expected, " ", what,
                    ", got ", found, ".");
}

void check_numel(const char* what, const at::Tensor& tensor, int64_t expected) {
  TORCH_CHECK_VALUE(tensor.numel() == expected, "expected ", expected,
                    " elements in ", what, ", got ", tensor.numel(), ".");
}

// Equal parts of a contiguous tensor, flat.
Tensors flat_parts(const at::Tensor& tensor, int num_parts) {
  return tensor.view({num_parts, -1}).unbind(0);
}

// One of them. On a device reads the whole tensor, as a real backend does:
// tests of the order of streams must see that.
at::Tensor part_of_read(const at::Tensor& tensor, int num_parts, int part) {
  return flat_parts(tensor.is_cpu() ? tensor : tensor.clone(), num_parts)[part];
}

int checked_root(int64_t root, int world_size) {
  TORCH_CHECK_VALUE(root >= 0 && root < world_size,
                    "root must be a rank below ", world_size, ", got ", root,
                    ".");
  return static_cast<int>(root);
}

// The list of a collective that takes one list, of one tensor per rank.
const Tensors& one_per_rank(const char* what, const std::vector<Tensors>& lists,
                            int world_size) {
  check_count("list of tensors", lists.size(), 1);
  check_count(what, lists.front().size(), world_size);
  return lists.front();
}

std::function<void()> copy_to_all(Tensors to, at::Tensor from) {
  return [to = std::move(to), from = std::move(from)] {
    for (at::Tensor t : to) t.copy_(from);
  };
}

std::function<void()> reduce_all(Tensors tensors, const ReduceOp& op,
                                 int num_ranks) {
  return [tensors = std::move(tensors), op, num_ranks] {
    for (const at::Tensor& t : tensors) reduce_in_place(t, op, num_ranks);
  };
}

}  // namespace

std::optional<at::Device> accelerator_of(const CollectiveCall& collective) {
  const std::optional<at::Device> device = accelerator_of(collective.outputs);
  return device ? device : accelerator_of(collective.inputs);
}

AnsweredWork::AnsweredWork(int rank, const CollectiveCall& collective,
                           std::chrono::milliseconds timeout)
    : c10d::Work(rank, collective.type),
      timeout_(timeout),
      outputs_(collective.outputs),
      future_(c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()),
          devices_of(collective.outputs))) {}

void AnsweredWork::answer(const std::function<void()>& compute) {
  try {
    // As a real backend does: autograd neither records the write nor counts it.
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    compute();
  } catch (...) {
    fail(std::current_exception());
    return;
  }
  future_->markCompleted(c10::IValue(outputs_));
  finish();
}

void AnsweredWork::fail(std::exception_ptr error) {
  future_->setError(error);
  finish(std::move(error));
}

bool AnsweredWork::wait(std::chrono::milliseconds timeout) {
  const auto patience = timeout == kNoTimeout ? timeout_ : timeout;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!cv_.wait_for(lock, patience, [this] { return completed_; })) {
      C10_THROW_ERROR(DistBackendError, c10::str(c10d::opTypeToString(opType_),
                                                 " was not completed within ",
                                                 patience.count(), " ms."));
    }
    if (exception_) std::rethrow_exception(exception_);
  }
  synchronize();
  return true;
}

void AnsweredWork::synchronize() { future_->wait(); }

IdenticalRanksBackend::IdenticalRanksBackend(int rank, int world_size)
    : c10d::Backend(rank, world_size),
      options_(c10::make_intrusive<c10d::Backend::Options>(
          "identical ranks", std::chrono::minutes(1))) {}

WorkPtr IdenticalRanksBackend::launch(CollectiveCall collective,
                                      std::function<void()> compute) {
  auto work =
      c10::make_intrusive<AnsweredWork>(getRank(), collective, timeout());
  work->answer(compute);
  return work;
}

WorkPtr IdenticalRanksBackend::broadcast(
    Tensors& tensors, const c10d::BroadcastOptions& options) {
  checked_root(options.rootRank, getSize());
  return launch(
      {.type = OpType::BROADCAST, .inputs = tensors, .outputs = tensors},
      [] {});
}

WorkPtr IdenticalRanksBackend::allreduce(
    Tensors& tensors, const c10d::AllreduceOptions& options) {
  return launch(
      {.type = OpType::ALLREDUCE, .inputs = tensors, .outputs = tensors},
      reduce_all(tensors, options.reduceOp, getSize()));
}

WorkPtr IdenticalRanksBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return launch({.type = OpType::ALLREDUCE_COALESCED,
                 .inputs = tensors,
                 .outputs = tensors},
                reduce_all(tensors, options.reduceOp, getSize()));
}

WorkPtr IdenticalRanksBackend::reduce(Tensors& tensors,
                                      const c10d::ReduceOptions& options) {
  const int root = checked_root(options.rootRank, getSize());
  return launch({.type = OpType::REDUCE, .inputs = tensors, .outputs = tensors},
                reduce_all(getRank() == root ? tensors : Tensors(),
                           options.reduceOp, getSize()));
}

WorkPtr IdenticalRanksBackend::allgather(std::vector<Tensors>& outputs,
                                         Tensors& inputs,
                                         const c10d::AllgatherOptions&) {
  check_count("input", inputs.size(), 1);
  const Tensors& to = one_per_rank("outputs, one per rank", outputs, getSize());
  return launch({.type = OpType::ALLGATHER, .inputs = inputs, .outputs = to},
                copy_to_all(to, inputs[0]));
}

WorkPtr IdenticalRanksBackend::gather_parts(OpType type, const Tensors& outputs,
                                            const Tensors& inputs) {
  check_count("outputs", outputs.size(), inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_numel("an output", outputs[i], inputs[i].numel() * getSize());
  }
  return launch({.type = type, .inputs = inputs, .outputs = outputs},
                [outputs, inputs, size = getSize()] {
                  for (size_t i = 0; i < inputs.size(); ++i) {
                    for (at::Tensor part : flat_parts(outputs[i], size)) {
                      part.copy_(inputs[i].view({-1}));
                    }
                  }
                });
}

WorkPtr IdenticalRanksBackend::_allgather_base(at::Tensor& output,
                                               at::Tensor& input,
                                               const c10d::AllgatherOptions&) {
  return gather_parts(OpType::_ALLGATHER_BASE, {output}, {input});
}

WorkPtr IdenticalRanksBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions&) {
  return gather_parts(OpType::COALESCED, outputs, inputs);
}

WorkPtr IdenticalRanksBackend::gather(std::vector<Tensors>& outputs,
                                      Tensors& inputs,
                                      const c10d::GatherOptions& options) {
  const int root = checked_root(options.rootRank, getSize());
  check_count("input", inputs.size(), 1);
  const Tensors to = getRank() == root ? one_per_rank("outputs, one per rank",
                                                      outputs, getSize())
                                       : Tensors();
  return launch({.type = OpType::GATHER, .inputs = inputs, .outputs = to},
                copy_to_all(to, inputs[0]));
}

WorkPtr IdenticalRanksBackend::scatter(Tensors& outputs,
                                       std::vector<Tensors>& inputs,
                                       const c10d::ScatterOptions& options) {
  const int root = checked_root(options.rootRank, getSize());
  check_count("output", outputs.size(), 1);
  TORCH_CHECK_NOT_IMPLEMENTED(
      getRank() == root, "rank ", getRank(),
      " can't know what identical ranks scatter from root ", root,
      "; use the root's rank.");
  const Tensors& from = one_per_rank("inputs, one per rank", inputs, getSize());
  return launch({.type = OpType::SCATTER, .inputs = from, .outputs = outputs},
                copy_to_all(outputs, from[getRank()]));
}

WorkPtr IdenticalRanksBackend::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs,
    const c10d::ReduceScatterOptions& options) {
  check_count("output", outputs.size(), 1);
  const Tensors& terms =
      one_per_rank("inputs, one per rank", inputs, getSize());
  return launch(
      {.type = OpType::REDUCE_SCATTER, .inputs = terms, .outputs = outputs},
      [to = outputs[0], from = terms[getRank()], op = options.reduceOp,
       size = getSize()] {
        to.copy_(from);
        reduce_in_place(to, op, size);
      });
}

WorkPtr IdenticalRanksBackend::reduce_parts(OpType type, const Tensors& outputs,
                                            const Tensors& inputs,
                                            const ReduceOp& op) {
  check_count("outputs", outputs.size(), inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_numel("an input", inputs[i], outputs[i].numel() * getSize());
  }
  return launch(
      {.type = type, .inputs = inputs, .outputs = outputs},
      [outputs, inputs, op, rank = getRank(), size = getSize()] {
        for (size_t i = 0; i < inputs.size(); ++i) {
          outputs[i].view({-1}).copy_(part_of_read(inputs[i], size, rank));
          reduce_in_place(outputs[i], op, size);
        }
      });
}

WorkPtr IdenticalRanksBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input,
    const c10d::ReduceScatterOptions& options) {
  return reduce_parts(OpType::_REDUCE_SCATTER_BASE, {output}, {input},
                      options.reduceOp);
}

WorkPtr IdenticalRanksBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs,
    const c10d::ReduceScatterOptions& options) {
  return reduce_parts(OpType::COALESCED, outputs, inputs, options.reduceOp);
}

// Every peer sends this rank what this rank sends to itself.
WorkPtr IdenticalRanksBackend::alltoall_base(
    at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits, const c10d::AllToAllOptions&) {
  const auto parts = [size = getSize()](const at::Tensor& tensor,
                                        const std::vector<int64_t>& splits) {
    if (!splits.empty()) return tensor.split_with_sizes(splits);
    TORCH_CHECK_VALUE(tensor.size(0) % size == 0, "expected a multiple of ",
                      size, " rows, got ", tensor.size(0), ".");
    return tensor.split(tensor.size(0) / size);
  };
  const Tensors from = parts(input, input_splits);
  const Tensors to = parts(output, output_splits);
  check_count("parts of the input, one per rank", from.size(), getSize());
  check_count("parts of the output, one per rank", to.size(), getSize());
  for (const at::Tensor& part : to) {
    check_numel("a part of the output", part, from[getRank()].numel());
  }
  return launch(
      {.type = OpType::ALLTOALL_BASE, .inputs = {input}, .outputs = {output}},
      copy_to_all(to, from[getRank()]));
}

WorkPtr IdenticalRanksBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                        const c10d::AllToAllOptions&) {
  check_count("inputs, one per rank", inputs.size(), getSize());
  check_count("outputs, one per rank", outputs.size(), getSize());
  return launch(
      {.type = OpType::ALLTOALL, .inputs = inputs, .outputs = outputs},
      copy_to_all(outputs, inputs[getRank()]));
}

WorkPtr IdenticalRanksBackend::barrier(const c10d::BarrierOptions&) {
  return launch({.type = OpType::BARRIER}, [] {});
}

}  // namespace brigade
