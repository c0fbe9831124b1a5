// Where ranks that wait too long ask the others how far they have come.
//
// A stall status lies in the group's store. Nothing is written there until a
// rank asks; then each rank posts a line under its own key.
//
//   StallStatus stall_status(store, prefix, rank, world_size);
//   const int64_t question = stall_status.ask();      // the rank that waits
//   ...
//   if (stall_status.num_questions() > answered) {    // the others
//     stall_status.post(line);
//   }
//
// What lines mean is decided by those who post them.
//
// Thread safety: that of the store. Errors: what the store throws, from every
// method.

#ifndef BRIGADE_COMM_STALL_STATUS_H_
#define BRIGADE_COMM_STALL_STATUS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace brigade {

class StallStatus {
 public:
  // `prefix`: of the stall status's keys, equal on all ranks, and of no other
  // stall status.
  StallStatus(c10::intrusive_ptr<c10d::Store> store, std::string prefix,
              int rank, int world_size);

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

  // Returns the number of questions so far, this one included.
  int64_t ask();

  // One look into the store while nobody has ever asked.
  int64_t num_questions();

  // Replaces this rank's line.
  void post(const std::string& line);

  // The line of `rank`, if it has posted any. Does not wait for one.
  std::optional<std::string> read(int rank);

 private:
  std::string line_key(int rank) const;

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const int world_size_;
  const std::string prefix_;  // equal on all ranks
};

}  // namespace brigade

#endif  // BRIGADE_COMM_STALL_STATUS_H_
