#include "brigade/simulation/simulation_json.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/planning/bucket_plan.h"
#include "brigade/planning/collective_cost.h"
#include "brigade/planning/collective_formulas.h"
#include "brigade/simulation/training_step.h"

namespace brigade {

NLOHMANN_JSON_SERIALIZE_ENUM(Stream, {{Stream::kCompute, "compute"},
                                      {Stream::kCommunication, "communication"},
                                      {Stream::kReplication, "replication"}})
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StepEvent, stream, name, begin_s, end_s)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(MemoryPoint, time_s, bytes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(MemoryPerRank, parameters, gradients,
                                   optimizer, unsharded, activations)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TrainingStep, step_s, forward_s, backward_s,
                                   optimizer_s, recompute_s, exposed_s,
                                   communication_s, tflops, mfu, memory,
                                   checkpointed_layers, kept_units, events,
                                   memory_over_step)

namespace {

using Json = nlohmann::json;

constexpr double kMostRanks = 1 << 20;
constexpr double kMostBatch = 1 << 30;
constexpr double kMostElements = 0x1p50;
constexpr double kMostSlowdown = 1e6;
constexpr double kMostNumber = 1e30;  // no sum or product of a few overflows

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

// ---- Keys of an object, their types and their ranges.

// A number, or each number in an array, must be in the range. Without a target
// the value is read elsewhere.
struct Key {
  const char* name;
  std::variant<std::monostate, bool*, int*, double*, std::optional<double>*,
               std::string*, std::vector<int64_t>*>
      target = {};
  double least = 0;
  double most = kMostNumber;
};

bool is_number(const Json& value, double least, double most, bool is_integer) {
  if (!value.is_number()) return false;
  const auto number = value.get<double>();
  return number >= least && number <= most &&
         (!is_integer || number == std::floor(number));
}

// Sets `target`, or returns the type and the range that it expected.
template <typename Value>
std::string read(const Json& value, const Key& key, Value* target) {
  const bool is_double = std::is_same_v<Value, double>;
  const auto is_in_range = [&](const Json& number) {
    return is_number(number, key.least, key.most, !is_double);
  };
  std::string type;
  if constexpr (std::is_same_v<Value, bool>) {
    if (!value.is_boolean()) return "true or false";
  } else if constexpr (std::is_same_v<Value, std::string>) {
    if (!value.is_string()) return "a string";
  } else if constexpr (std::is_arithmetic_v<Value>) {
    if (!is_in_range(value)) type = is_double ? "a number" : "an integer";
  } else if (!value.is_array() || !std::ranges::all_of(value, is_in_range)) {
    type = "an array of integers";
  }
  if (!type.empty()) {
    absl::StrAppend(&type, " from ", key.least, " to ");
    return is_double ? absl::StrCat(type, key.most)
                     : absl::StrCat(type, static_cast<int64_t>(key.most));
  }
  *target = value.get<Value>();
  return "";
}

std::string read(const Json& value, const Key& key,
                 std::optional<double>* target) {
  return read(value, key, &target->emplace());
}

std::string read(const Json&, const Key&, std::monostate) { return ""; }

absl::Status read_keys(const std::string& place, const Json& object,
                       const std::vector<Key>& keys,
                       const char* expected_type = "an object") {
  if (!object.is_object()) return bad_request(place, expected_type, object);
  for (const auto& [name, value] : object.items()) {
    const auto key = std::ranges::find(keys, name, &Key::name);
    if (key == keys.end()) {
      std::string known;
      for (const Key& other : keys) {
        absl::StrAppend(&known, known.empty() ? "keys " : ", ", other.name);
      }
      return bad_request(place, known, name);
    }
    const std::string expected =
        std::visit([&json = value, &key = *key](
                       auto target) { return read(json, key, target); },
                   key->target);
    if (expected.empty()) continue;
    return bad_request(absl::StrCat(place, place.empty() ? "" : ".", name),
                       expected, value);
  }
  return absl::OkStatus();
}

// A key that others exclude, if `is_present`.
struct Contradiction {
  bool is_present;
  const char* key;
  std::string expected;
};

absl::Status check_contradictions(const char* place, const Json& object,
                                  const std::vector<Contradiction>& all) {
  for (const auto& [is_present, key, expected] : all) {
    if (!is_present) continue;
    return bad_request(absl::StrCat(place, ".", key), expected,
                       object.value(key, Json()));
  }
  return absl::OkStatus();
}

// Sets `value` unless there was an error.
template <typename Value>
absl::Status set(absl::StatusOr<Value> found, Value& value) {
  if (!found.ok()) return found.status();
  value = *std::move(found);
  return absl::OkStatus();
}

// ---- Objects of a request.

absl::Status read_model(const Json& json, int sequence_length,
                        ModelShape& model) {
  if (sequence_length > 0 && (!json.is_string() || json == "resnet50")) {
    return bad_request("sequence_length", "none with resnet50 or layers",
                       sequence_length);
  }
  if (json.is_string()) {
    return set(named_model(json.get<std::string>(), sequence_length), model);
  }
  model.name = "model";
  absl::Status status =
      read_keys("model", json, {{"name", &model.name}, {"layers"}},
                "a string or an object");
  if (!status.ok()) return status;
  const Json layers = json.value("layers", Json());
  if (!layers.is_array())
    return bad_request("model.layers", "an array", layers);
  size_t num_tensors = 0;
  double elements = 0;
  for (const Json& item : layers) {
    const size_t number = model.layers.size();
    ModelLayer& layer = model.layers.emplace_back();
    layer.name = absl::StrCat("layers.", number);
    status = read_keys(absl::StrCat("model.layers[", number, "]"), item,
                       {{"name", &layer.name},
                        {"tensors", &layer.tensors, 1, kMostElements},
                        {"forward_flops", &layer.forward_flops},
                        {"activation_bytes", &layer.activation_bytes},
                        {"checkpoint_bytes", &layer.checkpoint_bytes},
                        {"forward_s", &layer.forward_s},
                        {"backward_s", &layer.backward_s}});
    if (!status.ok()) return status;
    num_tensors += layer.tensors.size();
    for (const int64_t tensor : layer.tensors) {
      elements += static_cast<double>(tensor);
    }
  }
  const size_t num_layers = model.layers.size();
  if (num_layers > 10'000 || num_tensors == 0 || num_tensors > 100'000 ||
      elements > kMostElements) {
    return bad_request(
        "model",
        "up to 10,000 layers with 1 to 100,000 tensors of 2^50 elements in all",
        {num_layers, num_tensors, elements});
  }
  return absl::OkStatus();
}

absl::Status read_device(const Json& json, Device& device) {
  if (json.is_string()) {
    return set(named_device(json.get<std::string>()), device);
  }
  device = {};
  absl::Status status;
  if (json.is_object() && json.contains("name")) {
    const Json& name = json["name"];
    status = name.is_string()
                 ? read_device(name, device)
                 : bad_request("cluster.device.name", "a string", name);
  }
  status.Update(read_keys("cluster.device", json,
                          {{"name"},
                           {"flops_per_s", &device.flops_per_s},
                           {"memory_bytes", &device.memory_bytes},
                           {"memory_bytes_per_s", &device.memory_bytes_per_s},
                           {"utilization", &device.utilization, 1e-6, 1}},
                          "a string or an object"));
  return status;
}

absl::Status read_link(const std::string& place, const Json& json,
                       LinkSpeed& link) {
  if (json.is_string()) return set(named_link(json.get<std::string>()), link);
  link = {};
  absl::Status status = read_keys(place, json,
                                  {{"latency_s", &link.latency_s, 0, 1e6},
                                   {"bytes_per_s", &link.bytes_per_s, 1}},
                                  "a string or an object");
  if (link.bytes_per_s == 0) {
    status.Update(bad_request(place, "the key bytes_per_s", json));
  }
  return status;
}

absl::Status read_costs(const Json& json, Cluster& cluster) {
  int concurrency = 1;
  // By Collective.
  constexpr std::array<const char*, 3> kNames = {"all_reduce", "all_gather",
                                                 "reduce_scatter"};
  absl::Status status = read_keys("cluster.costs", json,
                                  {{kNames[0]},
                                   {kNames[1]},
                                   {kNames[2]},
                                   {"concurrency", &concurrency, 1, 1024}});
  const auto is_point = [](const Json& item) {
    return item.is_array() && item.size() == 2 &&
           is_number(item[0], 0, kMostElements, /*is_integer=*/true) &&
           is_number(item[1], 0, kMostNumber, /*is_integer=*/false);
  };
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (!status.ok() || !json.contains(kNames[i])) continue;
    const Json& list = json[kNames[i]];
    const auto bad_list = [&](std::string_view expected) {
      return bad_request(absl::StrCat("cluster.costs.", kNames[i]), expected,
                         list);
    };
    if (!list.is_array() || !std::ranges::all_of(list, is_point)) {
      return bad_list("an array of pairs of bytes and seconds");
    }
    std::vector<CostPoint> points;
    for (const Json& item : list) {
      points.push_back({item[0].get<int64_t>(), item[1].get<double>()});
    }
    const auto cost = CollectiveCost::fit(points, concurrency);
    if (!cost.ok()) return bad_list(std::string(cost.status().message()));
    cluster.measured.emplace(static_cast<Collective>(i), *cost);
  }
  return status;
}

