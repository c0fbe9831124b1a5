// What a test asks of checkpoints' files and errors.

#ifndef BRIGADE_TESTS_FSDP_CHECKPOINT_CHECKS_H_
#define BRIGADE_TESTS_FSDP_CHECKPOINT_CHECKS_H_

#include <c10/util/Exception.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>

namespace brigade::testing {

// Of the ValueError that it throws.
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

#endif  // BRIGADE_TESTS_FSDP_CHECKPOINT_CHECKS_H_
