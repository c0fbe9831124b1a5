// Runs one function on N ranks inside one test process.
//
// Each rank is a thread with a process group of its own; all of them meet at an
// in-memory store.  No port is fixed, no file is written, no environment
// variable is read, so tests may run in parallel and need neither GPU nor
// launcher.
//
// Use this for CPU logic and numerics.  Death, signals and NCCL need real
// processes: see tests/support/process_ranks.h.
//
// Idea: Gloo's BaseTest::spawn (gloo/test/base_test.h).

#ifndef BRIGADE_TESTS_SUPPORT_LOCAL_RANKS_H_
#define BRIGADE_TESTS_SUPPORT_LOCAL_RANKS_H_

#include <chrono>
#include <functional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace brigade::testing {

// Calls fn(group) on `world_size` threads and joins them.  If ranks throw, the
// exception of the lowest such rank is rethrown here, so that GoogleTest
// reports it.  A rank that never arrives fails the others after `timeout`, not
// after minutes; a rank that throws closes its connections, and its peers'
// collectives fail at once.
void run_ranks(
    int world_size,
    const std::function<void(c10::intrusive_ptr<c10d::ProcessGroup>)>& fn,
    std::chrono::milliseconds timeout = std::chrono::seconds(10));

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_SUPPORT_LOCAL_RANKS_H_
