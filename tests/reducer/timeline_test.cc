#include "brigade/observing/timeline.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "brigade/comm/process_group.h"
#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/observing/timeline_recorder.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/reducer/toy_model.h"
#include "brigade/tests/support/local_ranks.h"
#include "brigade/tests/support/undefined_gradient.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace timeline_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::run_ranks;
using ::testing::StartsWith;
using testing::step;
using testing::ToyModel;
using ::testing::UnorderedElementsAre;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// ---- Summaries

TEST(TimelineSummaryTest, SplitsCommunicationIntoOverlapAndExposed) {
  const TimelineSummary summary =
      summarize({.iteration = 1,
                 .forward_begin_ns = 1,
                 .forward_end_ns = 4,
                 .backward_begin_ns = 5,
                 .backward_end_ns = 30,
                 .finalize_end_ns = 50,
                 .units = {{.launch_ns = 10, .complete_ns = 20},
                           {.launch_ns = 15, .complete_ns = 40},
                           {},  // not communicated
                           {.launch_ns = 29, .complete_ns = 35},
                           {.launch_ns = 30, .complete_ns = 42}}});
  EXPECT_EQ(summary.forward_compute_ns, 3);
  EXPECT_EQ(summary.backward_compute_ns, 25);
  EXPECT_EQ(summary.backward_comm_ns, 32);
  EXPECT_EQ(summary.overlap_ns, 20);
  EXPECT_EQ(summary.exposed_ns, 12);
  EXPECT_THAT(summary.unit_exposed_ns, ElementsAre(0, 10, 0, 0, 2));
  EXPECT_EQ(summary.comm_begin_ns, 10);
  EXPECT_EQ(summary.comm_end_ns, 42);
}

TEST(TimelineSummaryTest, IsPrintedAsATable) {
  EXPECT_THAT(describe(Timeline{}),
              StartsWith("no iteration has been sampled; by default the first "
                         "10 and then every 100th are"));
  EXPECT_EQ(
      describe({.iteration = 12,
                .forward_begin_ns = 1'000'000,
                .forward_end_ns = 3'500'000,
                .backward_begin_ns = 4'000'000,
                .backward_end_ns = 10'000'000,
                .finalize_end_ns = 12'250'000,
                .units = {{.pack_begin_ns = 5'000'000,
                           .pack_end_ns = 5'250'000,
                           .launch_ns = 5'500'000,
                           .complete_ns = 12'000'000},
                          {}}}),
      "iteration 12: compute 8.500 ms, communication 6.500 ms, 2.000 exposed, "
      "overlap 69 %\n"
      "forward 2.500 ms, backward 6.000 ms, finalize (after backward) 2.250 "
      "ms\n"
      "bucket   packed at launched at complete at     exposed   (ms; 0 = "
      "backward begins)\n"
      "     0       1.250       1.500       8.000       2.000\n"
      "     1           -           -           -       0.000\n");
}

TEST(TimelineSummaryTest, HasNoOverlapWithoutCommunication) {
  EXPECT_EQ(summary_line(Timeline{.iteration = 1}),
            "iteration 1: compute 0.000 ms, communication 0.000 ms, 0.000 "
            "exposed, overlap -");
}

ShardingTimeline sharded_step(const std::string& unit) {
  return {.iteration = 7,
          .forward_begin_ns = 1'000'000,
          .forward_end_ns = 4'000'000,
          .backward_begin_ns = 5'000'000,
          .backward_end_ns = 9'000'000,
          .finalize_end_ns = 11'000'000,
          .gathers = {{.pass = GatheredIn::kForward,
                       .launch_ns = 1'500'000,
                       .complete_ns = 3'500'000,
                       .needed_ns = 3'000'000,
                       .unsharded_ns = 3'500'000,
                       .bytes = 64},
                      {.unit = unit,
                       .pass = GatheredIn::kBackward,
                       .launch_ns = 8'500'000,
                       .complete_ns = 9'000'000}},
          .reductions = {{.launch_ns = 8'000'000, .complete_ns = 11'000'000}}};
}

TEST(ShardingTimelineTest, IsPrintedAsATableInTheOrderOfTheLaunches) {
  EXPECT_EQ(
      describe(sharded_step("blocks.0")),
      "step 7: compute 6.500 ms, communication 5.000 ms, 2.500 exposed, "
      "overlap 50 %\n"
      "forward 0 to 3.000 ms, backward 4.000 to 8.000, finalize (after "
      "backward) 2.000\n"
      "all-gathers: exposed 0.500 of 2.500 ms; reduce-scatters: exposed 2.000 "
      "of 3.000 ms\n"
      "collective             launched   complete  overlapped    exposed  unit"
      "   (ms; 0 = forward begins)\n"
      "all-gather, forward       0.500      2.500       1.500      0.500  "
      "(root)\n"
      "reduce-scatter            7.000     10.000       1.000      2.000  "
      "(root)\n"
      "all-gather, backward      7.500      8.000       0.500      0.000  "
      "blocks.0\n");
}

