#include "brigade/simulation/simulation_json.h"

#include <array>
#include <chrono>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

const char kFull[] = R"({
  "model": {"name": "net", "layers": [
      {"name": "a", "tensors": [100, 10], "forward_flops": 1e9,
       "activation_bytes": 1000, "checkpoint_bytes": 10},
      {"name": "b", "tensors": [50], "forward_s": 0.5, "backward_s": 1}]},
  "sequence_length": 0, "batch": 2,
  "cluster": {"device": {"name": "a100", "memory_bytes": 1e9},
      "hosts": 4, "gpus_per_host": 8, "inside": "nvlink4",
      "between": {"latency_s": 1e-5, "bytes_per_s": 1e10}, "nics_per_host": 4,
      "hosts_per_rack": 2, "oversubscription": 2, "jitter": 0.01,
      "straggler_slowdown": 1.1},
  "strategy": {"kind": "brigade", "shard_ranks": 8,
      "bucket_caps_bytes": [1000], "reshard_after_forward": [1],
      "prefetch_depth": 2, "buffers": 3, "micro_batches": 2,
      "sync_every_micro_batch": true, "checkpoint": [0],
      "parameter_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": 8,
      "next_forward_gather": false}})";

Json simulate(const Json& request) {
  const auto result = simulate_json(request.dump());
  EXPECT_TRUE(result.ok()) << result.status();
  return Json::parse(*result);
}

TEST(SimulationJsonTest, AllKeysAreRead) {
  const Json result = simulate(Json::parse(kFull));
  EXPECT_EQ(result["checkpointed_layers"], Json({0}));
  EXPECT_EQ(result["kept_units"], Json({1}));
  EXPECT_EQ(result["memory"]["capacity"], 1e9);
  EXPECT_EQ(result["memory"]["fits"], true);
  EXPECT_EQ(result["events"][0]["name"], "all-gather a");
  EXPECT_GT(result["between_racks_bytes_per_rank"], 0);
  EXPECT_GT(result["recompute_s"], 0);
}

const char kMeasured[] = R"({
  "model": {"layers": [{"tensors": [1000], "forward_s": 1}]},
  "cluster": {"gpus_per_host": 2, "device": {"memory_bytes_per_s": 0},
      "costs": {"all_reduce": [[1000, 0.5], [3000, 1.5]], "concurrency": 2}},
  "strategy": {"kind": "ddp", "plan": "exact"}})";

TEST(SimulationJsonTest, MeasuredCostsReplaceLinks) {
  const Json result = simulate(Json::parse(kMeasured));
  EXPECT_NEAR(result["step_s"], 1 + 2 + 1, 1e-9);
  EXPECT_NEAR(result["exposed_s"], 1, 1e-9);
}

TEST(SimulationJsonTest, Llama405BOn16384GpusIsFast) {
  const auto begin = std::chrono::steady_clock::now();
  const Json result =
      simulate({{"model", "llama-405b"},
                {"cluster",
                 {{"device", "h100"},
                  {"hosts", 2048},
                  {"inside", "nvlink4"},
                  {"between", "ndr"},
                  {"hosts_per_rack", 32},
                  {"oversubscription", 7}}},
                {"strategy", {{"kind", "fsdp2"}, {"checkpoint", "fit"}}}});
  const std::chrono::duration<double> taken =
      std::chrono::steady_clock::now() - begin;
  EXPECT_LT(taken.count(), 1);
  EXPECT_EQ(result["memory"]["fits"], true);
  EXPECT_GT(result["mfu"], 0.1);
}

