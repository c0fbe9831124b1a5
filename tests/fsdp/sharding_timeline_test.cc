#include "brigade/fsdp/schedule/sharding_timeline.h"

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <future>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/fsdp/sharded_root.h"
#include "brigade/tests/fsdp/sharded_checks.h"
#include "brigade/tests/fsdp/sharded_net.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace sharding_timeline_test {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::Net;
using testing::run_ranks;
using testing::train_step;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// ------------------------------------------------------------ values

TEST(ShardingTimelineTest, TellsWhatIsExposed) {
  const GatherTimes ahead = {.unit = "a",
                             .launch_ns = 10,
                             .complete_ns = 30,
                             .needed_ns = 40,
                             .whole_ns = 41};
  EXPECT_EQ(ahead.travel_ns(), 20);
  EXPECT_EQ(ahead.exposed_ns(), 0);
  const GatherTimes late = {.unit = "a",
                            .launch_ns = 10,
                            .complete_ns = 30,
                            .needed_ns = 25,
                            .whole_ns = 31};
  EXPECT_EQ(late.exposed_ns(), 5);
  const GatherTimes at_need = {.unit = "a",
                               .launch_ns = 26,
                               .complete_ns = 30,
                               .needed_ns = 25,
                               .whole_ns = 31};
  EXPECT_EQ(at_need.exposed_ns(), 4);
  const GatherTimes for_peers = {
      .unit = "a", .launch_ns = 10, .complete_ns = 30};
  EXPECT_EQ(for_peers.exposed_ns(), 0);

  const ShardingTimeline timeline = {
      .iteration = 1,
      .backward_end_ns = 100,
      .reductions = {{.unit = "c", .launch_ns = 50, .complete_ns = 90},
                     {.unit = "b", .launch_ns = 60, .complete_ns = 130},
                     {.unit = "a", .launch_ns = 95, .complete_ns = 150}}};
  EXPECT_EQ(timeline.exposed_ns(0), 0);
  EXPECT_EQ(timeline.exposed_ns(1), 30);
  EXPECT_EQ(timeline.exposed_ns(2), 20);  // the second covers the rest
}

TEST(ShardingTimelineTest, IsATableForPeople) {
  const ShardingTimeline timeline = {
      .iteration = 7,
      .forward_begin_ns = 1'000'000,
      .forward_end_ns = 4'000'000,
      .backward_begin_ns = 5'000'000,
      .backward_end_ns = 9'000'000,
      .finalize_end_ns = 11'000'000,
      .gathers = {{.unit = "blocks.0",
                   .pass = GatheredIn::kForward,
                   .launch_ns = 1'500'000,
                   .complete_ns = 3'500'000,
                   .needed_ns = 3'000'000,
                   .whole_ns = 3'500'000}},
      .reductions = {{.unit = "blocks.0",
                      .launch_ns = 8'000'000,
                      .complete_ns = 11'000'000}}};
  EXPECT_EQ(
      describe(timeline),
      "iteration 7, ms: forward 3.000, backward 4.000, behind it 2.000\n"
      "                    launched    complete  overlapped     exposed  unit\n"
      "gather forward         0.500       2.500       1.500       0.500  "
      "'blocks.0'\n"
      "reduction              7.000      10.000       1.000       2.000  "
      "'blocks.0'\n");
  EXPECT_THAT(describe(ShardingTimeline()),
              HasSubstr("no iteration has been sampled"));
}

// ------------------------------------------------------------ of a root

template <typename Times>
std::vector<std::string> units_of(const std::vector<Times>& all) {
  std::vector<std::string> units;
  for (const Times& times : all) units.push_back(times.unit);
  return units;
}

Net net_of_two_blocks() { return Net({5, 7, 3}); }

