#include "brigade/benchmarks/bucket_size/report.h"

#include <fmt/format.h>

#include <algorithm>

namespace brigade::benchmarks {
namespace {

// "18 kB", "2.36 MB", "154 MB": three digits.
std::string readable_bytes(double bytes) {
  const auto shown = [](double value, const char* unit) {
    return fmt::format("{:.{}f} {}", value,
                       value >= 100  ? 0
                       : value >= 10 ? 1
                                     : 2,
                       unit);
  };
  if (bytes < 1e3) return fmt::format("{:.0f} B", bytes);
  if (bytes < 1e6) return shown(bytes / 1e3, "kB");
  return shown(bytes / 1e6, "MB");
}

std::string readable_overlap(double overlap) {
  return overlap > 0 ? fmt::format("{:.0f} %", 100 * overlap) : "none";
}

std::string row(const ArmResult& arm, size_t label_width) {
  const Quartiles& step = arm.step_ms;
  return fmt::format(
      "{:<{}}  {:>7}  {:>8} {:>8} {:>8}  {:>8.1f} {:>17}  {:>10.1f}  {:>8.1f}  "
      "{:>7}  {}\n",
      arm.label, label_width, arm.num_buckets,
      readable_bytes(static_cast<double>(arm.min_bucket_bytes)),
      readable_bytes(arm.bucket_bytes.median),
      readable_bytes(static_cast<double>(arm.max_bucket_bytes)), step.median,
      fmt::format("[{:.1f}, {:.1f}]", step.p25, step.p75),
      arm.exposed_ms.median, arm.alone_ms, readable_overlap(arm.overlap()),
      arm.sums_verified ? "right" : "WRONG");
}

nlohmann::ordered_json to_json(const Quartiles& quartiles) {
  return {{"p25", quartiles.p25},
          {"median", quartiles.median},
          {"p75", quartiles.p75}};
}

nlohmann::ordered_json to_json(const ArmResult& arm) {
  return {{"cap", arm.label},
          {"buckets", arm.num_buckets},
          {"bucket_bytes",
           {{"min", arm.min_bucket_bytes},
            {"median", arm.bucket_bytes.median},
            {"max", arm.max_bucket_bytes}}},
          {"step_ms", to_json(arm.step_ms)},
          {"exposed_ms", to_json(arm.exposed_ms)},
          {"alone_ms", arm.alone_ms},
          {"overlap", arm.overlap()},
          {"sums_verified", arm.sums_verified}};
}

}  // namespace

std::string to_text(const SetUp& set_up) {
  std::string text;
  for (const auto& [name, value] : set_up) {
    text += fmt::format("{:<9} {}\n", name, value);
  }
  return text;
}

std::string to_text(const ModelReport& report) {
  const Quartiles& local = report.result.local_ms;
  size_t label_width = 10;
  for (const ArmResult& arm : report.result.arms) {
    label_width = std::max(label_width, arm.label.size());
  }
  std::string text = fmt::format(
      "{}: {} gradients, {}; backward {}; step without a reducer {:.1f} ms "
      "[{:.1f}, {:.1f}]\n",
      report.name, report.num_parameters,
      readable_bytes(static_cast<double>(report.gradient_bytes)),
      report.backward, local.median, local.p25, local.p75);
  text += fmt::format(
      "{:<{}}  {:>7}  {:>26}  {:>8} {:>17}  {:>10}  {:>8}  {:>7}  {}\n", "cap",
      label_width, "buckets", "min   median      max", "step ms", "[p25, p75]",
      "exposed ms", "alone ms", "overlap", "sums");
  for (const ArmResult& arm : report.result.arms) text += row(arm, label_width);
  return text;
}

nlohmann::ordered_json to_json(const SetUp& set_up,
                               const std::vector<ModelReport>& reports) {
  nlohmann::ordered_json json;
  for (const auto& [name, value] : set_up) json["set_up"][name] = value;
  for (const ModelReport& report : reports) {
    nlohmann::ordered_json arms = nlohmann::ordered_json::array();
    for (const ArmResult& arm : report.result.arms) {
      arms.push_back(to_json(arm));
    }
    json["models"].push_back({{"name", report.name},
                              {"backward", report.backward},
                              {"parameters", report.num_parameters},
                              {"gradient_bytes", report.gradient_bytes},
                              {"local_ms", to_json(report.result.local_ms)},
                              {"arms", std::move(arms)}});
  }
  return json;
}

}  // namespace brigade::benchmarks
