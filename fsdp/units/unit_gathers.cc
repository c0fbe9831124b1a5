#include "brigade/fsdp/units/unit_gathers.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/streams/stream_join.h"
#include "brigade/fsdp/layout/digest.h"

namespace brigade {

UnitGathers::UnitGathers(std::vector<Unit>& units, MeshTransports& transports,
                         MemoryPool& pool, size_t depth)
    : units_(units),
      transports_(transports),
      streams_(transports.root().streams()),
      pool_(pool),
      schedule_(units.size(), depth),
      versions_(units.size(), 0),
      gathers_(units.size()),
      own_(units.size()),
      uses_(units.size(), StreamUses(pool.device())),
      slices_(units, streams_, pool),
      num_from_slices_(units.size(), 0),
      recorder_(pool.device()),
      shard_writers_(pool.device()) {
  const std::optional<c10::Stream>& stream = streams_.gathers();
  for (size_t i = 0; i < units_.size(); ++i) {
    gather_names_.push_back(
        absl::StrCat("the gather of unit '", units_[i].name, "'"));
    own_[i].resize(units_[i].segments.size());
    for (const auto& segment : units_[i].segments) {
      if (segment->is_whole_here())
        segment->bind(segment->shard().view(at::kByte));
      // Which will read them, whoever drops them.
      if (stream) segment->shard().record_stream(*stream);
    }
  }
}

UnitGathers::~UnitGathers() {
  // Views that outlive this object keep what is whole.
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    for (const Gather& gather : gathers_[unit]) {
      uses_[unit].record_on(gather.buffer.memory);
    }
  }
  const auto keep = [](const Gather& gather) {
    if (!gather.future || gather.future->completed()) return;
    gather.future->addCallback(
        [memory = gather.buffer.memory](c10::ivalue::Future&) {},
        /*uses_future=*/false);
  };
  for (const auto& of_unit : gathers_) std::ranges::for_each(of_unit, keep);
  std::ranges::for_each(unread_, keep);
  for (auto& of_unit : own_) {
    for (Buffer& own : of_unit) {
      if (own.memory.defined()) pool_.release(std::move(own));
    }
  }
}

void UnitGathers::begin(std::vector<size_t> expected, GatheredIn pass) {
  release_unneeded();
  release_own_unless_kept();
  pass_ = pass;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    versions_[unit] = version_of(units_[unit]);
  }
  slices_.drop_outdated();
  if (pass == GatheredIn::kBackward) {
    for (const size_t unit : expected) {
      if (slices_.num_ranks(unit) > 0) ++num_from_slices_[unit];
    }
  }
  launch_all(schedule_.begin(std::move(expected)));
}

// Orders the gathers' stream behind the optimizer, say, and tells the allocator
// who uses shards: they belong to the stream that they were made on.
void UnitGathers::shards_are_written() {
  const c10::Device device = pool_.device();
  if (device.is_cpu()) return;
  if (shard_writers_.note()) {
    for (const Unit& unit : units_) {
      for (const auto& segment : unit.segments) {
        segment->shard().record_stream(current_stream(device));
      }
    }
  }
  const StreamPoint written = StreamPoint::now(device);
  const ShardingStreams::Scope on_gathers = streams_.for_gathers();
  written.wait();
}

void UnitGathers::need(size_t unit, std::span<const size_t> ahead,
                       const std::function<void()>& ask) {
  request(unit, ahead, ask);
  const bool is_first = std::ranges::any_of(
      gathers_[unit], [](const Gather& gather) { return !gather.is_read; });
  if (is_first) recorder_.needed(unit);
  join(unit);
  if (is_first) recorder_.is_whole(unit);
  for (Gather& gather : gathers_[unit]) gather.is_read = true;
}

void UnitGathers::request(size_t unit, std::span<const size_t> ahead,
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
  }
  bind(unit);
}

// The host waits for what is not complete. What is complete on a device may not
// have run: each stream waits for itself.
void UnitGathers::join(size_t unit) {
  for (Gather& gather : gathers_[unit]) {
    if (!gather.future) continue;
    wait_for(unit, *gather.future);
    if (gather.future->hasError()) throw_lost(unit, gather);
    if (pool_.device().is_cpu()) gather.future = nullptr;
  }
  record_use(unit);
}