// ---- Chrome traces

using Json = nlohmann::json;

// Returns "<tid> <category>: <name> <begin> + <duration>" of each event, in us.
std::vector<std::string> events_of(const Json& trace, int rank) {
  std::vector<std::string> events;
  for (const Json& event : trace["traceEvents"]) {
    EXPECT_EQ(event["pid"], rank);
    if (event["ph"] != "X") continue;
    events.push_back(absl::StrFormat(
        "%d %s: %s %g + %g", event["tid"].get<int>(),
        event["cat"].get<std::string>(), event["name"].get<std::string>(),
        event["ts"].get<double>(), event["dur"].get<double>()));
  }
  return events;
}

TEST(ChromeTraceTest, HasAnEventPerPassAndBucket) {
  const std::string text =
      to_chrome_trace(Timeline{.iteration = 12,
                               .forward_begin_ns = 1'000'000,
                               .forward_end_ns = 3'500'000,
                               .backward_begin_ns = 4'000'000,
                               .backward_end_ns = 10'000'000,
                               .finalize_end_ns = 12'250'500,
                               .units = {{.pack_begin_ns = 5'000'000,
                                          .pack_end_ns = 5'250'000,
                                          .launch_ns = 5'500'000,
                                          .complete_ns = 12'000'000},
                                         {},
                                         {.launch_ns = 6'000'000,
                                          .complete_ns = 7'000'000,
                                          .bytes = 8}}},
                      /*rank=*/3);
  // Holistic Trace Analysis finds the rank by the space.
  EXPECT_THAT(text, HasSubstr("\"rank\": 3\n"));
  const Json trace = Json::parse(text);
  EXPECT_THAT(events_of(trace, 3),
              ElementsAre("1 kernel: forward 1000 + 2500",
                          "1 kernel: backward 4000 + 6000",
                          "1 user_annotation: finalize 10000 + 2250.5",
                          "2 user_annotation: pack bucket 0 5000 + 250",
                          "3 kernel: ncclKernel_AllReduce bucket 0 5500 + 6500",
                          "4 kernel: ncclKernel_AllReduce bucket 2 6000 + "
                          "1000"));
  EXPECT_EQ(trace["traceEvents"].back()["args"],
            Json({{"bucket", 2}, {"bytes", 8}, {"stream", 4}}));
  EXPECT_EQ(trace["traceEvents"][0]["args"]["name"], "rank 3");
}

TEST(ChromeTraceTest, LeavesWaitsOutOfTheComputationOfAShardedStep) {
  const Json trace =
      Json::parse(to_chrome_trace(sharded_step("\"0\"\n\xff"), /*rank=*/0));
  EXPECT_THAT(
      events_of(trace, 0),
      UnorderedElementsAre(
          "1 kernel: forward 1000 + 2000",
          "1 user_annotation: wait for (root) 3000 + 500",
          "1 kernel: forward 3500 + 500", "1 kernel: backward 5000 + 4000",
          "1 user_annotation: finalize 9000 + 2000",
          "3 kernel: ncclKernel_AllGather (root) 1500 + 2000",
          "3 kernel: ncclKernel_AllGather \"0\"\n\xEF\xBF\xBD 8500 + 500",
          "4 kernel: ncclKernel_ReduceScatter (root) 8000 + 3000"));
}

TEST(ChromeTraceTest, HasNoEventsIfNothingWasSampled) {
  EXPECT_THAT(events_of(Json::parse(to_chrome_trace(Timeline{}, 0)), 0),
              ElementsAre());
}

// ---- Recorder

TEST(TimelineRecorderTest, AFutureMayCompleteAfterTheRecorderIsDestroyed) {
  auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
  {
    TimelineRecorder recorder;
    recorder.bind({at::kCPU}, /*num_variables=*/1);
    recorder.prepared(1);
    recorder.launch_begins(0, /*bytes=*/4);
    recorder.launched(0, *future);
  }
  future->markCompleted(at::ones({1}));
}

TEST(TimelineRecorderTest, ALateFutureDoesNotSpoilTheNextTimeline) {
  const auto make_future = [] {
    return c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
  };
  const auto abandoned = make_future();
  const auto open = make_future();
  TimelineRecorder recorder;
  recorder.bind({at::kCPU}, /*num_variables=*/1);
  recorder.prepared(1);
  recorder.launch_begins(0, /*bytes=*/4);
  recorder.launched(0, *abandoned);
  recorder.prepared(2);  // iteration 1 was aborted
  recorder.launch_begins(0, /*bytes=*/4);
  recorder.launched(0, *open);
  abandoned->markCompleted(at::ones({1}));
  recorder.finalized();
  EXPECT_EQ(recorder.last().iteration, 2);
  EXPECT_EQ(recorder.last().units[0].complete_ns, 0);
}

