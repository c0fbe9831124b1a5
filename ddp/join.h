// Trains on uneven inputs: ranks that have run out keep their peers company.
//
// Example:
//
//   DistributedDataParallel model(net, group);
//   join(model, [&] {
//     for (const auto& [input, target] : batches_of_this_rank) {
//       optimizer.zero_grad();
//       loss(model(input), target).backward();
//       optimizer.step();
//     }
//   });
//
// When its loop has returned, a rank launches whatever its peers launch, on
// zeros, until all loops have returned. Then every rank gets the model of the
// lowest rank that had data last. States of optimizers are not copied
// (optimizer_broadcast.h does that).
//
// Source: torch.distributed.algorithms.join. Differs: model and buffers are
// those of the lowest rank that has data, there of the highest.
//
// Thread safety: one call at a time.

#ifndef BRIGADE_DDP_JOIN_H_
#define BRIGADE_DDP_JOIN_H_

#include <functional>
#include <span>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "brigade/ddp/join_session.h"

namespace brigade {

// What join() can keep in step: something that communicates in each iteration
// of a training loop.
class Joinable {
 public:
  virtual const c10::intrusive_ptr<c10d::ProcessGroup>& joined_group()
      const = 0;

  // From here to leave(): if `announces`, call session.begin_iteration() first
  // thing in each iteration that communicates. `session` lives until leave().
  virtual void enter(JoinSession& session, bool announces) = 0;
  virtual void leave() noexcept = 0;

  // The first thing in each iteration, before the announcement: brings ranks
  // together that an error has put out of step. Collective.
  virtual void meet_peers() = 0;

  // Launches what peers launch after that in one iteration. Collective.
  virtual void shadow() = 0;

  // All ranks have run out: takes over what `rank` has. Collective.
  virtual void copy_from(int rank) = 0;

 protected:
  ~Joinable() = default;
};

// Collective. Calls `loop`, then shadows peers until their loops have returned.
// What `loop` throws passes through, and this rank shadows nobody; its peers
// learn of it as they do without join(). An error of an iteration ends join()
// on every rank: a loop that catches one and goes on trains with nobody.
//
// With several joinables, the first one announces iterations; in every
// iteration each is used, in the order of the list, one being done before the
// next one begins. A forward that will be reduced is followed by its backward.
//
// Errors: ValueError if there is no joinable, if they are of several groups, if
// a model has parameter groups, if ranks with data are to be counted under a
// comm hook that averages by itself, or if ranks give other options;
// RuntimeError if one is being joined already, if one is used before the first
// of the list, and on every rank if one runs out and training ends early; what
// the joinables throw.
void join(std::span<Joinable* const> joinables,
          const std::function<void()>& loop, JoinOptions options = {});

// The same for one model.
template <typename Model>
requires requires(Model& model) { model.joinable(); }
void join(Model& model, const std::function<void()>& loop,
          JoinOptions options = {}) {
  Joinable* const joinables[] = {&model.joinable()};
  join(std::span<Joinable* const>(joinables), loop, options);
}

}  // namespace brigade

#endif  // BRIGADE_DDP_JOIN_H_
