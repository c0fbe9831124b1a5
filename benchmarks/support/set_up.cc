#include "brigade/benchmarks/support/set_up.h"

#include <fmt/format.h>
#include <sys/utsname.h>
#include <torch/version.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string_view>
#include <thread>

namespace brigade::benchmarks {
namespace {

// The first line that a command prints, or "unknown".
std::string output_of(const std::string& command) {
  const auto close = [](std::FILE* pipe) { pclose(pipe); };
  std::unique_ptr<std::FILE, decltype(close)> pipe(
      popen((command + " 2>/dev/null").c_str(), "r"), close);
  std::array<char, 256> line = {};
  if (!pipe || !std::fgets(line.data(), line.size(), pipe.get())) {
    return "unknown";
  }
  const std::string_view text = line.data();
  return std::string(text.substr(0, text.find('\n')));
}

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) {
      return line.substr(std::min(line.size(), line.find(':') + 2));
    }
  }
  return "unknown";
}

std::string load() {
  std::array<double, 1> average = {};
  if (getloadavg(average.data(), 1) != 1) return "unknown";
  return fmt::format("{:.1f}", average[0]);
}

std::string operating_system() {
  utsname name = {};
  if (uname(&name) != 0) return "unknown";
  return fmt::format("{} {}", name.sysname, name.release);
}

std::string command_line(int argc, char** argv) {
  std::string text = std::filesystem::path(argv[0]).filename();
  for (int i = 1; i < argc; ++i) text += fmt::format(" {}", argv[i]);
  return text;
}

}  // namespace

SetUp describe_set_up(int argc, char** argv) {
  return {
      {"CPU", fmt::format("{}, {} cores, load {}", cpu_name(),
                          std::thread::hardware_concurrency(), load())},
      {"system", operating_system()},
      {"torch", TORCH_VERSION},
      {"compiler", BRIGADE_COMPILER},
      {"commit",
       output_of("git -C '" BRIGADE_SOURCE_DIR "' describe --always --dirty")},
      {"command", command_line(argc, argv)},
  };
}

void print_set_up(int argc, char** argv) {
  for (const auto& [name, value] : describe_set_up(argc, argv)) {
    fmt::print("{}: {}\n", name, value);
  }
}

}  // namespace brigade::benchmarks
