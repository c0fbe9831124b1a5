#include "brigade/comm/backends/gloo_backend.h"

#include <sys/socket.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "brigade/comm/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

bool blocks_sigpipe(const std::string& status_file) {
  std::ifstream status(status_file);
  for (std::string word; status >> word;) {
    if (word != "SigBlk:") continue;
    status >> word;
    return (std::stoull(word, nullptr, 16) >> (SIGPIPE - 1) & 1) != 0;
  }
  return false;
}

std::set<std::string> threads() {
  std::set<std::string> tasks;
  for (const auto& task :
       std::filesystem::directory_iterator("/proc/self/task")) {
    tasks.insert(task.path().string());
  }
  return tasks;
}

TEST(SigpipeBlockTest, IsInheritedByThreads) {
  bool inherited = false;
  {
    const SigpipeBlock block;
    std::thread([&] {
      inherited = blocks_sigpipe("/proc/thread-self/status");
    }).join();
  }
  EXPECT_TRUE(inherited);
  EXPECT_FALSE(blocks_sigpipe("/proc/thread-self/status"));
}

TEST(SigpipeBlockTest, AWriteToAClosedConnectionFails) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  close(ends[1]);
  ssize_t written = 0;
  int error = 0;
  {
    const SigpipeBlock block;
    std::thread([&] {
      written = write(ends[0], "x", 1);
      error = errno;
    }).join();
  }
  EXPECT_EQ(written, -1);
  EXPECT_EQ(error, EPIPE);
  close(ends[0]);
}

// Gloo writes on its own threads, which must survive a peer's death.
TEST(SigpipeBlockTest, CoversAllThreadsOfAGroup) {
  const std::set<std::string> before = threads();
  const auto group =
      make_process_group(c10::make_intrusive<c10d::HashStore>(), 0, 1);
  int num_made = 0;
  for (const std::string& thread : threads()) {
    if (before.contains(thread)) continue;
    ++num_made;
    EXPECT_TRUE(blocks_sigpipe(thread + "/status")) << thread;
  }
  EXPECT_GE(num_made, 2);
  EXPECT_FALSE(blocks_sigpipe("/proc/thread-self/status"));
}

}  // namespace
}  // namespace brigade