TEST(ShardingTimelineTest, HasTheGathersAndReductionsOfAStep) {
  run_ranks(2, [](const Group& group) {
    const Net net = net_of_two_blocks();
    ShardedRoot root(net.units(), group, {});
    EXPECT_EQ(root.timeline().iteration, 0);
    for (int step = 1; step <= 3; ++step) {
      train_step(root, net, group->getRank(), step);
      const ShardingTimeline timeline = root.timeline();
      EXPECT_EQ(timeline.iteration, step);
      EXPECT_THAT(
          units_of(timeline.gathers),
          ElementsAre("", "blocks.0", "blocks.1", "blocks.1", "blocks.0"));
      // As the last step's gradients came, of which the head's is the first.
      EXPECT_THAT(units_of(timeline.reductions),
                  step == 1 ? ElementsAre("blocks.1", "blocks.0", "")
                            : ElementsAre("", "blocks.1", "blocks.0"));
    }
  });
}

TEST(ShardingTimelineTest, IsInOrder) {
  run_ranks(2, [](const Group& group) {
    const Net net = net_of_two_blocks();
    ShardedRoot root(net.units(), group, {});
    train_step(root, net, group->getRank(), 0);
    const ShardingTimeline timeline = root.timeline();
    EXPECT_LT(timeline.forward_begin_ns, timeline.forward_end_ns);
    EXPECT_LE(timeline.forward_end_ns, timeline.backward_begin_ns);
    EXPECT_LT(timeline.backward_begin_ns, timeline.backward_end_ns);
    EXPECT_LE(timeline.backward_end_ns, timeline.finalize_end_ns);
    for (size_t i = 0; i < timeline.gathers.size(); ++i) {
      const GatherTimes& gather = timeline.gathers[i];
      const bool is_forward = i < 3;
      EXPECT_EQ(gather.pass,
                is_forward ? GatheredIn::kForward : GatheredIn::kBackward);
      EXPECT_GT(gather.launch_ns, is_forward ? timeline.forward_begin_ns
                                             : timeline.forward_end_ns);
      EXPECT_GT(gather.complete_ns, gather.launch_ns);
      EXPECT_GT(gather.needed_ns, 0);
      EXPECT_GE(gather.whole_ns, gather.needed_ns);
      EXPECT_LE(gather.exposed_ns(), gather.travel_ns());
    }
    for (const ReductionTimes& reduction : timeline.reductions) {
      EXPECT_GE(reduction.launch_ns, timeline.backward_begin_ns);
      EXPECT_GT(reduction.complete_ns, reduction.launch_ns);
      EXPECT_LE(reduction.complete_ns, timeline.finalize_end_ns);
    }
  });
}

TEST(ShardingTimelineTest, BackwardGathersAheadOfTheReductionBehindIt) {
  run_ranks(2, [](const Group& group) {
    const Net net;
    ShardedRoot root(net.units(), group, {});
    for (int step = 0; step < 3; ++step) {
      train_step(root, net, group->getRank(), step);
    }
    const ShardingTimeline timeline = root.timeline();
    for (size_t block = 1; block < net.blocks.size(); ++block) {
      const auto is_of = [](size_t i) {
        return [name = absl::StrCat("blocks.", i)](const auto& times) {
          return times.unit == name;
        };
      };
      // The one of forward comes before it.
      const auto gather = std::ranges::find_if(
          timeline.gathers.rbegin(), timeline.gathers.rend(), is_of(block - 1));
      const auto reduction =
          std::ranges::find_if(timeline.reductions, is_of(block));
      ASSERT_NE(gather, timeline.gathers.rend());
      ASSERT_NE(reduction, timeline.reductions.end());
      EXPECT_EQ(gather->pass, GatheredIn::kBackward);
      EXPECT_LT(gather->launch_ns, reduction->launch_ns);
    }
  });
}

TEST(ShardingTimelineTest, AStepIsAllForwardsUpToAReduction) {
  run_ranks(2, [](const Group& group) {
    const Net net = net_of_two_blocks();
    ShardedRoot root(net.units(), group, {});
    root.set_synchronizes(false);
    train_step(root, net, group->getRank(), 0);
    EXPECT_EQ(root.timeline().iteration, 0);
    root.set_synchronizes(true);
    train_step(root, net, group->getRank(), 1);
    EXPECT_EQ(root.timeline().gathers.size(), 10u);
    train_step(root, net, group->getRank(), 2);
    EXPECT_EQ(root.timeline().gathers.size(), 5u);
  });
}

