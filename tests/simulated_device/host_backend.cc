#include "brigade/tests/simulated_device/host_backend.h"

#include <c10/core/DeviceGuard.h>

#include <future>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "brigade/comm/backends/device_backend.h"
#include "brigade/comm/backends/gloo_backend.h"
#include "brigade/tests/support/simulated_device/stream_test.h"

namespace brigade::testing {
namespace {

std::vector<at::Tensor> on_host(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& tensor : tensors) copies.push_back(tensor.cpu());
  return copies;
}

}  // namespace

HostBackend::HostBackend(const BackendPlace& place)
    : c10d::Backend(place.rank, place.world_size),
      options_(c10::make_intrusive<Options>("host", place.timeout)),
      gloo_(make_gloo_backend(place.store, place.rank, place.world_size,
                              place.timeout)),
      thread_([this] { run_all(); }) {}

HostBackend::~HostBackend() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_over_ = true;
  }
  is_launched_.notify_one();
  thread_.join();
}

void HostBackend::run_all() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    is_launched_.wait(lock, [this] { return is_over_ || !launched_.empty(); });
    if (launched_.empty()) return;
    const std::function<void()> next = std::move(launched_.front());
    launched_.pop_front();
    lock.unlock();
    next();
    lock.lock();
  }
}

c10::intrusive_ptr<c10d::Work> HostBackend::allreduce(
    Tensors& tensors, const c10d::AllreduceOptions& options) {
  return run(tensors, tensors,
             [=, this](Tensors& outputs, Tensors& /*inputs*/) {
               return gloo_->allreduce(outputs, options);
             });
}

c10::intrusive_ptr<c10d::Work> HostBackend::broadcast(
    Tensors& tensors, const c10d::BroadcastOptions& options) {
  return run(tensors, tensors,
             [=, this](Tensors& outputs, Tensors& /*inputs*/) {
               return gloo_->broadcast(outputs, options);
             });
}

c10::intrusive_ptr<c10d::Work> HostBackend::allgather(
    std::vector<Tensors>& outputs, Tensors& inputs,
    const c10d::AllgatherOptions& options) {
  return run(outputs[0], inputs, [=, this](Tensors& there, Tensors& from) {
    std::vector<Tensors> by_rank = {there};
    return gloo_->allgather(by_rank, from, options);
  });
}

c10::intrusive_ptr<c10d::Work> HostBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input,
    const c10d::AllgatherOptions& options) {
  return run({output}, {input}, [=, this](Tensors& outputs, Tensors& inputs) {
    return gloo_->_allgather_base(outputs[0], inputs[0], options);
  });
}

c10::intrusive_ptr<c10d::Work> HostBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input,
    const c10d::ReduceScatterOptions& options) {
  return run({output}, {input}, [=, this](Tensors& outputs, Tensors& inputs) {
    auto work = gloo_->allreduce(inputs, {.reduceOp = options.reduceOp});
    work->wait();
    outputs[0].copy_(inputs[0].chunk(getSize())[getRank()]);
    return work;
  });
}

c10::intrusive_ptr<c10d::Work> HostBackend::alltoall_base(
    at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  return run({output}, {input}, [=, this](Tensors& outputs, Tensors& inputs) {
    std::vector<int64_t> sent = input_splits;
    std::vector<int64_t> received = output_splits;
    return gloo_->alltoall_base(outputs[0], inputs[0], received, sent, options);
  });
}

void HostBackend::shutdown() {
  const auto ended = std::make_shared<std::promise<void>>();
  enqueue([this, ended] {
    c10d::BarrierOptions options;
    options.timeout = std::chrono::seconds(20);
    try {
      gloo_->barrier(options)->wait();
      ended->set_value();
    } catch (...) {
      ended->set_exception(std::current_exception());
    }
  });
  ended->get_future().get();
}

void HostBackend::enqueue(std::function<void()> collective) {
  const std::lock_guard<std::mutex> lock(mutex_);
  launched_.push_back(std::move(collective));
  is_launched_.notify_one();
}

c10::intrusive_ptr<c10d::Work> HostBackend::run(const Tensors& outputs,
                                                const Tensors& inputs,
                                                const Collective& launch) {
  auto work = c10::make_intrusive<AnsweredWork>(
      CollectiveCall{.inputs = inputs, .outputs = outputs});
  Tensors kept = outputs;
  kept.insert(kept.end(), inputs.begin(), inputs.end());
  auto launched = std::make_shared<c10::Event>(
      CommunicationStreams::record_launch(outputs[0].device()));
  enqueue([=, this] {
    streams_.run(*launched, kept, [&] {
      work->answer([&] {
        Tensors there = on_host(outputs);
        Tensors from = on_host(inputs);
        launch(there, from)->wait();
        for (size_t i = 0; i < outputs.size(); ++i) outputs[i].copy_(there[i]);
      });
    });
  });
  return work;
}

ProcessGroupOptions with_host_backend() {
  return {.device_type = at::kPrivateUse1,
          .make_backend = [](const BackendPlace& place) {
            return c10::make_intrusive<HostBackend>(place);
          }};
}

c10::intrusive_ptr<c10d::ProcessGroup> without_cpu(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  constexpr auto kType = c10d::ProcessGroup::BackendType::CUSTOM;
  auto made = c10::make_intrusive<c10d::ProcessGroup>(
      group->getStore(), group->getRank(), group->getSize());
  made->setBackend(at::kPrivateUse1, kType,
                   group->getBackend(at::kPrivateUse1));
  made->setDefaultBackend(kType);
  made->setGroupName("devices alone");
  remember_make_backend(made, at::kPrivateUse1,
                        with_host_backend().make_backend);
  return made;
}

void run_ranks_on_devices(
    int world_size,
    const std::function<void(const c10::intrusive_ptr<c10d::ProcessGroup>&,
                             int rank)>& train) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::future<void>> ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    ranks.push_back(std::async(std::launch::async, [&, rank] {
      const c10::DeviceGuard on_own(simulated::device(rank));
      const GroupScope scope(
          make_process_group(store, rank, world_size, with_host_backend()));
      train(scope.group(), rank);
    }));
  }
  for (const auto& rank : ranks) rank.wait();
  for (auto& rank : ranks) rank.get();
}

}  // namespace brigade::testing
