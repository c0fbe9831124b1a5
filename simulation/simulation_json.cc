#include "brigade/simulation/simulation_json.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "brigade/planning/collective_cost.h"
#include "brigade/planning/collective_formulas.h"
#include "brigade/simulation/training_step.h"

namespace brigade {
namespace {

using Json = nlohmann::json;

std::string excerpt(const Json& value) {
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  constexpr size_t kLongest = 60;
  if (text.size() > kLongest) text = text.substr(0, kLongest) + " ...";
  return text;
}

// Reads the keys of one object. The first error stays in a status that all
// objects of a request share; later reads return defaults.
class Fields {
 public:
  // `place`: the object's path, such as "strategy."; empty for the request.
  Fields(const Json& object, std::string place, absl::Status& status)
      : object_(object), place_(std::move(place)), status_(status) {
    if (!object_.is_object()) {
      fail("", "an object", excerpt(object_));
    }
  }

  // Reports keys that were never read.
  void finish() {
    if (!object_.is_object()) return;
    for (const auto& [key, value] : object_.items()) {
      if (known_.find(absl::StrCat("'", key, "'")) == std::string::npos) {
        return fail("", absl::StrCat("keys ", known_), excerpt(key));
      }
    }
  }

  // nullptr: absent.
  const Json* find(const char* key) {
    absl::StrAppend(&known_, known_.empty() ? "'" : ", '", key, "'");
    if (!object_.is_object()) return nullptr;
    const auto found = object_.find(key);
    return found == object_.end() ? nullptr : &*found;
  }

  bool has(const char* key) const {
    return object_.is_object() && object_.contains(key);
  }

  void read(const char* key, double& value) {
    const Json* found = find(key);
    if (found == nullptr) return;
    // So that no sum or product of a few numbers overflows.
    constexpr double kMost = 1e40;
    if (!found->is_number() || !(found->get<double>() >= 0) ||
        found->get<double>() > kMost) {
      return fail(key, "a number from 0 to 1e40", excerpt(*found));
    }
    value = found->get<double>();
  }

  void read(const char* key, std::optional<double>& value) {
    if (!has(key)) return static_cast<void>(find(key));
    double number = 0;
    read(key, number);
    value = number;
  }

  void read(const char* key, int& value) {
    if (const Json* found = find(key)) {
      value = static_cast<int>(
          integer(key, *found, std::numeric_limits<int>::max()));
    }
  }

  void read(const char* key, int64_t& value) {
    if (const Json* found = find(key))
      value = integer(key, *found, kMostInteger);
  }

  void read(const char* key, bool& value) {
    const Json* found = find(key);
    if (found == nullptr) return;
    if (!found->is_boolean())
      return fail(key, "true or false", excerpt(*found));
    value = found->get<bool>();
  }

  template <typename Integer>
  void read(const char* key, std::vector<Integer>& values) {
    const Json* found = find(key);
    if (found == nullptr) return;
    if (!found->is_array()) return fail(key, "an array", excerpt(*found));
    values.clear();
    for (const Json& item : *found) {
      values.push_back(static_cast<Integer>(integer(key, item, kMostInteger)));
    }
  }

  // The text of a key, or `instead` if it is absent.
  std::string text(const char* key, std::string instead) {
    const Json* found = find(key);
    if (found == nullptr) return instead;
    if (!found->is_string()) fail(key, "a string", excerpt(*found));
    return found->is_string() ? found->get<std::string>() : instead;
  }

  void fail(const char* key, const std::string& expected,
            const std::string& found) {
    std::string place = absl::StrCat(place_, key);
    if (!place.empty() && place.back() == '.') place.pop_back();
    add(absl::InvalidArgumentError(
        absl::StrCat("simulation request", place.empty() ? "" : ", ", place,
                     ": expected ", expected, ", found ", found)));
  }
  void add(const absl::Status& status) { status_.Update(status); }
  template <typename Value>
  void take(absl::StatusOr<Value> result, Value& value) {
    if (result.ok()) {
      value = *std::move(result);
    } else {
      add(result.status());
    }
  }

  const std::string& place() const { return place_; }
  absl::Status& status() { return status_; }

 private:
  static constexpr int64_t kMostInteger = int64_t{1} << 50;

  int64_t integer(const char* key, const Json& value, int64_t most) {
    // As double: the value may be unsigned or larger than any integer.
    const double number = value.is_number() ? value.get<double>() : -1;
    if (number < 0 || number > static_cast<double>(most) ||
        number != std::floor(number)) {
      fail(key, absl::StrCat("an integer from 0 to ", most), excerpt(value));
      return 0;
    }
    return static_cast<int64_t>(number);
  }

