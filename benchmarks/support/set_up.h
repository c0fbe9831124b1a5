// Helpers of the C++ benchmarks: a line about the machine, and times.

#ifndef BRIGADE_BENCHMARKS_SUPPORT_SET_UP_H_
#define BRIGADE_BENCHMARKS_SUPPORT_SET_UP_H_

#include <fmt/format.h>
#include <torch/version.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "brigade/bucket_sweep/sweep.h"

namespace brigade::benchmarks {

inline void print_set_up() {
  double load = 0;
  getloadavg(&load, 1);
  fmt::print("torch {}, {} cores, load {:.1f}\n", TORCH_VERSION,
             std::thread::hardware_concurrency(), load);
  std::fflush(stdout);
}

using Samples = std::vector<double>;

template <typename Work>
double microseconds(const Work& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::micro>(
             std::chrono::steady_clock::now() - start)
      .count();
}

inline std::string spread(const Samples& samples, int digits) {
  const Quartiles of = quartiles(samples);
  return fmt::format("{:.{}f} [{:.{}f}, {:.{}f}]", of.median, digits, of.p25,
                     digits, of.p75, digits);
}

}  // namespace brigade::benchmarks

#endif  // BRIGADE_BENCHMARKS_SUPPORT_SET_UP_H_
