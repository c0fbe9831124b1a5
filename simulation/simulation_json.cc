#include "brigade/simulation/simulation_json.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "brigade/planning/collective_cost.h"
#include "brigade/planning/collective_formulas.h"
#include "brigade/simulation/checks.h"
#include "brigade/simulation/training_step.h"

namespace brigade {
namespace {

using Json = nlohmann::json;

// Keys and types of a request. An array lists alternatives.
constexpr std::string_view kRequestSchema = R"({
  "model": ["text", {"name": "text", "layers": "list"}],
  "sequence_length": "integer",
  "batch": "integer",
  "cluster": {
    "device": ["text", {"name": "text", "flops_per_s": "number",
                        "memory_bytes": "number", "memory_bytes_per_s": "number",
                        "utilization": "number"}],
    "hosts": "integer",
    "gpus_per_host": "integer",
    "inside": ["text", {"latency_s": "number", "bytes_per_s": "number"}],
    "between": ["text", {"latency_s": "number", "bytes_per_s": "number"}],
    "nics_per_host": "integer",
    "hosts_per_rack": "integer",
    "oversubscription": "number",
    "jitter": "number",
    "straggler_slowdown": "number",
    "costs": {"all_reduce": "points", "all_gather": "points",
              "reduce_scatter": "points", "concurrency": "integer"}
  },
  "strategy": {
    "kind": "text",
    "shard_ranks": "integer",
    "bucket_caps_bytes": "sizes",
    "plan": "text",
    "next_forward_gather": "flag",
    "reshard_after_forward": ["flag", "text", "sizes"],
    "prefetch_depth": "integer",
    "buffers": "integer",
    "micro_batches": "integer",
    "sync_every_micro_batch": "flag",
    "checkpoint": ["text", "sizes"],
    "parameter_bytes": "integer",
    "gradient_bytes": "integer",
    "optimizer_bytes": "integer"
  }
})";
constexpr std::string_view kLayerSchema = R"({
  "name": "text",
  "tensors": "sizes",
  "forward_flops": "number",
  "activation_bytes": "number",
  "checkpoint_bytes": "number",
  "forward_s": "number",
  "backward_s": "number"
})";

bool is_integer(const Json& value, double most) {
  if (!value.is_number()) return false;
  const auto number = value.get<double>();
  return number >= 0 && number <= most && number == std::floor(number);
}

// So that no sum or product of a few numbers overflows.
bool is_number(const Json& value) {
  return value.is_number() && value.get<double>() >= 0 &&
         value.get<double>() <= 1e40;
}

bool is_size(const Json& value) { return is_integer(value, 0x1p50); }

bool is_point(const Json& value) {
  return value.is_array() && value.size() == 2 && is_size(value[0]) &&
         is_number(value[1]);
}

struct Type {
  const char* name;
  const char* text;
  bool (*matches)(const Json&);
};

constexpr std::array<Type, 7> kTypes = {{
    {"text", "a string", [](const Json& value) { return value.is_string(); }},
    {"flag", "true or false",
     [](const Json& value) { return value.is_boolean(); }},
    {"integer", "an integer from 0 to 2^31 - 1",
     [](const Json& value) { return is_integer(value, 0x7fffffff); }},
    {"number", "a number from 0 to 1e40", is_number},
    {"sizes", "an array of integers from 0 to 2^50",
     [](const Json& value) {
       return value.is_array() && std::ranges::all_of(value, is_size);
     }},
    {"points", "an array of pairs of bytes and seconds",
     [](const Json& value) {
       return value.is_array() && std::ranges::all_of(value, is_point);
     }},
    {"list", "an array", [](const Json& value) { return value.is_array(); }},
}};

// `place`: the key with the keys above it, such as "strategy.kind".
absl::Status bad_request(std::string_view place, std::string_view expected,
                         const Json& found) {
  std::string text = found.dump(-1, ' ', /*ensure_ascii=*/true);
  constexpr size_t kLongest = 60;
  if (text.size() > kLongest) text = text.substr(0, kLongest) + " ...";
  return absl::InvalidArgumentError(absl::StrCat(
      "simulation request", place.empty() ? "" : ", ", std::string(place),
      ": expected ", std::string(expected), ", found ", text));
}

