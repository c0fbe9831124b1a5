// What a step uses memory for, and when: recorded, so that the next one like it
// can be planned exactly (schedule/memory_plan.h).
//
//   UseRecord record;
//   const size_t gather = record.begin({unit, 0, Purpose::kForward}, 64);
//   ...
//   record.end(gather);
//   const std::vector<RecordedUse> step = record.end_step();
//
// Times are positions in the order of begins and ends, so that two steps that
// do the same have equal records.
//
// Thread safety: none.

#ifndef BRIGADE_FSDP_SCHEDULE_MEMORY_USES_H_
#define BRIGADE_FSDP_SCHEDULE_MEMORY_USES_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "brigade/fsdp/schedule/buffer_plan.h"

namespace brigade {

// The pass that a unit is gathered in; kOther: beside them.
enum class GatheredIn { kForward, kBackward, kOther };

enum class Purpose {
  kForward,    // whole, gathered in a forward
  kBackward,   // whole, gathered in a backward
  kOther,      // whole, gathered beside these
  kGradients,  // whole
  kSlice,      // of the whole, from forward to backward
};
inline constexpr size_t kNumPurposes = 5;

Purpose purpose_of(GatheredIn pass);

// Of one segment of a unit.
struct MemoryUse {
  size_t unit;
  size_t segment;
  Purpose purpose;

  friend bool operator==(const MemoryUse&, const MemoryUse&) = default;
};

// A value for each use; grows as it is written to.
template <typename Value>
class ByUse {
 public:
  Value& operator[](const MemoryUse& use) {
    if (use.unit >= values_.size()) values_.resize(use.unit + 1);
    auto& of_unit = values_[use.unit];
    if (use.segment >= of_unit.size()) of_unit.resize(use.segment + 1);
    return of_unit[use.segment][static_cast<size_t>(use.purpose)];
  }
  // Null or a value's default: was not written to.
  const Value* find(const MemoryUse& use) const {
    if (use.unit >= values_.size()) return nullptr;
    const auto& of_unit = values_[use.unit];
    if (use.segment >= of_unit.size()) return nullptr;
    return &of_unit[use.segment][static_cast<size_t>(use.purpose)];
  }

 private:
  std::vector<std::vector<std::array<Value, kNumPurposes>>> values_;
};

struct RecordedUse {
  MemoryUse use;
  BufferUse interval;

  friend bool operator==(const RecordedUse&, const RecordedUse&) = default;
};

class UseRecord {
 public:
  // Returns the number of the use, which no other has, of later steps neither.
  size_t begin(const MemoryUse& use, int64_t bytes);
  // One of an earlier step is no part of this one.
  void end(size_t number);

  // How many uses like this have begun in the step.
  size_t num_begun(const MemoryUse& use) const;

  // Its uses in the order in which they began; another step begins. What has
  // not ended is expected to be there where a step like this begins, and has
  // its memory to itself all the time: what began in this step, and behind that
  // what is there since earlier ones. None if there were more than anybody
  // would plan for: 131,072.
  std::vector<RecordedUse> end_step();

  // What is there since earlier steps, by number.
  const std::map<size_t, RecordedUse>& from_earlier() const {
    return from_earlier_;
  }

 private:
  std::vector<RecordedUse> uses_;
  std::map<size_t, RecordedUse> from_earlier_;  // by number, not over
  ByUse<size_t> num_begun_;
  size_t first_number_ = 0;  // of this step
  int64_t now_ = 0;
  bool is_overfull_ = false;
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_SCHEDULE_MEMORY_USES_H_
