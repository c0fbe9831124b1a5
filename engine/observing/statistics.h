// What an engine has done so far, in counts.

#ifndef BRIGADE_ENGINE_OBSERVING_STATISTICS_H_
#define BRIGADE_ENGINE_OBSERVING_STATISTICS_H_

#include <cstdint>

namespace brigade {

struct EngineStatistics {
  int64_t prepared = 0;        // calls of prepare()
  int64_t begun = 0;           // iterations; as far as the furthest rank
  int64_t reduced = 0;         // iterations reduced to the end
  int64_t aborted = 0;         // iterations that an error ended
  int64_t units_launched = 0;  // launches that returned, of entries with a unit
  int64_t units_left_out = 0;  // likewise, that nobody had to launch
};

}  // namespace brigade

#endif  // BRIGADE_ENGINE_OBSERVING_STATISTICS_H_
