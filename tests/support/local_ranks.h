// Ranks as threads of one test process, each with its own process group,
// connected through an in-memory store. Tests may run in parallel and need no
// launcher.
//
// For CPU logic and numerics. Death, signals and NCCL need processes
// (tests/support/process_ranks.h).
//
// Idea: Gloo's BaseTest::spawn (gloo/test/base_test.h).

#ifndef BRIGADE_TESTS_SUPPORT_LOCAL_RANKS_H_
#define BRIGADE_TESTS_SUPPORT_LOCAL_RANKS_H_

#include <chrono>
#include <functional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace brigade::testing {

// Calls fn(group) on `world_size` threads and joins them. Rethrows the
// exception of the lowest rank that threw. A rank that throws closes its
// connections, so that its peers' collectives fail at once.
void run_ranks(
    int world_size,
    const std::function<void(c10::intrusive_ptr<c10d::ProcessGroup>)>& fn,
    std::chrono::milliseconds timeout = std::chrono::seconds(10));

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_SUPPORT_LOCAL_RANKS_H_
