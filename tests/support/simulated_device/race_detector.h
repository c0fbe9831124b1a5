// Finds accesses to device memory that nothing orders, from what a program
// enqueues: no device and no timing take part, so it finds the same each time.
//
// Streams are logical. An operation is behind what its stream has done, behind
// the events that its stream waited for, and behind what the host that enqueued
// it had waited for. Two accesses to the same bytes, one of which writes, are a
// race unless one is behind the other.
//
// Memory belongs to the stream that it was allocated for, as in a caching
// allocator: once freed, it serves that stream again, at once. Strict: a free
// is a race if other streams' uses are neither behind the owner nor recorded,
// also if nobody gets that memory again. Another stream that uses what the
// owner got again is to be behind it.
//
//   RaceDetector detector;
//   const size_t a = detector.add_stream("a"), b = detector.add_stream("b");
//   detector.allocate(0x1000, 64, a);
//   detector.run(a, "fill", {{.begin = 0x1000, .bytes = 64, .writes = true}});
//   detector.run(b, "read", {{.begin = 0x1000, .bytes = 64}});
//   EXPECT_EQ(detector.take_races().size(), 1);
//
// Addresses are numbers to it; it reads and writes none of the memory.
//
// Limit: it judges what was enqueued, not what could have been enqueued in
// another order by other threads.
//
// Thread safety: none.

#ifndef BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_RACE_DETECTOR_H_
#define BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_RACE_DETECTOR_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "brigade/tests/support/simulated_device/memory_history.h"
#include "brigade/tests/support/simulated_device/vector_clock.h"

namespace brigade::simulated {

struct Access {
  MemoryHistory::Address begin = 0;
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
  using Address = MemoryHistory::Address;
  // All that lies behind an event, for instance.
  using Moment = VectorClock;

  explicit RaceDetector(bool strict = true) : strict_(strict) {}

  // Streams are numbered from 0.
  size_t add_stream(std::string name);
  const std::string& name_of(size_t stream) const { return names_[stream]; }

  // Threads that wait for each other are one host; there is one at first. A
  // process of a distributed program, which may be a thread here, is another.
  size_t add_host();

  // REQUIRES, of all that follow: streams and hosts that exist.

  // An operation on `stream`. `where` is told with its races.
  void run(size_t stream, std::string name, const std::vector<Access>& accesses,
           size_t host = 0, std::string where = {});

  // What is behind work that `stream` would do now.
  Moment moment(size_t stream, size_t host = 0);

  // What `stream` does from here on is behind `moment`.
  void wait(size_t stream, const Moment& moment, size_t host = 0);

  // What `host` enqueues from here on, anywhere, is behind `moment`.
  void host_waits(const Moment& moment, size_t host = 0);
  bool host_has_waited(const Moment& moment, size_t host = 0) const {
    return hosts_[host].covers(moment);
  }

  // `begin` is in no allocation.
  void allocate(Address begin, size_t bytes, size_t owner);

  // `stream` uses the memory too: it serves its owner again only when `stream`
  // has done what it had been given when the memory was freed. Does nothing if
  // `begin` is not that of an allocation.
  void record_use(Address begin, size_t stream);

  // Returns what the memory must be behind before it may serve its owner again:
  // see may_serve(). REQUIRES: `begin` is that of an allocation.
  Moment free(Address begin, size_t host = 0, std::string where = {});
  bool may_serve(size_t owner, const Moment& moment, size_t host = 0);

  // A race that is found outside, by an operation on `stream`.
  void report(Race race) { races_.push_back(std::move(race)); }

  // Those found since the last call, each pair of operations once.
  std::vector<Race> take_races();

  // The operations that were run.
  int64_t num_operations() const { return num_operations_; }

 private:
  struct Allocation {
    int64_t number;  // counts allocations, from 1
    size_t bytes;
    size_t owner;
    std::set<size_t> recorded;  // streams
  };
  using Allocations = std::map<Address, Allocation>;

  VectorClock& enqueue(size_t stream, size_t host);
  bool is_allocated(const Access& access) const;
  void forget(Address begin, size_t bytes, size_t owner, size_t host);
  void check_uses(const Access& access, const OperationPtr& operation);
  void check_free(Address begin, size_t bytes, const Operation& freeing,
                  const Moment& reuse);
  void tell_unordered(Address at, const Operation& before, bool before_writes,
                      const Operation& now, bool now_writes);
  void tell_early_free(Address at, const Operation& before, bool before_writes,
                       const Operation& freeing);
  bool is_told(const Operation& before, const Operation& now);
  std::string describe(const Operation& operation) const;
  std::string describe(Address at) const;

  const bool strict_;
  std::vector<std::string> names_;         // by stream
  std::vector<VectorClock> streams_;       // by stream
  std::vector<VectorClock> hosts_ = {{}};  // by host
  Allocations allocations_;                // by begin
  MemoryHistory history_;
  std::vector<Race> races_;
  std::set<std::pair<int64_t, int64_t>> told_;  // numbers of two operations
  int64_t num_operations_ = 0;
  int64_t num_allocations_ = 0;
};

}  // namespace brigade::simulated

#endif  // BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_RACE_DETECTOR_H_
