#include "brigade/tests/support/local_ranks.h"

#include <c10/util/ScopeExit.h>

#include <exception>
#include <latch>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/group/group_info.h"
#include "brigade/comm/process_group.h"

namespace brigade::testing {

void run_ranks(
    int world_size,
    const std::function<void(c10::intrusive_ptr<c10d::ProcessGroup>)>& fn,
    std::chrono::milliseconds timeout) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::exception_ptr> failures(world_size);
  // A rank that leaves early would close connections that a peer is making.
  std::latch connected(world_size);
  {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < world_size; ++rank) {
      ranks.emplace_back([&, rank] {
        try {
          auto arrive = c10::make_scope_exit([&] { connected.count_down(); });
          GroupScope scope(make_process_group(store, rank, world_size,
                                              {.timeout = timeout}));
          arrive.release();
          connected.arrive_and_wait();
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

c10::intrusive_ptr<c10d::ProcessGroup> make_subgroup(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const std::string& name, const std::vector<int>& ranks) {
  const auto own = std::ranges::find(ranks, group->getRank());
  return make_process_group(
      c10::make_intrusive<c10d::PrefixStore>(
          absl::StrCat(name, absl::StrJoin(ranks, "_")), group->getStore()),
      static_cast<int>(own - ranks.begin()), static_cast<int>(ranks.size()),
      {.timeout = group_timeout(*group), .name = name});
}

}  // namespace brigade::testing
