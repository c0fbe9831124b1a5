#include "brigade/ddp/join.h"

#include <c10/util/Exception.h>

#include <cstddef>

namespace brigade {
namespace {

class EnteredScope {
 public:
  EnteredScope(std::span<Joinable* const> joinables, JoinSession& session)
      : joinables_(joinables) {
    try {
      for (; num_entered_ < joinables.size(); ++num_entered_) {
        joinables[num_entered_]->enter(session,
                                       /*announces=*/num_entered_ == 0);
      }
    } catch (...) {
      leave();
      throw;
    }
  }
  ~EnteredScope() { leave(); }

  EnteredScope(const EnteredScope&) = delete;
  EnteredScope& operator=(const EnteredScope&) = delete;

 private:
  void leave() {
    for (size_t i = 0; i < num_entered_; ++i) joinables_[i]->leave();
  }

  const std::span<Joinable* const> joinables_;
  size_t num_entered_ = 0;
};

}  // namespace

void join(std::span<Joinable* const> joinables,
          const std::function<void()>& loop, JoinOptions options) {
  TORCH_CHECK_VALUE(!joinables.empty(),
                    "join needs at least 1 joinable, got 0.\nGive it the "
                    "DistributedDataParallel that the loop trains.");
  const auto& group = joinables.front()->joined_group();
  for (Joinable* joinable : joinables) {
    TORCH_CHECK_VALUE(
        joinable->joined_group() == group,
        "join: the joinables are of several process groups.\nJoin "
        "those of each group on its own.");
  }
  JoinSession session(group, options);
  const EnteredScope scope(joinables, session);
  loop();
  for (;;) {
    joinables.front()->meet_peers();
    if (!session.begin_shadow()) break;
    for (Joinable* joinable : joinables) {
      if (joinable != joinables.front()) joinable->meet_peers();
      joinable->shadow();
    }
  }
  const int source = session.last_rank_with_data();
  if (source < 0) return;
  for (Joinable* joinable : joinables) joinable->copy_from(source);
}

}  // namespace brigade
