#include "brigade/observing/timeline.h"

#include <algorithm>
#include <nlohmann/json.hpp>
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

struct Span {
  int64_t begin_ns = 0;
  int64_t end_ns = 0;

  int64_t length_ns() const { return span_ns(begin_ns, end_ns); }
};

// The host's wait for an all-gather.
Span wait_for(const GatherTimes& gather) {
  if (gather.needed_ns == 0) return {};
  return {.begin_ns = std::max(gather.launch_ns, gather.needed_ns),
          .end_ns = std::min(gather.complete_ns, gather.unsharded_ns)};
}

// Returns forward and backward without the host's waits for all-gathers.
std::vector<std::pair<const char*, Span>> computation_of(
    const ShardingTimeline& timeline) {
  std::vector<Span> waits;
  for (const GatherTimes& gather : timeline.gathers) {
    if (gather.exposed_ns() > 0) waits.push_back(wait_for(gather));
  }
  std::ranges::sort(waits, {}, &Span::begin_ns);
  std::vector<std::pair<const char*, Span>> computation;
  const auto add = [&](const char* pass, Span rest) {
    if (rest.length_ns() == 0) return;
    for (const Span& wait : waits) {
      if (wait.end_ns <= rest.begin_ns) continue;
      if (wait.begin_ns >= rest.end_ns) break;
      computation.push_back({pass, {rest.begin_ns, wait.begin_ns}});
      rest.begin_ns = wait.end_ns;
    }
    computation.push_back({pass, rest});
  };
  add("forward", {timeline.forward_begin_ns, timeline.forward_end_ns});
  add("backward", {timeline.backward_begin_ns, timeline.backward_end_ns});
  return computation;
}

double us(int64_t ns) { return static_cast<double>(ns) / 1e3; }
double ms(int64_t ns) { return static_cast<double>(ns) / 1e6; }

// Formats `time_ns` in ms since `begin_ns`; "-" if it did not happen.
std::string time_of(int64_t time_ns, int64_t begin_ns) {
  return time_ns == 0 ? "-" : absl::StrFormat("%.3f", ms(time_ns - begin_ns));
}

// Indexed by GatheredIn.
constexpr std::string_view kGathers[] = {"all-gather, forward",
                                         "all-gather, backward", "all-gather"};

std::string name_of(const auto& times) {
  return times.unit.empty() ? "(root)" : times.unit;
}

std::string none_sampled(std::string_view noun, std::string_view setter) {
  return absl::StrFormat(
      "no %s has been sampled; by default the first %d and then every %dth are "
      "(%s)",
      noun, kAlwaysSampled, kDefaultSampleRate, setter);
}

std::string format_summary(std::string_view noun, int64_t iteration,
                           int64_t compute_ns, int64_t comm_ns,
                           int64_t exposed_ns) {
  const std::string overlap =
      comm_ns == 0 ? "-"
                   : absl::StrFormat("%.0f %%", 100 * ms(comm_ns - exposed_ns) /
                                                    ms(comm_ns));
  return absl::StrFormat(
      "%s %d: compute %.3f ms, communication %.3f ms, %.3f exposed, overlap %s",
      noun, iteration, ms(compute_ns), ms(comm_ns), ms(exposed_ns), overlap);
}

// ---- Chrome traces

using Json = nlohmann::json;

// Threads of a trace. Collectives in flight at the same time have rows of their
// own, after kCommunication.
enum Row { kHost = 1, kPack, kCommunication };

// Categories of events. Kernels have a stream.
constexpr std::string_view kKernel = "kernel";
constexpr std::string_view kNote = "user_annotation";

// One rank's events in the Trace Event Format. Source of names: utils.py and
// trace_file.py of Holistic Trace Analysis 0.5. There an event with a "stream"
// is a kernel; it is communication if its name matches "^nccl.*Kernel",
// otherwise computation. The file's rank follows a space.
class ChromeTrace {
 public:
  explicit ChromeTrace(int rank) : rank_(rank) {
    set_name("process_name", kHost, absl::StrCat("rank ", rank));
    set_name("thread_name", kHost, "host");
    set_name("thread_name", kPack, "pack");
  }

