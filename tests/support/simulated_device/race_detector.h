// Happens-before race detector for device memory. It evaluates the enqueued
// operations, without a device and independent of timing.
//
// An operation is ordered after its stream's earlier operations, the events
// that its stream waited for, and all that the host had waited for. Two
// unordered accesses to the same bytes, one of which writes, are a race.
//
// Memory belongs to the stream that it was allocated on, as in a caching
// allocator: after a free, that stream reuses it at once. A free is a race if
// uses by other streams are neither ordered before it on the owner nor
// recorded.
//
//   RaceDetector detector;
//   const size_t a = detector.add_stream("a"), b = detector.add_stream("b");
//   detector.allocate(0x1000, 64, a);
//   detector.run(a, "fill", {{.begin = 0x1000, .bytes = 64, .writes = true}});
//   detector.run(b, "read", {{.begin = 0x1000, .bytes = 64}});
//   EXPECT_EQ(detector.take_races().size(), 1);
//
// It does not access the memory. It checks the order in which calls were
// enqueued, not other possible orders.
//
// Thread safety: none.

#ifndef BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_RACE_DETECTOR_H_
#define BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_RACE_DETECTOR_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace brigade::simulated {

// Number of operations of each stream that are ordered before a point.
class VectorClock {
 public:
  uint64_t at(size_t stream) const {
    return stream < counts_.size() ? counts_[stream] : 0;
  }
  void tick(size_t stream);
  void join(const VectorClock& other);
  bool covers(const VectorClock& other) const;

 private:
  std::vector<uint64_t> counts_;  // by stream
};

struct Access {
  uintptr_t begin = 0;
  size_t bytes = 0;
  bool writes = false;
};

struct Race {
  enum Kind {
    kUnordered,     // two accesses
    kEarlyFree,     // a stream may still use the freed memory
    kUseAfterFree,  // an access to memory that is not allocated
    kHostWrite,     // the host wrote memory that a copy still reads
  };
  Kind kind;
  std::string text;
};

class RaceDetector {
 public:
  using Address = uintptr_t;
  // The operations before a point, for instance before an event.
  using Moment = VectorClock;

  // Returns the stream's number, from 0. All other methods require existing
  // streams.
  size_t add_stream(std::string name);

  // Adds an operation to `stream`. Reports of its races include `where`.
  void run(size_t stream, std::string name, const std::vector<Access>& accesses,
           std::string where = {});

  // Returns the operations before the next operation of `stream`.
  Moment moment(size_t stream);

  // Orders later work of `stream` after `moment`.
  void wait(size_t stream, const Moment& moment);

  // Orders all later work of all streams after `moment`.
  void host_waits(const Moment& moment) { host_.join(moment); }
  bool host_has_waited(const Moment& moment) const {
    return host_.covers(moment);
  }

  // REQUIRES: `begin` is in no allocation.
  void allocate(Address begin, size_t bytes, size_t owner);

  // Records that `stream` uses the memory: its owner reuses it only after the
  // work of `stream` before the free. Ignores other addresses.
  void record_use(Address begin, size_t stream);

  // Returns the moment after which the owner may reuse the memory
  // (may_serve()). REQUIRES: an allocation begins at `begin`.
  Moment free(Address begin, std::string where = {});
  bool may_serve(size_t owner, const Moment& moment) const;

  // Adds a race that was found elsewhere.
  void report(Race race) { races_.push_back(std::move(race)); }

  // Returns the races since the last call, one per pair of operations.
  std::vector<Race> take_races();

 private:
  struct Allocation {
    int64_t number;  // counts allocations, from 1
    size_t bytes;
    size_t owner;
    std::set<size_t> recorded;  // streams
  };
  struct Operation {
    std::string name;
    int64_t number;  // counts the operations of all streams, from 1
    size_t stream;
    uint64_t time;      // counts the operations of its stream, from 1
    std::string where;  // the backtrace of its call; may be empty
  };
  using OperationPtr = std::shared_ptr<const Operation>;
  // Adjacent bytes with the same history.
  struct Piece {
    Address end = 0;
    OperationPtr write = nullptr;          // null: none
    std::vector<OperationPtr> reads = {};  // since the write; one per stream
  };

  VectorClock& enqueue(size_t stream);
  OperationPtr make_operation(size_t stream, std::string name,
                              std::string where);
  bool is_allocated(const Access& access) const;
  void check_access(const Access& access, const OperationPtr& operation);
  void report_pair(Race::Kind kind, Address at, const Operation& before,
                   bool before_writes, const Operation& now, bool now_writes);
  std::string describe(const Operation& operation) const;
  std::string describe(Address at) const;

  // Calls visit(begin, piece) for the pieces of [begin, end). Splits pieces at
  // both ends and adds pieces in gaps.
  void visit(Address begin, Address end,
             const std::function<void(Address, Piece&)>& visit);
  void cut(Address at);

  std::vector<std::string> names_;             // by stream
  std::vector<VectorClock> streams_;           // by stream
  VectorClock host_;                           // waits of the host
  std::map<Address, Allocation> allocations_;  // by begin
  std::map<Address, Piece> history_;           // by begin; they do not overlap
  std::vector<Race> races_;
  std::set<std::pair<int64_t, int64_t>> reported_;  // pairs of numbers
  int64_t num_operations_ = 0;
  int64_t num_allocations_ = 0;
};

}  // namespace brigade::simulated

#endif  // BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_RACE_DETECTOR_H_