TEST(ShardingTimelineTest, OnlySampledStepsAreThere) {
  run_ranks(2, [](const Group& group) {
    const Net net = net_of_two_blocks();
    ShardedRoot root(net.units(), group, {});
    EXPECT_THROW(root.set_timeline_sample_rate(-1), c10::ValueError);
    root.set_timeline_sample_rate(0);
    train_step(root, net, group->getRank(), 0);
    EXPECT_EQ(root.timeline().iteration, 0);
    root.set_timeline_sample_rate(12);
    for (int step = 2; step <= 13; ++step) {
      train_step(root, net, group->getRank(), step);
      const int64_t sampled = step <= 10 ? step : step < 12 ? 10 : 12;
      EXPECT_EQ(root.timeline().iteration, sampled);
      EXPECT_EQ(root.timeline().gathers.size(), 5u);
    }
  });
}

TEST(ShardingTimelineTest, FrozenUnitsAreNotReduced) {
  run_ranks(2, [](const Group& group) {
    const Net net = net_of_two_blocks();
    ShardedRoot root(net.units(), group, {});
    const at::Tensor head = root.shards_of(0)[0];
    for (int step = 0; step < 3; ++step) {
      head.set_requires_grad(step != 1);
      train_step(root, net, group->getRank(), step);
      const ShardingTimeline timeline = root.timeline();
      EXPECT_EQ(timeline.reductions.size(), step == 1 ? 2u : 3u);
      for (const ReductionTimes& reduction : timeline.reductions) {
        EXPECT_GT(reduction.complete_ns, reduction.launch_ns);
        EXPECT_TRUE(step != 1 || !reduction.unit.empty());
      }
    }
  });
}

// What a step that failed has gathered is not the next one's.
TEST(ShardingTimelineTest, AStepThatFailsIsLeftOut) {
  run_ranks(2, [](const Group& group) {
    const int rank = group->getRank();
    const Net net = net_of_two_blocks();
    ShardedRoot root(net.units(), group, {});
    EXPECT_ANY_THROW({
      const at::Tensor y = root.forward([&] {
        if (rank == 1) throw std::runtime_error("of rank 1");
        return net.run(root, net.input(rank, 0));
      });
      loss_of(y).backward();
    });
    for (int step = 0; step < 2; ++step) {
      train_step(root, net, group->getRank(), step);
      EXPECT_EQ(root.timeline().gathers.size(), 5u);
    }
  });
}

// ------------------------------------------------------------ stalls

// Rank 1 goes on when rank 0 has told of it.
TEST(ShardingStallTest, NamesTheUnitThatAPeerHasNotLaunched) {
  std::promise<std::string> told;
  std::future<std::string> report = told.get_future();
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    const Net net = net_of_two_blocks();
    ShardedRoot root(net.units(), group, {.prefetch_depth = 0});
    train_step(root, net, rank, 0);
    root.set_stall_report_after(std::chrono::milliseconds(200));
    if (rank == 0) {
      root.set_stall_handler(
          [&](const std::string& text) { told.set_value(text); });
    }
    loss_of(root.forward([&] {
      return root.call(0, net.input(rank, 1), [&](const at::Tensor& in) {
        at::Tensor h = root.call(1, in, [&](const at::Tensor& inner) {
          return net.blocks[0].run(inner);
        });
        if (rank == 1) report.wait_for(std::chrono::seconds(8));
        h = root.call(2, h, [&](const at::Tensor& inner) {
          return net.blocks[1].run(inner);
        });
        return h * net.head;
      });
    })).backward();
    root.set_stall_handler(nullptr);
  });
  ASSERT_EQ(report.wait_for(std::chrono::seconds(0)),
            std::future_status::ready);
  EXPECT_THAT(report.get(),
              AllOf(HasSubstr("fully_shard: rank 0 has waited"),
                    HasSubstr("for the gather of unit 'blocks.1'"),
                    HasSubstr("rank 1 has prepared nothing"),
                    HasSubstr("its last gather was that of unit 'blocks.0'")));
}

}  // namespace sharding_timeline_test
}  // namespace brigade
