#include "brigade/tests/support/simulated_device/race_detector.h"

#include <iterator>
#include <memory>
#include <sstream>

namespace brigade::simulated {
namespace {

template <typename... Parts>
std::string text_of(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

const char* verb(bool writes) { return writes ? "writes" : "reads"; }

std::string trace_of(const char* which, const Operation& operation) {
  if (operation.where.empty()) return "";
  return text_of("\n", which, " was enqueued here:\n", operation.where);
}

std::string traces_of(const Operation& now, const Operation& before) {
  return trace_of("The later one", now) + trace_of("The earlier one", before);
}

}  // namespace

size_t RaceDetector::add_stream(std::string name) {
  names_.push_back(std::move(name));
  streams_.emplace_back();
  return streams_.size() - 1;
}

size_t RaceDetector::add_host() {
  hosts_.emplace_back();
  return hosts_.size() - 1;
}

// Work is behind all that its host has waited for.
VectorClock& RaceDetector::enqueue(size_t stream, size_t host) {
  streams_[stream].join(hosts_[host]);
  return streams_[stream];
}

void RaceDetector::run(size_t stream, std::string name,
                       const std::vector<Access>& accesses, size_t host,
                       std::string where) {
  VectorClock& clock = enqueue(stream, host);
  clock.tick(stream);
  const auto operation =
      std::make_shared<const Operation>(Operation{.name = std::move(name),
                                                  .number = ++num_operations_,
                                                  .stream = stream,
                                                  .time = clock.at(stream),
                                                  .where = std::move(where)});
  for (const Access& access : accesses) check_uses(access, operation);
}

bool RaceDetector::is_allocated(const Access& access) const {
  auto allocation = allocations_.upper_bound(access.begin);
  if (allocation == allocations_.begin()) return false;
  --allocation;
  return access.begin + access.bytes <=
         allocation->first + allocation->second.bytes;
}

void RaceDetector::check_uses(const Access& access,
                              const OperationPtr& operation) {
  if (access.bytes == 0) return;
  if (!is_allocated(access)) {
    races_.push_back(
        {.kind = Race::kUseAfterFree,
         .text = text_of("use after free: ", describe(*operation), " ",
                         verb(access.writes), " ", access.bytes,
                         " bytes that are no allocation's.\nKeep the tensor "
                         "until the operation is enqueued.",
                         trace_of("It", *operation))});
    return;
  }
  const VectorClock& clock = streams_[operation->stream];
  const auto is_behind = [&](const OperationPtr& before) {
    return before->time <= clock.at(before->stream);
  };
  history_.visit(access.begin, access.begin + access.bytes,
                 [&](Address at, MemoryHistory::Piece& piece) {
                   if (piece.write && !is_behind(piece.write)) {
                     tell_unordered(at, *piece.write, /*before_writes=*/true,
                                    *operation, access.writes);
                   }
                   if (access.writes) {
                     for (const OperationPtr& read : piece.reads) {
                       if (is_behind(read)) continue;
                       tell_unordered(at, *read, /*before_writes=*/false,
                                      *operation,
                                      /*now_writes=*/true);
                     }
                     piece.write = operation;
                     piece.reads.clear();
                   } else {
                     std::erase_if(piece.reads, [&](const OperationPtr& read) {
                       return read->stream == operation->stream;
                     });
                     piece.reads.push_back(operation);
                   }
                 });
}

RaceDetector::Moment RaceDetector::moment(size_t stream, size_t host) {
  return enqueue(stream, host);
}

void RaceDetector::wait(size_t stream, const Moment& moment, size_t host) {
  enqueue(stream, host).join(moment);
}

void RaceDetector::host_waits(const Moment& moment, size_t host) {
  hosts_[host].join(moment);
}

void RaceDetector::allocate(Address begin, size_t bytes, size_t owner) {
  allocations_[begin] = {.number = ++num_allocations_,
                         .bytes = bytes,
                         .owner = owner,
                         .recorded = {}};
}

void RaceDetector::record_use(Address begin, size_t stream) {
  const auto allocation = allocations_.find(begin);
  if (allocation == allocations_.end()) return;
  allocation->second.recorded.insert(stream);
}

RaceDetector::Moment RaceDetector::free(Address begin, size_t host,
                                        std::string where) {
  const auto allocation = allocations_.find(begin);
  const auto& [number, bytes, owner, recorded] = allocation->second;
  Moment last_uses;
  for (const size_t stream : recorded) last_uses.join(streams_[stream]);
  if (strict_) {
    Moment reuse = streams_[owner];
    reuse.join(hosts_[host]);
    reuse.join(last_uses);
    check_free(begin, bytes,
               {.name = "free",
                .number = ++num_operations_,
                .stream = owner,
                .time = 0,
                .where = std::move(where)},
               reuse);
    forget(begin, bytes, owner, host);
  }
  allocations_.erase(allocation);
  return last_uses;
}

// Whoever gets the memory next is behind this point of its owner, or is in a
// race with its last users.
void RaceDetector::forget(Address begin, size_t bytes, size_t owner,
                          size_t host) {
  VectorClock& clock = enqueue(owner, host);
  clock.tick(owner);
  const auto freed =
      std::make_shared<const Operation>(Operation{.name = "free",
                                                  .number = num_operations_,
                                                  .stream = owner,
                                                  .time = clock.at(owner),
                                                  .where = {}});
  history_.forget(begin, begin + bytes);
  history_.visit(
      begin, begin + bytes,
      [&](Address, MemoryHistory::Piece& piece) { piece.write = freed; });
}

bool RaceDetector::may_serve(size_t owner, const Moment& moment, size_t host) {
  VectorClock clock = streams_[owner];
  clock.join(hosts_[host]);
  return clock.covers(moment);
}

// `reuse`: what is behind whoever gets the memory next.
void RaceDetector::check_free(Address begin, size_t bytes,
                              const Operation& freeing, const Moment& reuse) {
  const auto check = [&](Address at, const OperationPtr& use, bool writes) {
    if (use->time <= reuse.at(use->stream)) return;
    tell_early_free(at, *use, writes, freeing);
  };
  history_.visit(begin, begin + bytes,
                 [&](Address at, const MemoryHistory::Piece& piece) {
                   if (piece.write) check(at, piece.write, true);
                   for (const OperationPtr& read : piece.reads) {
                     check(at, read, false);
                   }
                 });
}

void RaceDetector::tell_unordered(Address at, const Operation& before,
                                  bool before_writes, const Operation& now,
                                  bool now_writes) {
  if (is_told(before, now)) return;
  races_.push_back(
      {.kind = Race::kUnordered,
       .text = text_of("race: ", describe(now), " ", verb(now_writes), " what ",
                       describe(before), " ", verb(before_writes), " (",
                       describe(at),
                       "), and no event orders them.\nRecord one "
                       "on ",
                       names_[before.stream], " and let ", names_[now.stream],
                       " wait for it.", traces_of(now, before))});
}

void RaceDetector::tell_early_free(Address at, const Operation& before,
                                   bool before_writes,
                                   const Operation& freeing) {
  if (is_told(before, freeing)) return;
  races_.push_back(
      {.kind = Race::kEarlyFree,
       .text = text_of(
           "early free: the memory of ", names_[freeing.stream], " that ",
           describe(before), " ", verb(before_writes), " (", describe(at),
           ") was freed, and may be used anew "
           "before that is done.\nCall record_stream() for ",
           names_[before.stream], ".", traces_of(freeing, before))});
}

bool RaceDetector::is_told(const Operation& before, const Operation& now) {
  return !told_.insert({before.number, now.number}).second;
}

std::string RaceDetector::describe(const Operation& operation) const {
  return text_of("'", operation.name, "' (operation ", operation.number,
                 ") on ", names_[operation.stream]);
}

// REQUIRES: in an allocation.
std::string RaceDetector::describe(Address at) const {
  const auto& [begin, allocation] = *std::prev(allocations_.upper_bound(at));
  return text_of("byte ", at - begin, " of allocation ", allocation.number,
                 ", which has ", allocation.bytes);
}

std::vector<Race> RaceDetector::take_races() {
  told_.clear();
  return std::exchange(races_, {});
}

}  // namespace brigade::simulated
