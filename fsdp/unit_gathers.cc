#include "brigade/fsdp/unit_gathers.h"

#include <algorithm>
#include <utility>

namespace brigade {

UnitGathers::UnitGathers(std::vector<Unit>& units, ShardTransport& transport,
                         MemoryPool& pool, size_t depth)
    : units_(units),
      transport_(transport),
      pool_(pool),
      schedule_(units.size(), depth),
      gathers_(units.size()) {
  for (Unit& unit : units_) {
    for (const auto& segment : unit.segments) {
      if (is_local(*segment)) segment->bind(segment->shard().view(at::kByte));
    }
  }
}

UnitGathers::~UnitGathers() {
  const auto keep = [](const Gather& gather) {
    if (!gather.future || gather.future->completed()) return;
    gather.future->addCallback(
        [memory = gather.memory](c10::ivalue::Future&) {},
        /*uses_future=*/false);
  };
  for (const auto& of_unit : gathers_) std::ranges::for_each(of_unit, keep);
  std::ranges::for_each(unread_, keep);
}

// Every rank holds all of it, as it is used.
bool UnitGathers::is_local(const Segment& segment) const {
  return transport_.num_shards() == 1 &&
         segment.whole_dtype() == segment.dtype();
}

void UnitGathers::begin(std::vector<size_t> expected) {
  release_unneeded();
  launch_all(schedule_.begin(std::move(expected)));
}

void UnitGathers::need(size_t unit, std::span<const size_t> ahead,
                       const std::function<void()>& ask) {
  if (schedule_.is_claimed(unit)) return;
  const GatherStep step = schedule_.needs(unit, ahead);
  launch_all(step.launch);
  if (step.is_late) {
    try {
      ask();
    } catch (...) {
      schedule_.released(unit);
      throw;
    }
    launch(unit);
  }
  auto& segments = units_[unit].segments;
  size_t index = 0;
  for (Gather& gather : gathers_[unit]) {
    while (is_local(*segments[index])) ++index;
    finish(gather);
    segments[index]->bind(gather.memory);
    segments[index]->set_bound_version(gather.version);
    ++index;
  }
}

void UnitGathers::release(size_t unit) {
  if (!schedule_.is_there(unit)) return;
  for (const auto& segment : units_[unit].segments) {
    if (!is_local(*segment) && segment->is_bound()) segment->unbind();
  }
  for (Gather& gather : std::exchange(gathers_[unit], {})) {
    reclaim(std::move(gather));
  }
  schedule_.released(unit);
}

void UnitGathers::launch_rest() { launch_all(schedule_.rest()); }

bool UnitGathers::is_current(size_t unit) const {
  if (!schedule_.is_claimed(unit)) return false;
  return std::ranges::all_of(units_[unit].segments, [&](const auto& segment) {
    return is_local(*segment) || segment->bound_version() == segment->version();
  });
}

void UnitGathers::launch_all(const std::vector<size_t>& units) {
  for (const size_t unit : units) launch(unit);
}

void UnitGathers::launch(size_t unit) {
  std::vector<Gather>& read = gathers_[unit];
  std::vector<Gather>& gathers = read.empty() ? read : unread_;
  for (const auto& segment : units_[unit].segments) {
    if (is_local(*segment)) continue;
    at::Tensor memory = pool_.acquire(segment->whole_bytes());
    FuturePtr future = gather(*segment, memory);
    gathers.push_back({.memory = std::move(memory),
                       .version = segment->version(),
                       .future = std::move(future)});
  }
}

UnitGathers::FuturePtr UnitGathers::gather(const Segment& segment,
                                           const at::Tensor& memory) {
  const at::Tensor whole = segment.whole_in(memory);
  segment.write_own_slice(whole);
  return transport_.all_gather(whole);
}

void UnitGathers::finish(Gather& gather) {
  if (!gather.future) return;
  gather.future->waitAndThrow();
  gather.future = nullptr;
}

void UnitGathers::release_unneeded() {
  launch_rest();
  for (const size_t unit : schedule_.unclaimed()) release(unit);
  for (Gather& gather : std::exchange(unread_, {})) reclaim(std::move(gather));
}

// Memory of a gather that has failed may be written to for ever, and is not
// lent again; who needs the unit is told.
void UnitGathers::reclaim(Gather gather) {
  if (gather.future) {
    gather.future->wait();
    if (gather.future->hasError()) return;
  }
  pool_.release(std::move(gather.memory));
}

}  // namespace brigade
