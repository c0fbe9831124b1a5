// Shared frame of the benchmarks: the set-up that a figure depends on, times
// and their quartiles.

#ifndef BRIGADE_BENCHMARKS_SUPPORT_SET_UP_H_
#define BRIGADE_BENCHMARKS_SUPPORT_SET_UP_H_

#include <fmt/format.h>
#include <torch/version.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "brigade/bucket_sweep/sweep.h"

namespace brigade::benchmarks {

// Name and value, in the order in which they are printed.
using SetUp = std::vector<std::pair<std::string, std::string>>;

inline SetUp describe_set_up(int argc, char** argv) {
  std::string cpu = "unknown";
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) cpu = line.substr(line.find(':') + 2);
  }
  double load = 0;
  getloadavg(&load, 1);
  std::string command = argv[0];
  for (int i = 1; i < argc; ++i) command += fmt::format(" {}", argv[i]);
  return {{"CPU", fmt::format("{}, {} cores, load {:.1f}", cpu,
                              std::thread::hardware_concurrency(), load)},
          {"torch", TORCH_VERSION},
          {"compiler", BRIGADE_COMPILER},
          {"command", command}};
}

inline void print(const SetUp& set_up) {
  for (const auto& [name, value] : set_up) {
    fmt::print("{:<9} {}\n", name, value);
  }
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

// Median and quartiles.
inline std::string spread(const Samples& samples, int digits) {
  const Quartiles of = quartiles(samples);
  return fmt::format("{:.{}f} [{:.{}f}, {:.{}f}]", of.median, digits, of.p25,
                     digits, of.p75, digits);
}

}  // namespace brigade::benchmarks

#endif  // BRIGADE_BENCHMARKS_SUPPORT_SET_UP_H_