TEST(SimulationJsonTest, ErrorsNameThePlace) {
  struct Case {
    const char* pointer;
    Json value;
    const char* message;
  };
  const Json costs = {{"all_reduce", {{2, 1}}}};
  const std::vector<Case> cases = {
      {"/strategy/bufers", 2, "strategy: expected keys kind, shard_ranks, b"},
      {"/batch", "two",
       "simulation request, batch: expected an integer from 1 to 1073741824, "
       "found \"two\""},
      {"/batch", 0, "batch: expected an integer from 1"},
      {"/sequence_length", 9, "expected none with resnet50 or layers, found 9"},
      {"/model", "llama", "expected one of resnet50"},
      {"/model", 1, "model: expected a string or an object, found 1"},
      {"/model/layers", Json::array(), "with 1 to 100,000 tensors"},
      {"/model/layers/1/tensors", {0}, "model.layers[1].tensors: expected"},
      {"/model/layers/1/tensors", {0x1p50, 1}, "2^50 elements in all"},
      {"/model/layers/0/forward_flops", -1,
       "model.layers[0].forward_flops: expected a number"},
      {"/model/layers/0/backward_s", nullptr, "expected a number"},
      {"/cluster/device", "tpu", "device a100"},
      {"/cluster/device/name", 1, "device.name: expected a string"},
      {"/cluster/device/utilization", 2, "utilization: expected a number"},
      {"/cluster/device/memory_bytes", 1e31, "from 0 to 1e+30"},
      {"/cluster/hosts", 0, "hosts: expected an integer from 1 to 1048576"},
      {"/cluster/gpus_per_host", 1 << 20, "at most 2^20 GPUs"},
      {"/cluster/inside", "nvlink", "link: expected"},
      {"/cluster/between/bytes_per_s", 0, "between.bytes_per_s: expected"},
      {"/cluster/between/latency_s", -1, "between.latency_s: expected"},
      {"/cluster/between", Json::object(), "expected the key bytes_per_s"},
      {"/cluster/hosts_per_rack", 5, "hosts_per_rack: expected at most 4"},
      {"/cluster/hosts_per_rack", 0, "expected 1 without hosts_per_rack"},
      {"/cluster/jitter", 1.5, "jitter: expected a number from 0 to 1"},
      {"/cluster/straggler_slowdown", 0.5, "straggler_slowdown: expected"},
      {"/cluster/costs", Json::object(), "expected no inside, or no costs"},
      {"/cluster", {{"costs", costs}}, "cluster.costs.all_reduce: expected"},
      {"/strategy/kind", "fsdp", "strategy.kind: expected one of ddp, zero1"},
      {"/strategy", Json::object(), "strategy.kind: expected one of ddp"},
      {"/strategy/kind", "ddp", "shard_ranks: expected none with ddp"},
      {"/strategy/kind", "zero2", "reshard_after_forward: expected none with"},
      {"/strategy/next_forward_gather", true, "next_forward_gather: expected"},
      {"/strategy/plan", "exact", "without bucket_caps_bytes"},
      {"/strategy/bucket_caps_bytes", {0}, "array of integers from 1"},
      {"/strategy/bucket_caps_bytes", Json::array(), "must not be empty"},
      {"/strategy/checkpoint", "some", "\"fit\" or indices"},
      {"/strategy/checkpoint", {2}, "integers from 0 to 1, found [2]"},
      {"/strategy/shard_ranks", 3, "shard_ranks"},
      {"/strategy/buffers", 0, "buffers: expected an integer from 1"},
      {"/strategy/micro_batches", 1 << 30, "micro_batches: expected"},
      {"", {{"strategy", {{"kind", "ddp"}}}}, "model: expected a string or an"},
      {"", Json::array(), "simulation request: expected an object"}};
  for (const auto& [pointer, value, message] : cases) {
    Json request = Json::parse(kFull);
    request[Json::json_pointer(pointer)] = value;
    EXPECT_THAT(std::string(simulate_json(request.dump()).status().message()),
                HasSubstr(message));
  }
  EXPECT_FALSE(simulate_json("{\"batch\": NaN}").ok());
  EXPECT_FALSE(simulate_json("").ok());
}

// The values of a request, by pointer.
void list_values(const Json& json, const std::string& pointer,
                 std::vector<std::string>& pointers) {
  pointers.push_back(pointer);
  if (!json.is_structured()) return;
  for (const auto& [key, value] : json.items()) {
    list_values(value, pointer + "/" + key, pointers);
  }
}

TEST(SimulationJsonTest, BrokenRequestsAreErrorsOrResults) {
  std::mt19937 random(3);
  const Json values = Json::parse(R"([null, true, -1, 0, 1, 1.5, 7, 1e9, -1e300,
      1e308, 9223372036854775808, "", "fit", "\u00ff", "ddp", "zero2", "fsdp2",
      "exact", [], {}, {"a": 1}, [1, 2], [[1, 2], [3, 4]]])");
  const std::array<Json, 2> valid = {Json::parse(kFull),
                                     Json::parse(kMeasured)};
  int num_results = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    Json request = valid[trial % 2];
    for (int change = 1 + static_cast<int>(random() % 3); change > 0;
         --change) {
      std::vector<std::string> pointers;
      list_values(request, "", pointers);
      Json& place =
          request[Json::json_pointer(pointers[random() % pointers.size()])];
      place = values[random() % values.size()];
    }
    const auto result = simulate_json(
        request.dump(-1, ' ', false, Json::error_handler_t::replace));
    if (result.ok()) {
      ++num_results;
      EXPECT_EQ(result->find("null"), std::string::npos) << request;
    } else {
      EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_GT(result.status().message().size(), 20);
    }
  }
  EXPECT_GT(num_results, 500);

  const std::string text = valid[0].dump();
  for (int trial = 0; trial < 20000; ++trial) {
    std::string broken = text;
    for (int change = 1 + static_cast<int>(random() % 4); change > 0;
         --change) {
      broken[random() % broken.size()] = static_cast<char>(random());
    }
    (void)simulate_json(broken);
  }
  const std::string deep(1'000'000, '[');
  EXPECT_FALSE(simulate_json(deep).ok());
  EXPECT_FALSE(simulate_json(deep + std::string(deep.size(), ']')).ok());
}

}  // namespace
}  // namespace brigade