void UnitGathers::wait_for(size_t unit, c10::ivalue::Future& future) {
  std::optional<WaitForPeers> waiting;
  if (progress_ && !future.completed()) {
    waiting.emplace(*progress_, &gather_names_[unit]);
  }
  future.wait();
}

std::string UnitGathers::describe_last() const {
  const int64_t last = last_launched_;
  return last < 0 ? ""
                  : absl::StrCat("; its last gather was that of unit '",
                                 units_[last].name, "'");
}

// What was given before has been waited for by whoever wanted it, so that all
// ranks have launched it.
void UnitGathers::give(std::span<const int64_t> units, int64_t wanted) {
  reclaim_unread();
  for (const int64_t unit : units) {
    const bool is_wanted = unit == wanted;
    launch_into(is_wanted ? gathers_[unit] : unread_, static_cast<size_t>(unit),
                is_wanted ? pass_ : GatheredIn::kOther);
  }
}

uint64_t UnitGathers::digest_of_writes() const {
  Digest digest;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    digest.add(version_of(units_[unit]) - versions_[unit]);
  }
  return digest.value();
}

// In the words of the connections, behind what they were for.
void UnitGathers::throw_lost(size_t unit, const Gather& gather) const {
  std::string among;
  const ShardTransport& transport = transports_.of(units_[unit]);
  if (gather.num_ranks < transport.num_shards()) {
    const int place = transport.shard_rank();
    const int first = place - place % gather.num_ranks;
    among = absl::StrCat(" among ranks ", first, "-",
                         first + gather.num_ranks - 1, " of a row");
  }
  try {
    std::rethrow_exception(gather.future->exception_ptr());
  } catch (const c10::DistBackendError& error) {
    throw PeerError(
        {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
        absl::StrCat("fully_shard: the gather of unit '", units_[unit].name,
                     "'", among, ": ", error.what_without_backtrace()));
  }
}

void UnitGathers::bind(size_t unit) {
  auto& segments = units_[unit].segments;
  size_t index = 0;
  for (const Gather& gather : gathers_[unit]) {
    while (segments[index]->is_whole_here()) ++index;
    segments[index]->bind(gather.buffer.memory);
    segments[index]->set_bound_version(gather.version,
                                       gather.num_possible_steps);
    ++index;
  }
}

// What this rank has not needed, too. The copy counts as a use of the unit.
void UnitGathers::keep_slices(size_t unit, int num_ranks) {
  if (!schedule_.is_there(unit)) return;
  const ShardingStreams::Scope on_gathers = streams_.for_gathers();
  join(unit);
  std::vector<at::Tensor> memory;
  int64_t version = 0;
  for (const Gather& gather : gathers_[unit]) {
    memory.push_back(gather.buffer.memory);
    version += gather.version;
  }
  slices_.keep(unit, num_ranks, version, memory);
}

void UnitGathers::drop_slices() {
  slices_.drop_all();
  std::ranges::fill(num_from_slices_, 0);
}

void UnitGathers::release(size_t unit) {
  if (!schedule_.is_there(unit)) return;
  for (const auto& segment : units_[unit].segments) {
    if (!segment->is_whole_here() && segment->is_bound()) segment->unbind();
  }
  record_use(unit);
  const StreamPoint last_use = uses_[unit].end();
  for (Gather& gather : std::exchange(gathers_[unit], {})) {
    if (gather.is_read) {
      reclaim(std::move(gather), last_use);
    } else {
      if (gather.future && pool_.device().is_cpu()) {
        wait_for(unit, *gather.future);
      }
      reclaim_unread(std::move(gather));
    }
  }
  schedule_.released(unit);
}

void UnitGathers::launch_rest() {
  launch_expected();
  if (!std::exchange(reads_shards_, false)) return;
  StreamPoint have_read;
  {
    const ShardingStreams::Scope on_gathers = streams_.for_gathers();
    have_read = StreamPoint::now(pool_.device());
  }
  have_read.wait();
}

bool UnitGathers::is_current(size_t unit) const {
  if (!schedule_.is_claimed(unit)) return false;
  return std::ranges::all_of(units_[unit].segments, [&](const auto& segment) {
    return segment->is_whole_here() || segment->is_bound_current();
  });
}

void UnitGathers::launch_all(const std::vector<size_t>& units) {
  for (const size_t unit : units) launch(unit);
}

void UnitGathers::launch(size_t unit) {
  const bool is_there = !gathers_[unit].empty();
  launch_into(is_there ? unread_ : gathers_[unit], unit,
              is_there ? GatheredIn::kOther : pass_);
}

void UnitGathers::launch_into(std::vector<Gather>& gathers, size_t unit,
                              GatheredIn pass) {
  const bool is_near = num_from_slices_[unit] > 0;
  const int num_ranks = is_near ? slices_.num_ranks(unit)
                                : transports_.of(units_[unit]).num_shards();
  const ShardingStreams::Scope on_gathers = streams_.for_gathers();
  const auto& segments = units_[unit].segments;
  bool is_first = true;
  for (size_t i = 0; i < segments.size(); ++i) {
    const Segment& segment = *segments[i];
    if (segment.is_whole_here()) continue;
    Gather launched;
    launched.version = segment.version();
    launched.num_possible_steps = segment.num_possible_steps();
    launched.num_ranks = num_ranks;
    if (&gathers != &unread_ && units_[unit].settings.keeps_storage) {
      launched.kept_by = std::pair(unit, i);
    }
    launched.buffer = memory_for(launched, segment, pass);
    launched.buffer.last_use.wait();
    if (std::exchange(is_first, false)) recorder_.launch_begins(unit, pass);
    const at::Tensor whole = segment.whole_in(launched.buffer.memory);
    launched.future =
        is_near ? gather_near(unit, i, whole) : gather(unit, i, whole);
    recorder_.launched(*launched.future);
    last_launched_ = static_cast<int64_t>(unit);
    gathers.push_back(std::move(launched));
  }
  if (is_near && --num_from_slices_[unit] == 0) slices_.drop(unit);
}

Buffer UnitGathers::memory_for(const Gather& gather, const Segment& segment,
                               GatheredIn pass) {
  if (gather.kept_by) {
    Buffer& own = own_[gather.kept_by->first][gather.kept_by->second];
    if (own.memory.defined()) return std::exchange(own, {});
  }
  return pool_.acquire(segment.whole_bytes(),
                       segment.use_for(purpose_of(pass)));
}

UnitGathers::FuturePtr UnitGathers::gather(size_t unit, size_t segment,
                                           const at::Tensor& whole) {
  units_[unit].segments[segment]->write_own_slice(whole);
  reads_shards_ = true;
  return transports_.of(units_[unit]).all_gather(whole);
}

UnitGathers::FuturePtr UnitGathers::gather_near(size_t unit, size_t segment,
                                                const at::Tensor& whole) {
  slices_.write_to(whole, unit, segment);
  ++num_near_;
  return transports_.of(units_[unit])
      .all_gather_near(whole, slices_.num_ranks(unit));
}

void UnitGathers::release_unneeded() {
  launch_rest();
  for (const size_t unit : schedule_.unclaimed()) release(unit);
  reclaim_unread();
}

void UnitGathers::reclaim_unread() {
  for (Gather& gather : std::exchange(unread_, {})) {
    reclaim_unread(std::move(gather));
  }
}

// Nobody has waited for it: whoever gets its memory is behind it.
void UnitGathers::reclaim_unread(Gather gather) {
  const ShardingStreams::Scope on_gathers = streams_.for_gathers();
  if (gather.future) gather.future->wait();
  reclaim(std::move(gather), StreamPoint::now(pool_.device()));
}

// Memory of a gather that has failed may be written to for ever, and is not
// lent again; who needs the unit is told.
void UnitGathers::reclaim(Gather gather, StreamPoint last_use) {
  if (gather.future && gather.future->hasError()) return;
  gather.buffer.last_use = std::move(last_use);
  if (gather.kept_by && units_[gather.kept_by->first].settings.keeps_storage) {
    own_[gather.kept_by->first][gather.kept_by->second] =
        std::move(gather.buffer);
  } else {
    pool_.release(std::move(gather.buffer));
  }
}

void UnitGathers::release_own_unless_kept() {
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (units_[unit].settings.keeps_storage) continue;
    for (Buffer& own : own_[unit]) {
      if (own.memory.defined()) pool_.release(std::exchange(own, {}));
    }
  }
}

}  // namespace brigade
