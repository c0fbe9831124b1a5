#include "brigade/fsdp/sharding_timeline.h"

#include <algorithm>
#include <cstddef>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace brigade {
namespace {

// 0 if one of them did not happen.
int64_t between_ns(int64_t begin_ns, int64_t end_ns) {
  if (begin_ns == 0 || end_ns == 0) return 0;
  return std::max<int64_t>(end_ns - begin_ns, 0);
}

double in_ms(int64_t ns) { return static_cast<double>(ns) / 1e6; }

std::string_view name_of(GatheredIn pass) {
  switch (pass) {
    case GatheredIn::kForward:
      return "gather forward";
    case GatheredIn::kBackward:
      return "gather backward";
    case GatheredIn::kOther:
      return "gather";
  }
  return "";
}

}  // namespace

int64_t GatherTimes::travel_ns() const {
  return between_ns(launch_ns, complete_ns);
}

int64_t GatherTimes::exposed_ns() const {
  if (needed_ns == 0) return 0;
  return between_ns(std::max(launch_ns, needed_ns),
                    std::min(complete_ns, whole_ns));
}

int64_t ReductionTimes::travel_ns() const {
  return between_ns(launch_ns, complete_ns);
}

int64_t ShardingTimeline::exposed_ns(size_t reduction) const {
  const ReductionTimes& asked = reductions.at(reduction);
  int64_t covered_until_ns = backward_end_ns;
  for (size_t i = 0; i < reduction; ++i) {
    covered_until_ns = std::max(covered_until_ns, reductions[i].complete_ns);
  }
  return between_ns(std::max(covered_until_ns, asked.launch_ns),
                    asked.complete_ns);
}

std::string describe(const ShardingTimeline& timeline) {
  if (timeline.iteration == 0) return "no iteration has been sampled\n";
  std::string text = absl::StrFormat(
      "iteration %d, ms: forward %.3f, backward %.3f, behind it %.3f\n"
      "%-16s%12s%12s%12s%12s  unit\n",
      timeline.iteration,
      in_ms(between_ns(timeline.forward_begin_ns, timeline.forward_end_ns)),
      in_ms(between_ns(timeline.backward_begin_ns, timeline.backward_end_ns)),
      in_ms(between_ns(timeline.backward_end_ns, timeline.finalize_end_ns)), "",
      "launched", "complete", "overlapped", "exposed");
  const auto append = [&](std::string_view what, const auto& times,
                          int64_t exposed_ns) {
    const auto since_begin = [&](int64_t time_ns) {
      return time_ns == 0
                 ? std::string("-")
                 : absl::StrFormat("%.3f",
                                   in_ms(time_ns - timeline.forward_begin_ns));
    };
    absl::StrAppendFormat(
        &text, "%-16s%12s%12s%12.3f%12.3f  '%s'\n", std::string(what),
        since_begin(times.launch_ns), since_begin(times.complete_ns),
        in_ms(times.travel_ns() - exposed_ns), in_ms(exposed_ns), times.unit);
  };
  for (const GatherTimes& gather : timeline.gathers) {
    append(name_of(gather.pass), gather, gather.exposed_ns());
  }
  for (size_t i = 0; i < timeline.reductions.size(); ++i) {
    append("reduction", timeline.reductions[i], timeline.exposed_ns(i));
  }
  return text;
}

}  // namespace brigade
