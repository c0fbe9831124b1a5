// Finds accesses to device memory that nothing orders, from what a program
// enqueues: no device and no timing take part, so it finds the same each time.
//
// Streams are logical. An operation is after its stream's earlier operations,
// after the events that its stream waited for, and after what the host had
// waited for. Two accesses to the same bytes, one of which writes, are a race
// unless one is after the other.
//
// Memory belongs to the stream that it was allocated for, as in a caching
// allocator: once freed, it serves that stream again at once. A free is a race
// if other streams' uses are neither before it on the owner nor recorded.
//
//   RaceDetector detector;
//   const size_t a = detector.add_stream("a"), b = detector.add_stream("b");
//   detector.allocate(0x1000, 64, a);
//   detector.run(a, "fill", {{.begin = 0x1000, .bytes = 64, .writes = true}});
//   detector.run(b, "read", {{.begin = 0x1000, .bytes = 64}});
//   EXPECT_EQ(detector.take_races().size(), 1);
//
// Addresses are numbers to it; it reads and writes none of the memory. It
// judges the order in which calls were enqueued, not other possible orders.
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

// The number of each stream's operations that are before a point.
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
    kUnordered,     // of two accesses
    kEarlyFree,     // a stream may still use what was freed
    kUseAfterFree,  // an access to memory that nobody has allocated
    kHostWrite,     // the host changed what a copy still reads
  };
  Kind kind;
  std::string text;
};

class RaceDetector {
 public:
  using Address = uintptr_t;
  // All that is before an event, for instance.
  using Moment = VectorClock;

  // Streams are numbered from 0. REQUIRES, of all that follow: streams that
  // exist.
  size_t add_stream(std::string name);

  // An operation on `stream`. Its races print `where`, unless empty.
  void run(size_t stream, std::string name, const std::vector<Access>& accesses,
           std::string where = {});

  // All that is before work that `stream` would do now.
  Moment moment(size_t stream);

  // Orders later work of `stream` after `moment`.
  void wait(size_t stream, const Moment& moment);

  // Orders everything that is enqueued later, on any stream, after `moment`.
  void host_waits(const Moment& moment) { host_.join(moment); }
  bool host_has_waited(const Moment& moment) const {
    return host_.covers(moment);
  }

  // REQUIRES: `begin` is in no allocation.
  void allocate(Address begin, size_t bytes, size_t owner);

  // `stream` uses the memory too: it serves its owner again only when `stream`
  // has done its work of before the free. Ignores other addresses.
  void record_use(Address begin, size_t stream);

  // Returns the moment that must be over before the memory may serve its owner
  // again: see may_serve(). REQUIRES: `begin` is that of an allocation.
  Moment free(Address begin, std::string where = {});
  bool may_serve(size_t owner, const Moment& moment) const;

  // A race that was found elsewhere.
  void report(Race race) { races_.push_back(std::move(race)); }

  // Those found since the last call, each pair of operations once.
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
    int64_t number;     // counts the operations of all streams, from 1
    size_t stream;      // that it runs on
    uint64_t time;      // counts the operations of its stream, from 1
    std::string where;  // the backtrace of its call; may be empty
  };
  using OperationPtr = std::shared_ptr<const Operation>;
  // Neighbouring bytes with one history.
  struct Piece {
    Address end = 0;
    OperationPtr write = nullptr;          // null: none is known
    std::vector<OperationPtr> reads = {};  // since the write; one per stream
  };

  VectorClock& enqueue(size_t stream);
  OperationPtr make_operation(size_t stream, std::string name,
                              std::string where);
  bool is_allocated(const Access& access) const;
  void check_access(const Access& access, const OperationPtr& operation);
  void tell(Race::Kind kind, Address at, const Operation& before,
            bool before_writes, const Operation& now, bool now_writes);
  std::string describe(const Operation& operation) const;
  std::string describe(Address at) const;

  // Calls visit(begin, piece) for the pieces that make up [begin, end). Pieces
  // are cut there, and made where nothing is known.
  void visit(Address begin, Address end,
             const std::function<void(Address, Piece&)>& visit);
  void cut(Address at);

  std::vector<std::string> names_;    // by stream
  std::vector<VectorClock> streams_;  // by stream
  VectorClock host_;                  // all that the host has waited for
  std::map<Address, Allocation> allocations_;  // by begin
  std::map<Address, Piece> history_;           // by begin; they do not overlap
  std::vector<Race> races_;
  std::set<std::pair<int64_t, int64_t>> told_;  // numbers of two operations
  int64_t num_operations_ = 0;
  int64_t num_allocations_ = 0;
};

}  // namespace brigade::simulated

#endif  // BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_RACE_DETECTOR_H_
