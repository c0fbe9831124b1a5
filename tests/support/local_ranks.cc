#include "brigade/tests/support/local_ranks.h"

#include <exception>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "brigade/comm/process_group.h"

namespace brigade::testing {

void run_ranks(
    int world_size,
    const std::function<void(c10::intrusive_ptr<c10d::ProcessGroup>)>& fn,
    std::chrono::milliseconds timeout) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::exception_ptr> failures(world_size);
  {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < world_size; ++rank) {
      ranks.emplace_back([&, rank] {
        try {
          GroupScope scope(make_process_group(store, rank, world_size,
                                              {.timeout = timeout}));
          fn(scope.group());
        } catch (...) {
          failures[rank] = std::current_exception();
        }
      });
    }
  }  // joins
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

}  // namespace brigade::testing