// ---- Timelines of a reducer

const ToyModel::Sizes kSizes = {{3, 2}, {5}, {7}};
// In launch order {2}, {1, 0}.
const ReducerOptions kTwoBuckets = {.bucket_plan = {{2}, {1, 0}}};

void train(Reducer& reducer, const ToyModel& model, int rank) {
  model.zero_grad();
  reducer.forward_begins();
  step(reducer, model.loss_in_order({2, 0, 1}, rank));
}

std::vector<size_t> order_of(const Timeline& timeline) {
  std::vector<size_t> order;
  for (const GradientTime& gradient : timeline.gradients) {
    order.push_back(gradient.variable.parameter);
  }
  return order;
}

void expect_ascending(const std::vector<int64_t>& times_ns) {
  EXPECT_GT(times_ns.front(), 0);
  for (size_t i = 1; i < times_ns.size(); ++i) {
    EXPECT_LE(times_ns[i - 1], times_ns[i]) << "at " << i;
  }
}

class TimelineOnRanksTest : public ::testing::TestWithParam<int> {};

TEST_P(TimelineOnRanksTest, StampsTheStepsInTheirOrder) {
  run_ranks(GetParam(), [](const Group& group) {
    const ToyModel model(kSizes);
    Reducer reducer(model.parameters, group, kTwoBuckets);
    EXPECT_EQ(reducer.timeline().iteration, 0);
    for (int64_t iteration = 1; iteration <= 3; ++iteration) {
      train(reducer, model, group->getRank());
      const Timeline timeline = reducer.timeline();
      EXPECT_EQ(timeline.iteration, iteration);
      EXPECT_THAT(order_of(timeline), ElementsAre(2, 0, 1));
      ASSERT_EQ(timeline.units.size(), 2);
      const UnitTimes& first = timeline.units[0];
      const UnitTimes& second = timeline.units[1];
      EXPECT_EQ(first.bytes, 7 * sizeof(float));
      // Bucket 0 is packed and launched between gradients.
      expect_ascending(
          {timeline.forward_begin_ns, timeline.forward_end_ns,
           timeline.backward_begin_ns, timeline.gradients[0].ready_ns,
           first.pack_begin_ns, first.pack_end_ns, first.launch_ns,
           timeline.gradients[1].ready_ns, timeline.gradients[2].ready_ns,
           second.pack_begin_ns, second.pack_end_ns, second.launch_ns,
           timeline.backward_end_ns, timeline.finalize_end_ns});
      expect_ascending(
          {first.launch_ns, first.complete_ns, timeline.finalize_end_ns});
      expect_ascending(
          {second.launch_ns, second.complete_ns, timeline.finalize_end_ns});
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, TimelineOnRanksTest, ::testing::Values(1, 2));

std::vector<int64_t> sampled_of(Reducer& reducer, const ToyModel& model,
                                int64_t last) {
  std::vector<int64_t> sampled;
  for (int64_t iteration = 1; iteration <= last; ++iteration) {
    train(reducer, model, /*rank=*/0);
    const int64_t latest = reducer.timeline().iteration;
    if (latest == iteration) sampled.push_back(latest);
  }
  return sampled;
}

TEST(TimelineTest, SamplesTheFirstTenIterationsAndThenEveryNth) {
  const ToyModel model(kSizes);
  Reducer reducer(model.parameters, single_process_group());
  reducer.set_timeline_sample_rate(8);
  EXPECT_THAT(sampled_of(reducer, model, 25),
              ElementsAre(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 16, 24));
  reducer.set_timeline_sample_rate(13);
  EXPECT_EQ(reducer.timeline().iteration, 24);
  train(reducer, model, /*rank=*/0);
  EXPECT_EQ(reducer.timeline().iteration, 26);
}

TEST(TimelineTest, RecordsNothingAtRateZero) {
  const ToyModel model(kSizes);
  Reducer reducer(model.parameters, single_process_group());
  reducer.set_timeline_sample_rate(0);
  EXPECT_THAT(sampled_of(reducer, model, 3), ElementsAre());
  reducer.set_timeline_sample_rate(1);
  train(reducer, model, /*rank=*/0);
  EXPECT_EQ(reducer.timeline().iteration, 4);
  EXPECT_THROW(reducer.set_timeline_sample_rate(-1), c10::ValueError);
}

TEST(TimelineTest, LeavesOutUnusedParametersAndFollowsARebuiltPlan) {
  const ToyModel model(kSizes);
  Reducer reducer(model.parameters, single_process_group(),
                  {.bucket_cap_bytes = {45}, .static_graph = true});
  for (int iteration = 1; iteration <= 3; ++iteration) {
    step(reducer, model.loss_in_order({0, 2}, /*rank=*/0));
    const Timeline timeline = reducer.timeline();
    EXPECT_EQ(timeline.iteration, iteration);
    EXPECT_THAT(order_of(timeline), ElementsAre(0, 2));
    EXPECT_EQ(timeline.units.size(), iteration <= 2 ? 2 : 1);
    EXPECT_EQ(timeline.forward_begin_ns, 0);
  }
}

TEST(TimelineTest, AShadowedIterationLeavesTheLastOne) {
  const ToyModel model(kSizes);
  Reducer reducer(model.parameters, single_process_group());
  train(reducer, model, /*rank=*/0);
  reducer.shadow_iteration();
  EXPECT_EQ(reducer.timeline().iteration, 1);
  train(reducer, model, /*rank=*/0);
  EXPECT_EQ(reducer.timeline().iteration, 3);
}

TEST(TimelineTest, LeavesOutUndefinedGradients) {
  const ToyModel model(kSizes);
  Reducer reducer(model.parameters, single_process_group(),
                  {.find_unused_parameters = true});
  testing::step(reducer,
                model.loss_in_order({0, 1}, 0) +
                    testing::Undefined::apply(model.loss_in_order({2}, 0)));
  EXPECT_THAT(order_of(reducer.timeline()), UnorderedElementsAre(0, 1));
}

TEST(TimelineTest, AnIterationThatIsAbortedLeavesTheLastOne) {
  const ToyModel model(kSizes);
  const Group group = single_process_group();
  bool fails = false;
  Reducer reducer(model.parameters, group,
                  {.comm_hook = make_comm_hook([&](c10d::GradBucket& bucket) {
                     TORCH_CHECK(!fails, "the hook is out of order");
                     return testing::all_reduced(group, bucket);
                   })});
  train(reducer, model, /*rank=*/0);
  EXPECT_FALSE(reducer.last_error().has_value());
  fails = true;
  EXPECT_ANY_THROW(train(reducer, model, /*rank=*/0));
  EXPECT_EQ(reducer.timeline().iteration, 1);
  ASSERT_TRUE(reducer.last_error().has_value());
  EXPECT_EQ(reducer.last_error()->iteration, 2);
  EXPECT_THAT(reducer.last_error()->text,
              HasSubstr("the hook is out of order"));
  fails = false;
  train(reducer, model, /*rank=*/0);
  EXPECT_EQ(reducer.timeline().iteration, 3);
  EXPECT_EQ(reducer.last_error()->iteration, 2);
}

TEST(LastErrorTest, IsKeptFromPreparationsToo) {
  const ToyModel model(kSizes);
  Reducer reducer(model.parameters, single_process_group(),
                  {.parameter_names = model.names});
  const at::Tensor loss = model.loss_in_order({0, 1}, /*rank=*/0);
  step(reducer, loss);
  EXPECT_THROW(reducer.prepare_for_backward(loss), c10::Error);
  EXPECT_THAT(reducer.last_error()->text, HasSubstr("'p2'"));
  EXPECT_THAT(reducer.last_error()->text, Not(HasSubstr("frame #")));
  EXPECT_EQ(reducer.last_error()->iteration, 1);
}

// ---- Profiler ranges

std::vector<std::string> g_ranges;
std::mutex g_ranges_mutex;

std::unique_ptr<at::ObserverContext> note_range(
    const at::RecordFunction& range) {
  const std::lock_guard<std::mutex> lock(g_ranges_mutex);
  if (std::string(range.name()).starts_with("brigade: ")) {
    g_ranges.emplace_back(range.name());
  }
  return nullptr;
}

TEST(ProfilerRangeTest, NamesEachStepOfEachBucketWhileAProfilerIsActive) {
  const ToyModel model(kSizes);
  Reducer reducer(model.parameters, single_process_group(), kTwoBuckets);
  train(reducer, model, /*rank=*/0);
  g_ranges.clear();
  const at::CallbackHandle handle =
      at::addGlobalCallback(at::RecordFunctionCallback(&note_range)
                                .scopes({at::RecordScope::USER_SCOPE}));
  train(reducer, model, /*rank=*/0);
  at::removeCallback(handle);
  train(reducer, model, /*rank=*/0);
  EXPECT_THAT(g_ranges, ElementsAre("brigade: bucket 0 of 2 pack",
                                    "brigade: bucket 0 of 2 launch",
                                    "brigade: bucket 1 of 2 pack",
                                    "brigade: bucket 1 of 2 launch",
                                    "brigade: finalize"));
}

}  // namespace timeline_test
}  // namespace brigade
