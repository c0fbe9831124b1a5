#include "brigade/observing/timeline.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace brigade {
namespace {

// Returns 0 if begin or end did not happen.
int64_t span_ns(int64_t begin_ns, int64_t end_ns) {
  if (begin_ns == 0 || end_ns == 0) return 0;
  return std::max<int64_t>(end_ns - begin_ns, 0);
}

double ms(int64_t ns) { return static_cast<double>(ns) / 1e6; }

// Formats `time_ns` in ms since `begin_ns`; "-" if it did not happen.
std::string time_of(int64_t time_ns, int64_t begin_ns) {
  return time_ns == 0 ? "-" : absl::StrFormat("%.3f", ms(time_ns - begin_ns));
}

// Indexed by GatheredIn.
constexpr std::string_view kGathers[] = {"all-gather, forward",
                                         "all-gather, backward", "all-gather"};

std::string none_sampled(std::string_view noun, std::string_view setter) {
  return absl::StrFormat(
      "no %s has been sampled; by default the first %d and then every %dth are "
      "(%s)\n",
      noun, kAlwaysSampled, kDefaultSampleRate, setter);
}

}  // namespace

TimelineSummary summarize(const Timeline& timeline) {
  TimelineSummary summary = {
      .forward_compute_ns =
          span_ns(timeline.forward_begin_ns, timeline.forward_end_ns),
      .backward_compute_ns =
          span_ns(timeline.backward_begin_ns, timeline.backward_end_ns)};
  // Units are in launch order: each adds its time after earlier completions.
  int64_t covered_until_ns = 0;
  for (const UnitTimes& unit : timeline.units) {
    const int64_t begin_ns = std::max(unit.launch_ns, covered_until_ns);
    int64_t exposed_ns = 0;
    if (unit.launch_ns > 0 && unit.complete_ns > begin_ns) {
      summary.backward_comm_ns += unit.complete_ns - begin_ns;
      exposed_ns = std::max<int64_t>(
          unit.complete_ns - std::max(begin_ns, timeline.backward_end_ns), 0);
      covered_until_ns = unit.complete_ns;
    }
    if (summary.comm_begin_ns == 0) summary.comm_begin_ns = unit.launch_ns;
    summary.comm_end_ns = std::max(summary.comm_end_ns, unit.complete_ns);
    summary.exposed_ns += exposed_ns;
    summary.unit_exposed_ns.push_back(exposed_ns);
  }
  summary.overlap_ns = summary.backward_comm_ns - summary.exposed_ns;
  return summary;
}

std::string describe(const Timeline& timeline) {
  if (timeline.iteration == 0) {
    return none_sampled("iteration",
                        "_set_ddp_runtime_logging_sample_rate(), in C++ "
                        "set_timeline_sample_rate()");
  }
  const TimelineSummary summary = summarize(timeline);
  std::string text = absl::StrFormat(
      "iteration %d: forward %.3f ms, backward %.3f ms, finalize (after "
      "backward) %.3f ms\n"
      "communication %.3f ms: %.3f overlapped with backward, %.3f exposed\n"
      "bucket   packed at launched at complete at     exposed   (ms; 0 = "
      "backward begins)\n",
      timeline.iteration, ms(summary.forward_compute_ns),
      ms(summary.backward_compute_ns),
      ms(span_ns(timeline.backward_end_ns, timeline.finalize_end_ns)),
      ms(summary.backward_comm_ns), ms(summary.overlap_ns),
      ms(summary.exposed_ns));
  const int64_t begin_ns = timeline.backward_begin_ns;
  for (size_t b = 0; b < timeline.units.size(); ++b) {
    const UnitTimes& unit = timeline.units[b];
    absl::StrAppendFormat(
        &text, "%6d%12s%12s%12s%12.3f\n", b,
        time_of(unit.pack_end_ns, begin_ns), time_of(unit.launch_ns, begin_ns),
        time_of(unit.complete_ns, begin_ns), ms(summary.unit_exposed_ns[b]));
  }
  return text;
}

int64_t GatherTimes::exposed_ns() const {
  if (needed_ns == 0) return 0;
  return span_ns(std::max(launch_ns, needed_ns),
                 std::min(complete_ns, unsharded_ns));
}

int64_t ShardingTimeline::exposed_ns(size_t reduction) const {
  const ReductionTimes& times = reductions.at(reduction);
  int64_t covered_until_ns = backward_end_ns;
  for (size_t i = 0; i < reduction; ++i) {
    covered_until_ns = std::max(covered_until_ns, reductions[i].complete_ns);
  }
  return span_ns(std::max(covered_until_ns, times.launch_ns),
                 times.complete_ns);
}

std::string describe(const ShardingTimeline& timeline) {
  if (timeline.iteration == 0) {
    return none_sampled("step", "set_timeline_sample_rate()");
  }
  struct Total {
    int64_t exposed_ns = 0;
    int64_t all_ns = 0;
  };
  const int64_t begin_ns = timeline.forward_begin_ns;
  std::vector<std::pair<int64_t, std::string>> lines;  // by launch_ns
  const auto append = [&](Total& total, std::string_view name,
                          const auto& times, int64_t exposed_ns) {
    const int64_t all_ns = span_ns(times.launch_ns, times.complete_ns);
    total.exposed_ns += exposed_ns;
    total.all_ns += all_ns;
    lines.emplace_back(
        times.launch_ns,
        absl::StrFormat("%-20s%11s%11s%12.3f%11.3f  %s\n", name,
                        time_of(times.launch_ns, begin_ns),
                        time_of(times.complete_ns, begin_ns),
                        ms(all_ns - exposed_ns), ms(exposed_ns),
                        times.unit.empty() ? "(root)" : times.unit));
  };
  Total gathers, reductions;
  for (const GatherTimes& gather : timeline.gathers) {
    append(gathers, kGathers[static_cast<size_t>(gather.pass)], gather,
           gather.exposed_ns());
  }
  for (size_t i = 0; i < timeline.reductions.size(); ++i) {
    append(reductions, "reduce-scatter", timeline.reductions[i],
           timeline.exposed_ns(i));
  }
  std::ranges::stable_sort(lines, {}, &decltype(lines)::value_type::first);
  std::string text = absl::StrFormat(
      "step %d: forward 0 to %s ms, backward %s to %s, finalize (after "
      "backward) %.3f\n"
      "all-gathers: exposed %.3f of %.3f ms; reduce-scatters: exposed %.3f of "
      "%.3f ms\n"
      "collective             launched   complete  overlapped    exposed  unit"
      "   (ms; 0 = forward begins)\n",
      timeline.iteration, time_of(timeline.forward_end_ns, begin_ns),
      time_of(timeline.backward_begin_ns, begin_ns),
      time_of(timeline.backward_end_ns, begin_ns),
      ms(span_ns(timeline.backward_end_ns, timeline.finalize_end_ns)),
      ms(gathers.exposed_ns), ms(gathers.all_ns), ms(reductions.exposed_ns),
      ms(reductions.all_ns));
  for (const auto& [launch_ns, line] : lines) text += line;
  return text;
}

}  // namespace brigade
