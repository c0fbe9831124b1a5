// Test helpers for checkpoints: files and error texts.

#ifndef BRIGADE_TESTS_CHECKPOINT_CHECKPOINT_CHECKS_H_
#define BRIGADE_TESTS_CHECKPOINT_CHECKPOINT_CHECKS_H_

#include <c10/util/Exception.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>

namespace brigade::testing {

// Returns the text of the ValueError that `run` throws, or "no error".
inline std::string error_of(const std::function<void()>& run) {
  try {
    run();
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

inline std::string bytes_of_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_CHECKPOINT_CHECKPOINT_CHECKS_H_
