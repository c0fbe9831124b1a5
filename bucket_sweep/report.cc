#include "brigade/bucket_sweep/report.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace brigade {
namespace {

struct Sizes {
  double min = 0;
  double median = 0;
  double max = 0;
};

Sizes sizes_of(const ArmSummary& arm) {
  const std::vector<double> bytes(arm.bucket_bytes.begin(),
                                  arm.bucket_bytes.end());
  return {quantile(bytes, 0), quantile(bytes, 0.5), quantile(bytes, 1)};
}

std::string spread(const Quartiles& times) {
  return absl::StrFormat("[%.1f, %.1f]", times.p25, times.p75);
}

std::string readable_overlap(double overlap) {
  return overlap > 0 ? absl::StrFormat("%.0f %%", 100 * overlap) : "none";
}

std::string row(const ArmSummary& arm, int label_width) {
  const Sizes sizes = sizes_of(arm);
  return absl::StrFormat(
      "%-*s  %7d  %8s %8s %8s  %8.1f %17s  %10.1f  %8.1f  %7s  %s\n",
      label_width, arm.label, arm.bucket_bytes.size(),
      readable_bytes(sizes.min), readable_bytes(sizes.median),
      readable_bytes(sizes.max), arm.step_ms.median, spread(arm.step_ms),
      arm.exposed_ms.median, arm.alone_ms, readable_overlap(arm.overlap()),
      arm.sums_verified ? "right" : "WRONG");
}

std::string readable_cap(int64_t bytes) {
  if (bytes == std::numeric_limits<int64_t>::max()) {
    return "std::numeric_limits<int64_t>::max()";
  }
  return absl::StrCat(bytes);
}

std::string json(const Quartiles& times) {
  return absl::StrFormat("{\"p25\": %.17g, \"median\": %.17g, \"p75\": %.17g}",
                         times.p25, times.median, times.p75);
}

std::string json(bool value) { return value ? "true" : "false"; }

std::string json(const ArmSummary& arm) {
  const Sizes sizes = sizes_of(arm);
  return absl::StrFormat(
      "{\"cap\": %s, \"caps_bytes\": [%s], \"buckets\": %d, \"bucket_bytes\": "
      "{\"min\": %.0f, \"median\": %.17g, \"max\": %.0f}, \"step_ms\": %s, "
      "\"exposed_ms\": %s, \"alone_ms\": %.17g, \"overlap\": %.17g, "
      "\"sums_verified\": %s}",
      json_string(arm.label), absl::StrJoin(arm.caps_bytes, ", "),
      arm.bucket_bytes.size(), sizes.min, sizes.median, sizes.max,
      json(arm.step_ms), json(arm.exposed_ms), arm.alone_ms, arm.overlap(),
      json(arm.sums_verified));
}

std::string json_of_best(const SweepSummary& summary) {
  if (!summary.best) return "null";
  const ArmSummary& arm = summary.arms[summary.best->arm];
  return absl::StrFormat(
      "{\"cap\": %s, \"caps_bytes\": [%s], \"saved_ms\": %s, "
      "\"saved_share\": %.17g, \"rounds_faster\": %d, \"rounds\": %d, "
      "\"decided\": %s}",
      json_string(arm.label), absl::StrJoin(arm.caps_bytes, ", "),
      json(summary.best->saved_ms), summary.best->saved_share,
      summary.best->rounds_faster, summary.best->rounds,
      json(summary.best->decided));
}

}  // namespace

std::string readable_bytes(double bytes) {
  const auto shown = [](double value, const char* unit) {
    return absl::StrFormat("%.*f %s",
                           value >= 100  ? 0
                           : value >= 10 ? 1
                                         : 2,
                           value, unit);
  };
  if (bytes < 1e3) return absl::StrFormat("%.0f B", bytes);
  if (bytes < 1e6) return shown(bytes / 1e3, "kB");
  return shown(bytes / 1e6, "MB");
}

std::string to_text(const std::string& name, const SweepSummary& summary,
                    const std::string& backward) {
  size_t label_width = 10;
  for (const ArmSummary& arm : summary.arms) {
    label_width = std::max(label_width, arm.label.size());
  }
  const auto width = static_cast<int>(label_width);
  std::string text = absl::StrFormat(
      "%s: %d gradients, %s; backward %s; step without a reducer %.1f ms %s\n",
      name, summary.num_parameters,
      readable_bytes(static_cast<double>(summary.gradient_bytes)), backward,
      summary.local_ms.median, spread(summary.local_ms));
  absl::StrAppendFormat(
      &text, "%-*s  %7s  %26s  %8s %17s  %10s  %8s  %7s  %s\n", width, "cap",
      "buckets", "min   median      max", "step ms", "[p25, p75]", "exposed ms",
      "alone ms", "overlap", "sums");
  for (const ArmSummary& arm : summary.arms) text += row(arm, width);
  return text + recommendation(summary) + "\n";
}

std::string recommendation(const SweepSummary& summary) {
  if (!summary.best) {
    return "recommended: the default; every size tried gives its buckets";
  }
  const Recommendation& best = *summary.best;
  if (best.saved_ms.median <= 0) {
    return "recommended: the default; no other size is faster";
  }
  const ArmSummary& arm = summary.arms[best.arm];
  const std::string margin = absl::StrFormat(
      "%.1f ms (%.1f %%) less per step than the default %s, faster in %d of %d "
      "rounds",
      best.saved_ms.median, 100 * best.saved_share, spread(best.saved_ms),
      best.rounds_faster, best.rounds);
  if (!best.decided) {
    return absl::StrCat("recommended: the default; ", arm.label, ": ", margin,
                        ", which may be chance");
  }
  std::vector<std::string> caps;
  for (const int64_t cap : arm.caps_bytes) caps.push_back(readable_cap(cap));
  return absl::StrCat("recommended: bucket_caps_bytes = {",
                      absl::StrJoin(caps, ", "), "} (", arm.label, "); ",
                      margin);
}

std::string json_string(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppendFormat(&quoted, "\\u%04x", static_cast<int>(c));
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

std::string to_json(const std::string& name, const SweepSummary& summary,
                    const std::string& backward) {
  const std::string arms = absl::StrJoin(
      summary.arms, ",\n    ",
      [](std::string* out, const ArmSummary& arm) { out->append(json(arm)); });
  return absl::StrFormat(
      "{\"name\": %s, \"backward\": %s, \"parameters\": %d, "
      "\"gradient_bytes\": %d,\n  \"local_ms\": %s,\n  \"arms\": [\n    %s],\n"
      "  \"best\": %s,\n  \"recommendation\": %s}",
      json_string(name), json_string(backward), summary.num_parameters,
      summary.gradient_bytes, json(summary.local_ms), arms,
      json_of_best(summary), json_string(recommendation(summary)));
}

}  // namespace brigade