  const Json& object_;
  const std::string place_;
  absl::Status& status_;
  std::string known_;
};

ModelShape read_model(Fields& request) {
  ModelShape model;
  int64_t sequence_length = 0;
  request.read("sequence_length", sequence_length);
  const Json* found = request.find("model");
  if (found == nullptr) {
    request.fail("model", "a name or an object", "none");
    return model;
  }
  if (found->is_string()) {
    request.take(named_model(found->get<std::string>(), sequence_length),
                 model);
    return model;
  }
  Fields fields(*found, "model.", request.status());
  model.name = fields.text("name", "model");
  const Json* layers = fields.find("layers");
  if (layers == nullptr || !layers->is_array()) {
    fields.fail("layers", "an array",
                layers == nullptr ? "none" : excerpt(*layers));
  } else {
    for (const Json& item : *layers) {
      const size_t number = model.layers.size();
      ModelLayer& layer = model.layers.emplace_back();
      Fields of_layer(item, absl::StrCat("model.layers[", number, "]."),
                      request.status());
      layer.name = of_layer.text("name", absl::StrCat("layers.", number));
      of_layer.read("tensors", layer.tensors);
      of_layer.read("forward_flops", layer.forward_flops);
      of_layer.read("activation_bytes", layer.activation_bytes);
      of_layer.read("checkpoint_bytes", layer.checkpoint_bytes);
      of_layer.read("forward_s", layer.forward_s);
      of_layer.read("backward_s", layer.backward_s);
      of_layer.finish();
    }
  }
  fields.finish();
  return model;
}

Device read_device(Fields& cluster) {
  Device device;
  const Json* found = cluster.find("device");
  const std::string name = found == nullptr     ? "a100"
                           : found->is_string() ? found->get<std::string>()
                                                : "";
  if (!name.empty() || (found != nullptr && found->is_string())) {
    cluster.take(named_device(name), device);
    return device;
  }
  Fields fields(*found, "cluster.device.", cluster.status());
  if (fields.has("name")) {
    cluster.take(named_device(fields.text("name", "")), device);
  } else {
    fields.find("name");
  }
  fields.read("flops_per_s", device.flops_per_s);
  fields.read("memory_bytes", device.memory_bytes);
  fields.read("memory_bytes_per_s", device.memory_bytes_per_s);
  fields.read("utilization", device.utilization);
  fields.finish();
  return device;
}

// Returns the link's name; empty if it is given by numbers.
std::string read_link(Fields& cluster, const char* key, const char* instead,
                      LinkSpeed& link) {
  const Json* found = cluster.find(key);
  if (found == nullptr || found->is_string()) {
    const std::string name =
        found == nullptr ? instead : found->get<std::string>();
    cluster.take(named_link(name), link);
    return name;
  }
  Fields fields(*found, absl::StrCat("cluster.", key, "."), cluster.status());
  link = {};
  fields.read("latency_s", link.latency_s);
  fields.read("bytes_per_s", link.bytes_per_s);
  fields.finish();
  return "";
}

void read_cost(Fields& costs, const char* key, int concurrency,
               std::optional<CollectiveCost>& cost) {
  const Json* found = costs.find(key);
  if (found == nullptr) return;
  std::vector<CostPoint> points;
  bool is_valid = found->is_array();
  for (size_t i = 0; is_valid && i < found->size(); ++i) {
    const Json& point = (*found)[i];
    is_valid = point.is_array() && point.size() == 2 && point[0].is_number() &&
               point[1].is_number() && point[0].get<double>() >= 1 &&
               point[0].get<double>() <= 0x1p60;
    if (!is_valid) break;
    points.push_back(
        {static_cast<int64_t>(point[0].get<double>()), point[1].get<double>()});
  }
  if (!is_valid) {
    return costs.fail(key, "pairs of bytes and seconds", excerpt(*found));
  }
  auto fitted = CollectiveCost::fit(points, concurrency);
  if (fitted.ok()) {
    cost = *std::move(fitted);
  } else {
    costs.fail(key, "a table of a cost",
               std::string(fitted.status().message()));
  }
}

void read_costs(Fields& cluster, MeasuredCosts& measured) {
  const Json* found = cluster.find("costs");
  if (found == nullptr) return;
  for (const char* link : {"inside", "between", "nics_per_host"}) {
    if (cluster.has(link)) {
      return cluster.fail("costs", absl::StrCat("no costs, or no ", link),
                          "both");
    }
  }
  Fields fields(*found, "cluster.costs.", cluster.status());
  int concurrency = 1;
  fields.read("concurrency", concurrency);
  read_cost(fields, "all_reduce", concurrency, measured.all_reduce);
  read_cost(fields, "all_gather", concurrency, measured.all_gather);
  read_cost(fields, "reduce_scatter", concurrency, measured.reduce_scatter);
  fields.finish();
}

Cluster read_cluster(Fields& request) {
  const Json* found = request.find("cluster");
  const Json none = Json::object();
  Fields fields(found == nullptr ? none : *found, "cluster.", request.status());
  Cluster cluster;
  cluster.device = read_device(fields);
  fields.read("hosts", cluster.hosts);
  fields.read("gpus_per_host", cluster.gpus_per_host);
  const std::string inside =
      read_link(fields, "inside", "nvlink3", cluster.inside);
  const std::string between =
      read_link(fields, "between", "hdr", cluster.between);
  // NCCL's latencies hold for its own links, not for numbers or TCP.
  cluster.has_nccl_protocols =
      inside.rfind("nvlink", 0) == 0 &&
      (between == "hdr" || between == "ndr" || between == "roce100");
  fields.read("nics_per_host", cluster.nics_per_host);
  fields.read("hosts_per_rack", cluster.hosts_per_rack);
  fields.read("oversubscription", cluster.oversubscription);
  fields.read("jitter", cluster.jitter);
  fields.read("straggler_slowdown", cluster.straggler_slowdown);
  read_costs(fields, cluster.measured);
  fields.finish();
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

// `words`: the values that are not indices.
LayerChoice read_choice(
    Fields& strategy, const char* key,
    const std::vector<std::pair<Json, LayerChoice::How>>& words) {
  LayerChoice choice;
  if (strategy.has(key)) {
    const Json& found = *strategy.find(key);
    if (found.is_array()) {
      choice.how = LayerChoice::How::kListed;
      strategy.read(key, choice.layers);
      return choice;
    }
    std::string expected;
    for (const auto& [word, how] : words) {
      if (found == word) {
        choice.how = how;
        return choice;
      }
      absl::StrAppend(&expected, word.dump(), ", ");
    }
    strategy.fail(key, expected + "or indices", excerpt(found));
  }
  strategy.find(key);
  return choice;
}

Strategy read_strategy(Fields& request) {
  Strategy strategy;
  const Json* found = request.find("strategy");
  if (found == nullptr) {
    request.fail("strategy", "an object with a kind", "none");
    return strategy;
  }
  Fields fields(*found, "strategy.", request.status());
  const std::string kind = fields.text("kind", "");
  bool is_known = false;
  std::string names;
  for (const auto& [name, known] : kKinds) {
    absl::StrAppend(&names, names.empty() ? "one of " : ", ", name);
    if (kind != name) continue;
    strategy.kind = known;
    is_known = true;
  }
  if (!is_known) fields.fail("kind", names, excerpt(kind));
  fields.read("shard_ranks", strategy.shard_ranks);
  if (fields.has("plan") && fields.has("bucket_caps_bytes")) {
    fields.fail("plan", "a plan or bucket_caps_bytes", "both");
  }
  fields.read("bucket_caps_bytes", strategy.bucket_caps_bytes);
  const std::string plan = fields.text("plan", "");
  strategy.has_exact_plan = plan == "exact";
  if (fields.has("plan") && plan != "exact") {
    fields.fail("plan", "\"exact\"", excerpt(plan));
  }
  fields.read("next_forward_gather", strategy.next_forward_gather);
  using How = LayerChoice::How;
  strategy.kept =
      read_choice(fields, "reshard_after_forward",
                  {{true, How::kNone}, {false, How::kAll}, {"fit", How::kFit}});
  fields.read("prefetch_depth", strategy.prefetch_depth);
  fields.read("buffers", strategy.buffers);
  fields.read("micro_batches", strategy.micro_batches);
  fields.read("sync_every_micro_batch", strategy.sync_every_micro_batch);
  strategy.checkpointed = read_choice(
      fields, "checkpoint",
      {{"none", How::kNone}, {"all", How::kAll}, {"fit", How::kFit}});
  fields.read("parameter_bytes", strategy.parameter_bytes);
  fields.read("gradient_bytes", strategy.gradient_bytes);
  fields.read("optimizer_bytes", strategy.optimizer_bytes);
  fields.finish();
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
  const Json json = Json::parse(request, /*cb=*/nullptr,
                                /*allow_exceptions=*/false);
  if (json.is_discarded()) {
    return absl::InvalidArgumentError(
        "simulation request: expected JSON, found other text, NaN or a number "
        "out of range");
  }
  absl::Status status;
  Fields fields(json, "", status);
  const ModelShape model = read_model(fields);
  const Cluster cluster = read_cluster(fields);
  const Strategy strategy = read_strategy(fields);
  int64_t batch = 1;
  fields.read("batch", batch);
  fields.finish();
  if (!status.ok()) return status;
  const auto step = simulate_step(model, batch, cluster, strategy);
  if (!step.ok()) return step.status();
  return json_of(*step, cluster.device.memory_bytes)
      .dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace brigade