  // Does nothing if the event did not happen.
  void add(Row row, std::string_view category, const std::string& name,
           Span time, Json args = Json::object()) {
    if (time.length_ns() == 0) return;
    const int tid = row == kCommunication ? idle_row_at(time) : row;
    if (category == kKernel) args["stream"] = tid;
    events_.push_back({{"ph", "X"},
                       {"name", name},
                       {"cat", category},
                       {"pid", rank_},
                       {"tid", tid},
                       {"ts", us(time.begin_ns)},
                       {"dur", us(time.length_ns())},
                       {"args", std::move(args)}});
  }

  std::string text() const {
    return Json{{"distributedInfo", {{"rank", rank_}}},
                {"traceEvents", events_}}
        .dump(/*indent=*/1, ' ', false, Json::error_handler_t::replace);
  }

 private:
  void set_name(const char* of, int tid, const std::string& name) {
    events_.push_back({{"ph", "M"},
                       {"name", of},
                       {"pid", rank_},
                       {"tid", tid},
                       {"args", {{"name", name}}}});
  }

  int idle_row_at(Span time) {
    size_t row = 0;
    while (row < busy_until_ns_.size() && busy_until_ns_[row] > time.begin_ns) {
      ++row;
    }
    const int tid = kCommunication + static_cast<int>(row);
    if (row == busy_until_ns_.size()) {
      busy_until_ns_.push_back(0);
      set_name("thread_name", tid, "communication");
    }
    busy_until_ns_[row] = time.end_ns;
    return tid;
  }

  const int rank_;
  Json events_ = Json::array();
  std::vector<int64_t> busy_until_ns_;  // by row of collectives
};

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

std::string summary_line(const Timeline& timeline) {
  if (timeline.iteration == 0) {
    return none_sampled("iteration",
                        "_set_ddp_runtime_logging_sample_rate(), in C++ "
                        "set_timeline_sample_rate()");
  }
  const TimelineSummary summary = summarize(timeline);
  return format_summary(
      "iteration", timeline.iteration,
      summary.forward_compute_ns + summary.backward_compute_ns,
      summary.backward_comm_ns, summary.exposed_ns);
}