absl::Status read_cluster(const Json& json, Cluster& cluster) {
  absl::Status status = read_keys(
      "cluster", json,
      {{"device"},
       {"hosts", &cluster.hosts, 1, kMostRanks},
       {"gpus_per_host", &cluster.gpus_per_host, 1, kMostRanks},
       {"inside"},
       {"between"},
       {"nics_per_host", &cluster.nics_per_host, 0, kMostRanks},
       {"hosts_per_rack", &cluster.hosts_per_rack, 0, kMostRanks},
       {"oversubscription", &cluster.oversubscription, 1, kMostSlowdown},
       {"jitter", &cluster.jitter, 0, 1},
       {"straggler_slowdown", &cluster.straggler_slowdown, 1, kMostSlowdown},
       {"costs"}});
  if (!status.ok()) return status;
  const Json inside = json.value("inside", Json("nvlink3"));
  const Json between = json.value("between", Json("hdr"));
  status.Update(
      read_device(json.value("device", Json("a100")), cluster.device));
  status.Update(read_link("cluster.inside", inside, cluster.inside));
  status.Update(read_link("cluster.between", between, cluster.between));
  status.Update(read_costs(json.value("costs", Json::object()), cluster));
  // NCCL's latencies hold for its own links, not for numbers or TCP.
  cluster.has_nccl_protocols =
      inside.is_string() && between.is_string() &&
      inside.get<std::string>().starts_with("nvlink") &&
      !between.get<std::string>().starts_with("ethernet");

  const bool has_costs = json.contains("costs");
  const auto exclude = [&](const char* key) {
    return Contradiction{has_costs && json.contains(key), key,
                         absl::StrCat("no ", key, ", or no costs")};
  };
  status.Update(check_contradictions(
      "cluster", json,
      {exclude("inside"),
       exclude("between"),
       exclude("nics_per_host"),
       {1.0 * cluster.hosts * cluster.gpus_per_host > kMostRanks,
        "gpus_per_host", "at most 2^20 GPUs in all"},
       {cluster.hosts_per_rack > cluster.hosts, "hosts_per_rack",
        absl::StrCat("at most ", cluster.hosts, " hosts")},
       {cluster.oversubscription > 1 && cluster.hosts_per_rack == 0,
        "oversubscription", "1 without hosts_per_rack"}}));
  return status;
}

