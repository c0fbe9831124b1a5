// On which streams a backward computes, and that units are lent again behind
// all of them.

#include "brigade/hooks/backward_streams.h"

#include <c10/core/StreamGuard.h>
#include <torch/torch.h>

#include <cstddef>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "brigade/comm/recording_group.h"
#include "brigade/fsdp/sharded_root.h"
#include "brigade/hooks/output_watch.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace backward_streams_test {

using simulated::default_stream;
using simulated::make_wait;
using simulated::new_stream;
using simulated::on_device;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

class BackwardStreamsTest : public simulated::StreamTest {
 protected:
  // x * 2, on the stream, behind the current one, which is behind it then.
  static at::Tensor twice(const at::Tensor& x, const c10::Stream& stream) {
    make_wait(stream, default_stream());
    at::Tensor result;
    {
      const c10::StreamGuard on_stream(stream);
      x.record_stream(stream);
      result = x * 2;
    }
    make_wait(default_stream(), stream);
    result.record_stream(default_stream());
    return result;
  }

  std::vector<c10::Stream> streams_of(const at::Tensor& output,
                                      const RecordedSince& part) {
    const auto found = streams_.of(watched_nodes({&output, 1}), part);
    return {found.begin(), found.end()};
  }

  const at::Tensor leaf_ = at::ones({4}, on_device()).requires_grad_();
  BackwardStreams streams_{simulated::device()};
};

TEST_F(BackwardStreamsTest, AreThoseOfAllNodesOnce) {
  const c10::Stream a = new_stream();
  const c10::Stream b = new_stream();
  const RecordedSince first = RecordedSince::now();
  const at::Tensor h = twice(leaf_, a);
  const at::Tensor sum = twice(h, b) + twice(h, a) + h;
  for (int i = 0; i < 2; ++i) {  // each time anew
    EXPECT_THAT(streams_of(sum, first),
                UnorderedElementsAre(default_stream(), a, b));
  }
}

TEST_F(BackwardStreamsTest, OlderNodesAreOfOtherCalls) {
  const c10::Stream a = new_stream();
  const c10::Stream b = new_stream();
  const at::Tensor before = twice(leaf_, a);
  const RecordedSince first = RecordedSince::now();
  EXPECT_THAT(streams_of(twice(before, b), first), ElementsAre(b));
}

// Threads number their nodes by themselves, from 0 on.
TEST_F(BackwardStreamsTest, OtherThreadsHelp) {
  const c10::Stream a = new_stream();
  const c10::Stream b = new_stream();
  twice(leaf_, a);
  const RecordedSince first = RecordedSince::now();
  const at::Tensor before = twice(leaf_, a);
  at::Tensor by_other;
  std::thread([&] { by_other = twice(before, b); }).join();
  EXPECT_THAT(streams_of(by_other * 2, first),
              UnorderedElementsAre(default_stream(), a, b));
}

TEST_F(BackwardStreamsTest, WhatIsGoneOrWithoutAGraphHasNone) {
  const c10::Stream a = new_stream();
  std::vector<WeakNodePtr> ends;
  {
    const at::Tensor output = twice(leaf_, a);
    ends = watched_nodes({&output, 1});
  }
  EXPECT_THAT(streams_.of(ends, RecordedSince()), IsEmpty());
  EXPECT_THAT(streams_of(leaf_, RecordedSince()), IsEmpty());
}

TEST_F(BackwardStreamsTest, NodesOfTheHostHaveNone) {
  const at::Tensor on_host = at::ones({4}).requires_grad_();
  EXPECT_THAT(streams_of(on_host * 2, RecordedSince()), IsEmpty());
}

// A frozen weight is read for the gradient of what is neither an input of the
// unit nor a parameter of it: nobody but the nodes tell of their stream.
TEST_F(BackwardStreamsTest, AUnitIsLentBehindThoseOfWhichNoGradientTells) {
  const RecordingGroup recording(/*world_size=*/2);
  const c10::Stream side = new_stream();
  std::vector<UnitSpec> units;
  for (int u = 0; u < 5; ++u) {
    units.push_back(
        {.name = std::to_string(u),
         .parameters = {
             {"frozen", at::ones({8}, on_device())},
             {"trained", at::ones({8}, on_device()).requires_grad_()}}});
  }
  ShardedRoot root(units, recording.group(), {});
  const at::Tensor own = at::ones({8}, on_device()).requires_grad_();
  for (int step = 0; step < 3; ++step) {
    root.forward([&] {
          at::Tensor h = at::ones({8}, on_device()).requires_grad_();
          for (size_t u = 0; u < units.size(); ++u) {
            h = root.call(u, h, [&](const at::Tensor& x) {
              make_wait(side, default_stream());
              at::Tensor product;
              {
                const c10::StreamGuard on_side(side);
                product = own * units[u].parameters[0].tensor;
              }
              make_wait(default_stream(), side);
              product.record_stream(default_stream());
              return x + product + units[u].parameters[1].tensor;
            });
          }
          return h;
        })
        .sum()
        .backward();
    own.mutable_grad().reset();
  }
}

// Its gate, which is what makes its output, holds the call.
TEST_F(BackwardStreamsTest, ACallThatReturnsItsInputIsFreedWithItsGraph) {
  const RecordingGroup recording(/*world_size=*/2);
  const std::vector<UnitSpec> units = {
      {.name = "",
       .parameters = {{"w", at::ones({8}, on_device()).requires_grad_()}}}};
  ShardedRoot root(units, recording.group(), {});
  std::weak_ptr<ShardedRoot::Call> seen;
  for (const bool is_view : {false, true}) {
    root.forward([&] {
          at::Tensor x = at::ones({8}, on_device()).requires_grad_();
          const auto call = root.begin_call(0, {&x, 1});
          seen = call;
          const std::vector<at::Tensor> outputs = {
              is_view ? x.view({2, 4}) : x, x * units[0].parameters[0].tensor};
          root.end_call(call, outputs);
          return outputs[0].sum() + outputs[1].sum();
        })
        .backward();
    EXPECT_TRUE(seen.expired());
  }
}

}  // namespace backward_streams_test
}  // namespace brigade
