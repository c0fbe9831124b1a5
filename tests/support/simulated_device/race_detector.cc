#include "brigade/tests/support/simulated_device/race_detector.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"

namespace brigade::simulated {
namespace {

const char* verb(bool writes) { return writes ? "writes" : "reads"; }

std::string trace_of(const char* which, const std::string& where) {
  if (where.empty()) return "";
  return absl::StrCat("\n", which, " was enqueued here:\n", where);
}

}  // namespace

void VectorClock::tick(size_t stream) {
  counts_.resize(std::max(counts_.size(), stream + 1));
  ++counts_[stream];
}

void VectorClock::join(const VectorClock& other) {
  counts_.resize(std::max(counts_.size(), other.counts_.size()));
  for (size_t s = 0; s < other.counts_.size(); ++s) {
    counts_[s] = std::max(counts_[s], other.counts_[s]);
  }
}

bool VectorClock::covers(const VectorClock& other) const {
  for (size_t s = 0; s < other.counts_.size(); ++s) {
    if (other.counts_[s] > at(s)) return false;
  }
  return true;
}

size_t RaceDetector::add_stream(std::string name) {
  names_.push_back(std::move(name));
  streams_.emplace_back();
  return streams_.size() - 1;
}

// Orders new work after the host's waits.
VectorClock& RaceDetector::enqueue(size_t stream) {
  streams_[stream].join(host_);
  return streams_[stream];
}

RaceDetector::OperationPtr RaceDetector::make_operation(size_t stream,
                                                        std::string name,
                                                        std::string where) {
  VectorClock& clock = enqueue(stream);
  clock.tick(stream);
  return std::make_shared<const Operation>(
      Operation{.name = std::move(name),
                .number = ++num_operations_,
                .stream = stream,
                .time = clock.at(stream),
                .where = std::move(where)});
}

void RaceDetector::run(size_t stream, std::string name,
                       const std::vector<Access>& accesses, std::string where) {
  const auto operation =
      make_operation(stream, std::move(name), std::move(where));
  for (const Access& access : accesses) check_access(access, operation);
}

bool RaceDetector::is_allocated(const Access& access) const {
  auto allocation = allocations_.upper_bound(access.begin);
  if (allocation == allocations_.begin()) return false;
  --allocation;
  return access.begin + access.bytes <=
         allocation->first + allocation->second.bytes;
}

void RaceDetector::cut(Address at) {
  auto piece = history_.upper_bound(at);
  if (piece == history_.begin()) return;
  --piece;
  if (piece->first == at || piece->second.end <= at) return;
  Piece right = piece->second;
  piece->second.end = at;
  history_.emplace(at, std::move(right));
}

void RaceDetector::visit(Address begin, Address end,
                         const std::function<void(Address, Piece&)>& visit) {
  cut(begin);
  cut(end);
  for (Address at = begin; at < end;) {
    auto piece = history_.lower_bound(at);
    if (piece == history_.end() || piece->first > at) {
      const Address gap_end =
          piece == history_.end() ? end : std::min(end, piece->first);
      piece = history_.emplace(at, Piece{.end = gap_end}).first;
    }
    visit(at, piece->second);
    at = piece->second.end;
  }
}

void RaceDetector::check_access(const Access& access,
                                const OperationPtr& operation) {
  if (access.bytes == 0) return;
  if (!is_allocated(access)) {
    report({.kind = Race::kUseAfterFree,
            .text = absl::StrCat(
                "use after free: ", describe(*operation), " ",
                verb(access.writes), " ", access.bytes,
                " bytes that are not allocated.\nKeep the tensor until the "
                "operation is enqueued.",
                trace_of("It", operation->where))});
    return;
  }
  const VectorClock& clock = streams_[operation->stream];
  const auto check = [&](Address at, const OperationPtr& before, bool writes) {
    if (before->time <= clock.at(before->stream)) return;
    report_pair(Race::kUnordered, at, *before, writes, *operation,
                access.writes);
  };
  visit(access.begin, access.begin + access.bytes,
        [&](Address at, Piece& piece) {
          if (piece.write) check(at, piece.write, /*writes=*/true);
          if (access.writes) {
            for (const OperationPtr& read : piece.reads) {
              check(at, read, /*writes=*/false);
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

RaceDetector::Moment RaceDetector::moment(size_t stream) {
  return enqueue(stream);
}

void RaceDetector::wait(size_t stream, const Moment& moment) {
  enqueue(stream).join(moment);
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

RaceDetector::Moment RaceDetector::free(Address begin, std::string where) {
  const auto allocation = allocations_.find(begin);
  const auto& [number, bytes, owner, recorded] = allocation->second;
  Moment last_uses;
  for (const size_t stream : recorded) last_uses.join(streams_[stream]);
  const auto freeing = make_operation(owner, "free", std::move(where));
  Moment reuse = streams_[owner];
  reuse.join(last_uses);
  const auto check = [&](Address at, const OperationPtr& use, bool writes) {
    if (use->time <= reuse.at(use->stream)) return;
    report_pair(Race::kEarlyFree, at, *use, writes, *freeing,
                /*now_writes=*/true);
  };
  visit(begin, begin + bytes, [&](Address at, Piece& piece) {
    if (piece.write) check(at, piece.write, /*writes=*/true);
    for (const OperationPtr& read : piece.reads) {
      check(at, read, /*writes=*/false);
    }
  });
  // A next user that is not ordered after the free is a race.
  history_.erase(history_.lower_bound(begin),
                 history_.lower_bound(begin + bytes));
  history_.emplace(begin, Piece{.end = begin + bytes, .write = freeing});
  allocations_.erase(allocation);
  return last_uses;
}

bool RaceDetector::may_serve(size_t owner, const Moment& moment) const {
  VectorClock clock = streams_[owner];
  clock.join(host_);
  return clock.covers(moment);
}

void RaceDetector::report_pair(Race::Kind kind, Address at,
                               const Operation& before, bool before_writes,
                               const Operation& now, bool now_writes) {
  if (!reported_.insert({before.number, now.number}).second) return;
  const std::string earlier = absl::StrCat(
      describe(before), " ", verb(before_writes), " (", describe(at));
  const std::string traces = trace_of("The later one", now.where) +
                             trace_of("The earlier one", before.where);
  if (kind == Race::kEarlyFree) {
    report({kind, absl::StrCat("early free: the memory of ", names_[now.stream],
                               " that ", earlier,
                               ") was freed, and may be reused before that "
                               "operation.\nCall record_stream() for ",
                               names_[before.stream], ".", traces)});
    return;
  }
  report(
      {kind, absl::StrCat("race: ", describe(now), " ", verb(now_writes),
                          " memory that ", earlier,
                          "), and no event orders them.\nRecord an event on ",
                          names_[before.stream], " and make ",
                          names_[now.stream], " wait for it.", traces)});
}

std::string RaceDetector::describe(const Operation& operation) const {
  return absl::StrCat("'", operation.name, "' (operation ", operation.number,
                      ") on ", names_[operation.stream]);
}

// REQUIRES: `at` lies in an allocation.
std::string RaceDetector::describe(Address at) const {
  const auto& [begin, allocation] = *std::prev(allocations_.upper_bound(at));
  return absl::StrCat("byte ", at - begin, " of allocation ", allocation.number,
                      " of ", allocation.bytes, " bytes");
}

std::vector<Race> RaceDetector::take_races() {
  reported_.clear();
  return std::exchange(races_, {});
}

}  // namespace brigade::simulated