// `none` and `all`: the values for no and for all layers.
absl::Status read_choice(const char* name, const Json& json, const Json& none,
                         const Json& all, size_t num_layers,
                         LayerChoice& choice) {
  std::vector<int64_t> layers;
  std::string expected;
  if (json == "fit") {
    choice = std::nullopt;
  } else if (json == none || json == all) {
    choice = std::vector<char>(num_layers, json == all ? 1 : 0);
  } else if (json.is_array()) {
    const double last = static_cast<double>(num_layers) - 1;
    expected = read(json, {.name = name, .most = last}, &layers);
  } else {
    expected = absl::StrCat(none.dump(), ", ", all.dump(),
                            ", \"fit\" or indices of layers");
  }
  for (const int64_t layer : layers) {
    choice->resize(num_layers);
    (*choice)[layer] = 1;
  }
  if (expected.empty()) return absl::OkStatus();
  return bad_request(absl::StrCat("strategy.", name), expected, json);
}

constexpr std::array<const char*, 7> kKinds = {  // by StrategyKind
    "ddp", "zero1", "zero2", "zero3", "fsdp2", "yafsdp", "brigade"};

absl::Status read_strategy(const Json& json, const ModelShape& model,
                           Strategy& strategy) {
  std::string kind;
  std::string plan = "exact";
  const std::vector<Key> keys = {
      {"kind", &kind},
      {"shard_ranks", &strategy.shard_ranks, 0, kMostRanks},
      {"bucket_caps_bytes", &strategy.bucket_caps_bytes, 1, kMostElements},
      {"plan", &plan},
      {"next_forward_gather", &strategy.next_forward_gather},
      {"reshard_after_forward"},
      {"prefetch_depth", &strategy.prefetch_depth, 0, kMostRanks},
      {"buffers", &strategy.buffers, 1, kMostRanks},
      {"micro_batches", &strategy.micro_batches, 1, 100'000},
      {"sync_every_micro_batch", &strategy.sync_every_micro_batch},
      {"checkpoint"},
      {"parameter_bytes", &strategy.parameter_bytes, 1, 8},
      {"gradient_bytes", &strategy.gradient_bytes, 1, 8},
      {"optimizer_bytes", &strategy.optimizer_bytes, 0, 64}};
  absl::Status status = read_keys("strategy", json, keys);
  if (!status.ok()) return status;
  const auto* known = std::ranges::find(kKinds, kind);
  if (known == kKinds.end()) {
    return bad_request("strategy.kind", "one of " + absl::StrJoin(kKinds, ", "),
                       kind);
  }
  strategy.kind = static_cast<StrategyKind>(known - kKinds.begin());
  strategy.has_exact_plan = json.contains("plan");
  status.Update(check_bucket_caps(strategy.bucket_caps_bytes));
  const size_t num_layers = model.layers.size();
  const Json reshard = json.value("reshard_after_forward", Json(true));
  status.Update(read_choice("reshard_after_forward", reshard, true, false,
                            num_layers, strategy.kept));
  status.Update(read_choice("checkpoint",
                            json.value("checkpoint", Json("none")), "none",
                            "all", num_layers, strategy.checkpointed));

  double num_parts = 0;
  for (const ModelLayer& layer : model.layers) {
    num_parts += 1 + static_cast<double>(layer.tensors.size());
  }
  const bool is_ddp = strategy.kind == StrategyKind::kDdp;
  const bool buckets = has_buckets(strategy.kind);
  status.Update(check_contradictions(
      "strategy", json,
      {{plan != "exact" ||
            (strategy.has_exact_plan && json.contains("bucket_caps_bytes")),
        "plan", "\"exact\" without bucket_caps_bytes"},
       {is_ddp && strategy.shard_ranks > 1, "shard_ranks",
        "none with ddp (hybrid sharding has other kinds)"},
       {strategy.next_forward_gather && (is_ddp || !buckets),
        "next_forward_gather",
        "false: ddp gathers nothing, sharded units always gather in forward"},
       {buckets && reshard != true, "reshard_after_forward",
        absl::StrCat("none with ", kind, ", which shards no parameters")},
       {num_parts * strategy.micro_batches > 1e6, "micro_batches",
        absl::StrCat("at most ", 1e6 / num_parts, " with this model")}}));
  return status;
}

Json json_of(const TrainingStep& step, double capacity) {
  Json json = step;
  json["memory"].update({{"total", step.memory.total()},
                         {"capacity", capacity},
                         {"fits", step.fits}});
  json.update(
      {{"sent_bytes_per_rank", step.traffic.sent_bytes},
       {"between_hosts_bytes_per_rank", step.traffic.between_hosts_bytes},
       {"between_racks_bytes_per_rank", step.traffic.between_racks_bytes}});
  return json;
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
  int sequence_length = 0;
  int batch = 1;
  absl::Status status =
      read_keys("", json,
                {{"model"},
                 {"sequence_length", &sequence_length, 0, kMostBatch},
                 {"batch", &batch, 1, kMostBatch},
                 {"cluster"},
                 {"strategy"}});
  if (!status.ok()) return status;
  ModelShape model;
  Cluster cluster;
  Strategy strategy;
  const Json none = Json::object();
  status.Update(
      read_model(json.value("model", Json()), sequence_length, model));
  status.Update(read_cluster(json.value("cluster", none), cluster));
  status.Update(read_strategy(json.value("strategy", none), model, strategy));
  if (!status.ok()) return status;
  const auto step = simulate_step(model, batch, cluster, strategy);
  if (!step.ok()) return step.status();
  return json_of(*step, cluster.device.memory_bytes)
      .dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace brigade
