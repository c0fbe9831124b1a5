// What it costs to move gradients into a flat bucket buffer and out of it:
// brigade's Packer beside the ways that ATen offers.
//
// Workloads (slots x elements): 1000 x 4, 1000 x 1024, 64 x 262144 (64 MiB of
// float32), 16 x 2097152 (128 MiB).  Arguments: slots / elements.  Counters:
// ns_per_slot, and GB/s of gradients (memory moves twice that and more).
//
//   pack_cost --benchmark_repetitions=9
//       --benchmark_enable_random_interleaving=true
//
// runs all ways in turn, so that a busy machine slows all alike.  One thread
// unless OMP_NUM_THREADS says otherwise.  CUDA runs where there is a device;
// its times are of the device, from events around the calls.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/cuda.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "brigade/reducer/packing/packer.h"

namespace brigade {
namespace {

constexpr double kScale = 1.0 / 3;

// Gradients, each with memory of its own, and their bucket.
struct Workload {
  Workload(const benchmark::State& state, at::Device device,
           at::ScalarType wire_dtype)
      : num_slots(state.range(0)), numel(state.range(1)) {
    flat = at::zeros({num_slots * numel}, at::device(device).dtype(wire_dtype));
    std::vector<SlotRange> slots;
    for (int64_t i = 0; i < num_slots; ++i) {
      gradients.push_back(at::ones({numel}, device));
      addresses.push_back(gradients.back().mutable_data_ptr());
      views.push_back(flat.narrow(0, i * numel, numel));
      slots.push_back({.offset_numel = i * numel, .numel = numel});
    }
    sources.assign(addresses.begin(), addresses.end());
    packer = make_packer(device, at::kFloat, slots);
  }

  void report(benchmark::State& state) const {
    const auto iterations = static_cast<double>(state.iterations());
    const auto slots = static_cast<double>(num_slots);
    state.counters["ns_per_slot"] = benchmark::Counter(
        iterations * slots * 1e-9,
        benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
    state.counters["GB/s"] = benchmark::Counter(
        iterations * slots * static_cast<double>(numel) * sizeof(float) * 1e-9,
        benchmark::Counter::kIsRate);
  }

  int64_t num_slots;
  int64_t numel;
  at::Tensor flat;                    // 1D, [num_slots * numel]
  std::vector<at::Tensor> gradients;  // float32
  std::vector<at::Tensor> views;      // into flat, by slot
  std::vector<void*> addresses;
  std::vector<const void*> sources;
  std::unique_ptr<Packer> packer;
};

void packer_pack(Workload& load) {
  load.packer->pack(load.sources, load.flat, kScale);
}

void packer_unpack(Workload& load) {
  load.packer->unpack(load.flat, load.addresses);
}

void aten_mul_out(Workload& load) {
  const at::Tensor scale = at::native::wrapped_scalar_tensor(kScale);
  for (int64_t i = 0; i < load.num_slots; ++i) {
    at::mul_out(load.views[i], load.gradients[i], scale);
  }
}

void aten_foreach_copy_and_mul(Workload& load) {
  at::_foreach_copy_(load.views, load.gradients);
  load.flat.mul_(kScale);
}

void device_copy(Workload& load) {
  static at::Tensor other;
  if (!other.defined() || other.numel() != load.flat.numel()) {
    other = at::zeros_like(load.flat);
  }
  load.flat.copy_(other);
}

using Way = void (*)(Workload&);

void run_on_cpu(benchmark::State& state, Way way, at::ScalarType wire_dtype) {
  const c10::InferenceMode no_autograd;
  Workload load(state, at::kCPU, wire_dtype);
  way(load);
  for (auto _ : state) way(load);
  load.report(state);
}

void run_on_cuda(benchmark::State& state, Way way, at::ScalarType wire_dtype) {
  const c10::InferenceMode no_autograd;
  const at::Device device(at::kCUDA, 0);
  const c10::impl::VirtualGuardImpl cuda(at::kCUDA);
  Workload load(state, device, wire_dtype);
  const c10::Stream stream = cuda.getStream(device);
  c10::Event start(at::kCUDA, c10::EventFlag::BACKEND_DEFAULT);
  c10::Event end(at::kCUDA, c10::EventFlag::BACKEND_DEFAULT);
  way(load);
  stream.synchronize();
  for (auto _ : state) {
    start.record(stream);
    way(load);
    end.record(stream);
    end.synchronize();
    state.SetIterationTime(start.elapsedTime(end) * 1e-3);
  }
  load.report(state);
}

benchmark::internal::Benchmark* add_workloads(
    benchmark::internal::Benchmark* benchmark) {
  return benchmark->Args({1000, 4})
      ->Args({1000, 1024})
      ->Args({64, 262144})
      ->Args({16, 2097152})
      ->Unit(benchmark::kMicrosecond);
}

void register_all() {
  struct Entry {
    const char* name;
    Way way;
    at::ScalarType wire_dtype = at::kFloat;
  };
  const std::vector<Entry> common = {
      {"packer_pack", packer_pack},
      {"packer_pack_bfloat16", packer_pack, at::kBFloat16},
      {"packer_unpack", packer_unpack},
      {"aten_mul_out", aten_mul_out},
      {"aten_foreach_copy_and_mul", aten_foreach_copy_and_mul}};
  for (const Entry& entry : common) {
    add_workloads(benchmark::RegisterBenchmark(
                      (std::string("cpu/") + entry.name).c_str(),
                      [entry](benchmark::State& state) {
                        run_on_cpu(state, entry.way, entry.wire_dtype);
                      }))
        ->UseRealTime();
  }
  if (!torch::cuda::is_available()) return;
  for (const Entry& entry : common) {
    add_workloads(benchmark::RegisterBenchmark(
                      (std::string("cuda/") + entry.name).c_str(),
                      [entry](benchmark::State& state) {
                        run_on_cuda(state, entry.way, entry.wire_dtype);
                      }))
        ->UseManualTime();
  }
  add_workloads(benchmark::RegisterBenchmark("cuda/device_copy",
                                             [](benchmark::State& state) {
                                               run_on_cuda(state, device_copy,
                                                           at::kFloat);
                                             }))
      ->UseManualTime();
}

}  // namespace
}  // namespace brigade

int main(int argc, char** argv) {
  brigade::register_all();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