absl::Status check_schema(const std::string& place, const Json& value,
                          const Json& schema);

absl::Status check_keys(const std::string& place, const Json& object,
                        const Json& schema) {
  for (const auto& [key, value] : object.items()) {
    if (!schema.contains(key)) {
      std::string known;
      for (const auto& [name, type] : schema.items()) {
        absl::StrAppend(&known, known.empty() ? "keys " : ", ", name);
      }
      return bad_request(place, known, key);
    }
    absl::Status status = check_schema(
        absl::StrCat(place, place.empty() ? "" : ".", key), value, schema[key]);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status check_schema(const std::string& place, const Json& value,
                          const Json& schema) {
  std::string expected;
  const auto expect = [&](const char* text) {
    absl::StrAppend(&expected, expected.empty() ? "" : " or ", text);
  };
  for (const Json& type : schema.is_array() ? schema : Json::array({schema})) {
    if (type.is_object()) {
      if (value.is_object()) return check_keys(place, value, type);
      expect("an object");
      continue;
    }
    const auto* known =
        std::ranges::find(kTypes, type.get<std::string>(), &Type::name);
    if (known->matches(value)) return absl::OkStatus();
    expect(known->text);
  }
  return bad_request(place, expected, value);
}

// Reads a key if it is there. REQUIRES: check_schema().
template <typename Value>
void read(const Json& object, const char* key, Value& value) {
  if (object.contains(key)) value = object[key].get<Value>();
}

void read(const Json& object, const char* key, std::optional<double>& value) {
  if (object.contains(key)) value = object[key].get<double>();
}

absl::StatusOr<ModelShape> read_model(const Json& request) {
  int sequence_length = 0;
  read(request, "sequence_length", sequence_length);
  if (!request.contains("model")) {
    return bad_request("model", "a name or an object", nullptr);
  }
  const Json& json = request["model"];
  if (json.is_string()) {
    return named_model(json.get<std::string>(), sequence_length);
  }
  ModelShape model = {.name = json.value("name", "model")};
  const Json schema = Json::parse(kLayerSchema);
  for (const Json& item : json.value("layers", Json::array())) {
    const size_t number = model.layers.size();
    absl::Status status =
        check_schema(absl::StrCat("model.layers[", number, "]"), item, schema);
    if (!status.ok()) return status;
    ModelLayer layer = {.name = absl::StrCat("layers.", number)};
    read(item, "name", layer.name);
    read(item, "tensors", layer.tensors);
    read(item, "forward_flops", layer.forward_flops);
    read(item, "activation_bytes", layer.activation_bytes);
    read(item, "checkpoint_bytes", layer.checkpoint_bytes);
    read(item, "forward_s", layer.forward_s);
    read(item, "backward_s", layer.backward_s);
    model.layers.push_back(std::move(layer));
  }
  return model;
}

absl::StatusOr<Device> read_device(const Json& json) {
  if (json.is_string()) return named_device(json.get<std::string>());
  absl::StatusOr<Device> device = Device{};
  if (json.contains("name")) device = named_device(json.value("name", ""));
  if (!device.ok()) return device;
  read(json, "flops_per_s", device->flops_per_s);
  read(json, "memory_bytes", device->memory_bytes);
  read(json, "memory_bytes_per_s", device->memory_bytes_per_s);
  read(json, "utilization", device->utilization);
  return device;
}

absl::StatusOr<LinkSpeed> read_link(const Json& json) {
  if (json.is_string()) return named_link(json.get<std::string>());
  LinkSpeed link;
  read(json, "latency_s", link.latency_s);
  read(json, "bytes_per_s", link.bytes_per_s);
  return link;
}

absl::Status read_costs(const Json& cluster, MeasuredCosts& measured) {
  if (!cluster.contains("costs")) return absl::OkStatus();
  for (const char* link : {"inside", "between", "nics_per_host"}) {
    if (cluster.contains(link)) {
      return bad_request("cluster.costs",
                         absl::StrCat("no costs, or no ", link), "both");
    }
  }
  const Json& costs = cluster["costs"];
  int concurrency = 1;
  read(costs, "concurrency", concurrency);
  absl::Status status =
      check_range("cluster.costs", "concurrency", concurrency, 1, 1024);
  if (!status.ok()) return status;
  for (const auto& [key, cost] :
       {std::pair("all_reduce", &measured.all_reduce),
        std::pair("all_gather", &measured.all_gather),
        std::pair("reduce_scatter", &measured.reduce_scatter)}) {
    if (!costs.contains(key)) continue;
    std::vector<CostPoint> points;
    for (const Json& point : costs[key]) {
      points.push_back({point[0].get<int64_t>(), point[1].get<double>()});
    }
    auto fitted = CollectiveCost::fit(points, concurrency);
    if (!fitted.ok()) {
      return bad_request(absl::StrCat("cluster.costs.", key),
                         std::string(fitted.status().message()), costs[key]);
    }
    *cost = *std::move(fitted);
  }
  return absl::OkStatus();
}

absl::StatusOr<Cluster> read_cluster(const Json& json) {
  Cluster cluster;
  const auto device = read_device(json.value("device", Json("a100")));
  if (!device.ok()) return device.status();
  cluster.device = *device;
  const Json inside = json.value("inside", Json("nvlink3"));
  const Json between = json.value("between", Json("hdr"));
  for (const auto& [link, speed] : {std::pair(&inside, &cluster.inside),
                                    std::pair(&between, &cluster.between)}) {
    const auto found = read_link(*link);
    if (!found.ok()) return found.status();
    *speed = *found;
  }
  // NCCL's latencies hold for its own links, not for numbers or TCP.
  cluster.has_nccl_protocols =
      inside.is_string() && between.is_string() &&
      inside.get<std::string>().starts_with("nvlink") &&
      !between.get<std::string>().starts_with("ethernet");
  read(json, "hosts", cluster.hosts);
  read(json, "gpus_per_host", cluster.gpus_per_host);
  read(json, "nics_per_host", cluster.nics_per_host);
  read(json, "hosts_per_rack", cluster.hosts_per_rack);
  read(json, "oversubscription", cluster.oversubscription);
  read(json, "jitter", cluster.jitter);
  read(json, "straggler_slowdown", cluster.straggler_slowdown);
  const absl::Status status = read_costs(json, cluster.measured);
  if (!status.ok()) return status;
  return cluster;
}

constexpr std::array<std::pair<const char*, StrategyKind>, 7> kKinds = {
    {{"ddp", StrategyKind::kDdp},
     {"zero1", StrategyKind::kZero1},
     {"zero2", StrategyKind::kZero2},
     {"zero3", StrategyKind::kZero3},
     {"fsdp2", StrategyKind::kFsdp2},
     {"yafsdp", StrategyKind::kYaFsdp},
     {"brigade", StrategyKind::kBrigade}}};

// `none` and `all`: the values for no and for all layers.
absl::StatusOr<LayerChoice> read_choice(const Json& strategy, const char* key,
                                        const Json& none, const Json& all) {
  using How = LayerChoice::How;
  if (!strategy.contains(key) || strategy[key] == none) return LayerChoice{};
  const Json& json = strategy[key];
  if (json == all) return LayerChoice{How::kAll};
  if (json == "fit") return LayerChoice{How::kFit};
  if (json.is_array()) {
    return LayerChoice{How::kListed, json.get<std::vector<size_t>>()};
  }
  return bad_request(absl::StrCat("strategy.", key),
                     absl::StrCat(none.dump(), ", ", all.dump(),
                                  ", \"fit\" or indices of layers"),
                     json);
}

absl::StatusOr<Strategy> read_strategy(const Json& json) {
  Strategy strategy;
  const std::string kind = json.value("kind", "");
  const auto* known = std::ranges::find(
      kKinds, kind, [](const auto& pair) { return std::string(pair.first); });
  if (known == kKinds.end()) {
    std::string names;
    for (const auto& [name, value] : kKinds) {
      absl::StrAppend(&names, names.empty() ? "one of " : ", ", name);
    }
    return bad_request("strategy.kind", names, kind);
  }
  strategy.kind = known->second;
  if (json.contains("plan")) {
    strategy.has_exact_plan = json["plan"] == "exact";
    if (!strategy.has_exact_plan || json.contains("bucket_caps_bytes")) {
      return bad_request("strategy.plan", "\"exact\" without bucket_caps_bytes",
                         json["plan"]);
    }
  }
  auto kept = read_choice(json, "reshard_after_forward", true, false);
  if (!kept.ok()) return kept.status();
  strategy.kept = *std::move(kept);
  auto checkpointed = read_choice(json, "checkpoint", "none", "all");
  if (!checkpointed.ok()) return checkpointed.status();
  strategy.checkpointed = *std::move(checkpointed);
  read(json, "shard_ranks", strategy.shard_ranks);
  read(json, "bucket_caps_bytes", strategy.bucket_caps_bytes);
  read(json, "next_forward_gather", strategy.next_forward_gather);
  read(json, "prefetch_depth", strategy.prefetch_depth);
  read(json, "buffers", strategy.buffers);
  read(json, "micro_batches", strategy.micro_batches);
  read(json, "sync_every_micro_batch", strategy.sync_every_micro_batch);
  read(json, "parameter_bytes", strategy.parameter_bytes);
  read(json, "gradient_bytes", strategy.gradient_bytes);
  read(json, "optimizer_bytes", strategy.optimizer_bytes);
  return strategy;
}

Json json_of(const TrainingStep& step, double capacity) {
  constexpr std::array<const char*, 3> kStreams = {"compute", "communication",
                                                   "replication"};
  Json events = Json::array();
  for (const StepEvent& event : step.events) {
    events.push_back({{"stream", kStreams[static_cast<size_t>(event.stream)]},
                      {"name", event.name},
                      {"begin_s", event.begin_s},
                      {"end_s", event.end_s}});
  }
  Json points = Json::array();
  for (const MemoryPoint& point : step.memory_over_step) {
    points.push_back({{"time_s", point.time_s}, {"bytes", point.bytes}});
  }
  return {{"step_s", step.step_s},
          {"forward_s", step.forward_s},
          {"backward_s", step.backward_s},
          {"optimizer_s", step.optimizer_s},
          {"recompute_s", step.recompute_s},
          {"exposed_s", step.exposed_s},
          {"communication_s", step.communication_s},
          {"tflops", step.tflops},
          {"mfu", step.mfu},
          {"sent_bytes_per_rank", step.sent_bytes},
          {"between_hosts_bytes_per_rank", step.between_hosts_bytes},
          {"between_racks_bytes_per_rank", step.between_racks_bytes},
          {"memory",
           {{"parameters", step.memory.parameters},
            {"gradients", step.memory.gradients},
            {"optimizer", step.memory.optimizer},
            {"unsharded", step.memory.unsharded},
            {"activations", step.memory.activations},
            {"total", step.memory.total()},
            {"capacity", capacity},
            {"fits", step.fits}}},
          {"checkpointed_layers", step.checkpointed_layers},
          {"kept_units", step.kept_units},
          {"events", std::move(events)},
          {"memory_over_step", std::move(points)}};
}

}  // namespace

absl::StatusOr<std::string> simulate_json(std::string_view request) {
  // Deeper values match no schema, and a recursion over them could overflow.
  const auto is_shallow = [](int depth, Json::parse_event_t, Json&) {
    return depth < 16;
  };
  const Json json =
      Json::parse(request, is_shallow, /*allow_exceptions=*/false);
  if (json.is_discarded()) {
    return absl::InvalidArgumentError(
        "simulation request: expected JSON, found other text, NaN or a number "
        "out of range");
  }
  if (absl::Status status = check_schema("", json, Json::parse(kRequestSchema));
      !status.ok()) {
    return status;
  }
  const auto model = read_model(json);
  if (!model.ok()) return model.status();
  const auto cluster = read_cluster(json.value("cluster", Json::object()));
  if (!cluster.ok()) return cluster.status();
  const auto strategy = read_strategy(json.value("strategy", Json::object()));
  if (!strategy.ok()) return strategy.status();
  const auto step =
      simulate_step(*model, json.value("batch", 1), *cluster, *strategy);
  if (!step.ok()) return step.status();
  return json_of(*step, cluster->device.memory_bytes)
      .dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace brigade