std::string describe(const Timeline& timeline) {
  std::string text = summary_line(timeline) + "\n";
  if (timeline.iteration == 0) return text;
  const TimelineSummary summary = summarize(timeline);
  absl::StrAppendFormat(
      &text,
      "forward %.3f ms, backward %.3f ms, finalize (after backward) %.3f ms\n"
      "bucket   packed at launched at complete at     exposed   (ms; 0 = "
      "backward begins)\n",
      ms(summary.forward_compute_ns), ms(summary.backward_compute_ns),
      ms(span_ns(timeline.backward_end_ns, timeline.finalize_end_ns)));
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

std::string to_chrome_trace(const Timeline& timeline, int rank) {
  ChromeTrace trace(rank);
  trace.add(kHost, kKernel, "forward",
            {timeline.forward_begin_ns, timeline.forward_end_ns});
  trace.add(kHost, kKernel, "backward",
            {timeline.backward_begin_ns, timeline.backward_end_ns});
  trace.add(kHost, kNote, "finalize",
            {timeline.backward_end_ns, timeline.finalize_end_ns});
  for (size_t b = 0; b < timeline.units.size(); ++b) {
    const UnitTimes& unit = timeline.units[b];
    const Json args = {{"bucket", b}, {"bytes", unit.bytes}};
    trace.add(kPack, kNote, absl::StrCat("pack bucket ", b),
              {unit.pack_begin_ns, unit.pack_end_ns}, args);
    trace.add(kCommunication, kKernel,
              absl::StrCat("ncclKernel_AllReduce bucket ", b),
              {unit.launch_ns, unit.complete_ns}, args);
  }
  return trace.text();
}

int64_t GatherTimes::exposed_ns() const { return wait_for(*this).length_ns(); }

int64_t ShardingTimeline::exposed_ns(size_t reduction) const {
  const ReductionTimes& times = reductions.at(reduction);
  int64_t covered_until_ns = backward_end_ns;
  for (size_t i = 0; i < reduction; ++i) {
    covered_until_ns = std::max(covered_until_ns, reductions[i].complete_ns);
  }
  return span_ns(std::max(covered_until_ns, times.launch_ns),
                 times.complete_ns);
}

std::string summary_line(const ShardingTimeline& timeline) {
  if (timeline.iteration == 0) {
    return none_sampled("step", "set_timeline_sample_rate()");
  }
  int64_t compute_ns = 0;
  for (const auto& [pass, time] : computation_of(timeline)) {
    compute_ns += time.length_ns();
  }
  int64_t exposed_ns = 0;
  Timeline collectives;
  const auto add = [&](const auto& times, int64_t times_exposed_ns) {
    collectives.units.push_back(
        {.launch_ns = times.launch_ns, .complete_ns = times.complete_ns});
    exposed_ns += times_exposed_ns;
  };
  for (const GatherTimes& gather : timeline.gathers) {
    add(gather, gather.exposed_ns());
  }
  for (size_t i = 0; i < timeline.reductions.size(); ++i) {
    add(timeline.reductions[i], timeline.exposed_ns(i));
  }
  std::ranges::sort(collectives.units, {}, &UnitTimes::launch_ns);
  return format_summary("step", timeline.iteration, compute_ns,
                        summarize(collectives).backward_comm_ns, exposed_ns);
}

std::string describe(const ShardingTimeline& timeline) {
  std::string text = summary_line(timeline) + "\n";
  if (timeline.iteration == 0) return text;
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
    lines.emplace_back(times.launch_ns,
                       absl::StrFormat("%-20s%11s%11s%12.3f%11.3f  %s\n", name,
                                       time_of(times.launch_ns, begin_ns),
                                       time_of(times.complete_ns, begin_ns),
                                       ms(all_ns - exposed_ns), ms(exposed_ns),
                                       name_of(times)));
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
  absl::StrAppendFormat(
      &text,
      "forward 0 to %s ms, backward %s to %s, finalize (after backward) %.3f\n"
      "all-gathers: exposed %.3f of %.3f ms; reduce-scatters: exposed %.3f of "
      "%.3f ms\n"
      "collective             launched   complete  overlapped    exposed  unit"
      "   (ms; 0 = forward begins)\n",
      time_of(timeline.forward_end_ns, begin_ns),
      time_of(timeline.backward_begin_ns, begin_ns),
      time_of(timeline.backward_end_ns, begin_ns),
      ms(span_ns(timeline.backward_end_ns, timeline.finalize_end_ns)),
      ms(gathers.exposed_ns), ms(gathers.all_ns), ms(reductions.exposed_ns),
      ms(reductions.all_ns));
  for (const auto& [launch_ns, line] : lines) text += line;
  return text;
}

std::string to_chrome_trace(const ShardingTimeline& timeline, int rank) {
  ChromeTrace trace(rank);
  for (const auto& [pass, time] : computation_of(timeline)) {
    trace.add(kHost, kKernel, pass, time);
  }
  trace.add(kHost, kNote, "finalize",
            {timeline.backward_end_ns, timeline.finalize_end_ns});
  const auto add_collective = [&](const char* kernel, const auto& times) {
    trace.add(kCommunication, kKernel,
              absl::StrCat(kernel, " ", name_of(times)),
              {times.launch_ns, times.complete_ns},
              {{"unit", times.unit}, {"bytes", times.bytes}});
  };
  for (const GatherTimes& gather : timeline.gathers) {
    add_collective("ncclKernel_AllGather", gather);
    trace.add(kHost, kNote, absl::StrCat("wait for ", name_of(gather)),
              wait_for(gather));
  }
  for (const ReductionTimes& reduction : timeline.reductions) {
    add_collective("ncclKernel_ReduceScatter", reduction);
  }
  return trace.text();
}

}  // namespace brigade
