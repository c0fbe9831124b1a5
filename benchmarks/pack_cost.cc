// Benchmark of packing gradients into a bucket buffer and unpacking them:
// brigade's Packer against ATen operators.
//
//   pack_cost
//
// Prints a row per workload (slots x float32 elements) and method: medians and
// quartiles in microseconds, and GB/s of gradients (memory traffic is at least
// twice that). Uses one thread, and a CUDA device if there is one.

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <torch/cuda.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "brigade/benchmarks/support/set_up.h"
#include "brigade/reducer/packing/packer.h"

namespace brigade::benchmarks {
namespace {

constexpr double kScale = 1.0 / 3;
constexpr int kRounds = 15;

struct Workload {
  Workload(int64_t num_slots, int64_t numel, at::Device device,
           at::ScalarType wire_dtype)
      : flat(at::zeros({num_slots * numel},
                       at::device(device).dtype(wire_dtype))),
        other(at::zeros_like(flat)) {
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

  at::Tensor flat;
  at::Tensor other;                   // of the same size
  std::vector<at::Tensor> gradients;  // float32
  std::vector<at::Tensor> views;      // into flat, by slot
  std::vector<void*> addresses;
  std::vector<const void*> sources;
  std::unique_ptr<Packer> packer;
};

void pack(Workload& load) {
  load.packer->pack(load.sources, load.flat, kScale);
}

void aten_mul_out(Workload& load) {
  const at::Tensor scale = at::native::wrapped_scalar_tensor(kScale);
  for (size_t i = 0; i < load.views.size(); ++i) {
    at::mul_out(load.views[i], load.gradients[i], scale);
  }
}

struct Method {
  const char* name;
  void (*run)(Workload&);
  at::ScalarType wire_dtype = at::kFloat;
};

const Method kMethods[] = {
    {"pack", pack},
    {"pack to bfloat16", pack, at::kBFloat16},
    {"unpack",
     [](Workload& load) { load.packer->unpack(load.flat, load.addresses); }},
    {"mul_out of each", aten_mul_out},
    {"foreach copy and mul_",
     [](Workload& load) {
       at::_foreach_copy_(load.views, load.gradients);
       load.flat.mul_(kScale);
     }},
    {"plain copy", [](Workload& load) { load.flat.copy_(load.other); }}};

// Returns microseconds per call. Small workloads run several calls.
double time_call(const Method& method, Workload& load, int64_t bytes) {
  const auto calls = static_cast<int>(1 + (int64_t{1} << 22) / bytes);
  const auto run = [&] {
    for (int i = 0; i < calls; ++i) method.run(load);
  };
  if (load.flat.is_cpu()) return microseconds(run) / calls;
  const c10::impl::VirtualGuardImpl cuda(at::kCUDA);
  const c10::Stream stream = cuda.getStream(load.flat.device());
  c10::Event start(at::kCUDA, c10::EventFlag::BACKEND_DEFAULT);
  c10::Event end(at::kCUDA, c10::EventFlag::BACKEND_DEFAULT);
  start.record(stream);
  run();
  end.record(stream);
  end.synchronize();
  return start.elapsedTime(end) * 1e3 / calls;
}

void measure(at::Device device, int64_t num_slots, int64_t numel) {
  const int64_t bytes = num_slots * numel * static_cast<int64_t>(sizeof(float));
  std::vector<Workload> loads;
  std::vector<Samples> times(std::size(kMethods));
  for (const Method& method : kMethods) {
    loads.emplace_back(num_slots, numel, device, method.wire_dtype);
  }
  for (int round = -1; round < kRounds; ++round) {
    for (size_t i = 0; i < loads.size(); ++i) {
      const double time = time_call(kMethods[i], loads[i], bytes);
      if (round >= 0) times[i].push_back(time);
    }
  }
  fmt::print("\n{} slots x {} elements on {}\n", num_slots, numel,
             device.str());
  for (size_t i = 0; i < loads.size(); ++i) {
    fmt::print("{:<24}{:>28}{:>8.1f}\n", kMethods[i].name, spread(times[i], 1),
               static_cast<double>(bytes) * 1e-3 / quartiles(times[i]).median);
  }
}

void run() {
  at::set_num_threads(1);
  const c10::InferenceMode no_autograd;
  print_set_up();
  fmt::print("{:<24}{:>28}{:>8}\n", "method", "us", "GB/s");
  std::vector<at::Device> devices = {at::kCPU};
  if (torch::cuda::is_available()) devices.emplace_back(at::kCUDA, 0);
  for (const at::Device device : devices) {
    measure(device, 1000, 4);
    measure(device, 1000, 1024);
    measure(device, 64, 1 << 18);
    measure(device, 16, 1 << 21);
  }
}

}  // namespace
}  // namespace brigade::benchmarks

int main() { brigade::benchmarks::run(); }
