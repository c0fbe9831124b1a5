#include <torch/torch.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/ddp/distributed_data_parallel.h"
#include "brigade/tests/ddp/toy_module.h"
#include "brigade/tests/support/failing_allocator.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::Order;
using testing::run_ranks;
using testing::ToyModel;
using testing::ToyModule;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

const Order kAll = {0, 1, 2, 3};

TEST(BuffersTest, SyncBuffersFailsWhileAPeerIsInBackward) {
  run_ranks(2, [](const Group& group) {
    const int rank = group->getRank();
    ToyModule module;
    DistributedDataParallel model(module, group);
    model(kAll, rank, 0).backward();
    const at::Tensor loss = model(kAll, rank, 1);
    if (rank == 0) {
      EXPECT_THROW(loss.backward(), c10::Error);
    } else {  // as after an exception in the loss
      EXPECT_THROW(model.sync_buffers(), c10::Error);
    }
    EXPECT_TRUE(model.reducer().can_continue());
    model.sync_buffers();
    EXPECT_EQ(module->seen.item<float>(), 2);
    module->toy.zero_grad();
    model(kAll, rank, 2).backward();
    for (const size_t i : kAll) {
      EXPECT_TRUE(at::equal(module->toy.parameters[i].grad(),
                            module->toy.average(i, 2, 2)));
    }
  });
}

TEST(BuffersTest, AnyDtypeIsBroadcast) {
  run_ranks(2, [](const Group& group) {
    torch::nn::Linear net(2, 2);
    std::vector<at::Tensor> buffers;
    for (const at::ScalarType dtype :
         {at::kFloat, at::kShort, at::kUInt16, at::kFloat8_e4m3fn, at::kBool,
          at::kComplexDouble}) {
      const at::Tensor values = torch::full({2, 3}, 1 - group->getRank());
      buffers.push_back(
          net->register_buffer(c10::toString(dtype), values.to(dtype).t()));
    }
    buffers.push_back(net->register_buffer(
        "scalar", torch::tensor(1 - group->getRank(), at::kShort)));
    const DistributedDataParallel model(net, group);
    for (const at::Tensor& buffer : buffers) {
      EXPECT_TRUE(buffer.to(at::kDouble).eq(1).all().item<bool>())
          << buffer.dtype();
    }
  });
}

// A rank whose loss or forward has thrown starts its next forward. At the
// barrier before the broadcast of buffers, its peers are in backward.
TEST(BuffersTest, AllRanksThrowAndRecoverIfOneFails) {
  for (const bool in_forward : {false, true}) {
    run_ranks(3, [&](const Group& group) {
      const int rank = group->getRank();
      ToyModule module;
      DistributedDataParallel model(module, group);
      for (int step = 0; step < 3; ++step) {
        try {
          module->fails = in_forward && rank == 1;
          if (module->fails) {
            EXPECT_THROW(model(kAll, rank, step), std::domain_error);
            module->fails = false;
            model(kAll, rank, step);
          } else {
            const at::Tensor loss = model(kAll, rank, step);
            if (rank == 1) {
              model(kAll, rank, step);
            } else {
              loss.backward();
            }
          }
          ADD_FAILURE() << "no error on rank " << rank;
        } catch (const c10::Error& error) {
          EXPECT_THAT(error.what_without_backtrace(),
                      AllOf(HasSubstr("ranks 0, 2 ended iteration"),
                            HasSubstr("rank 1 came to")));
        }
        EXPECT_TRUE(model.reducer().can_continue());
        module->toy.zero_grad();
        model(kAll, rank, step).backward();
        for (const size_t i : kAll) {
          EXPECT_TRUE(at::equal(module->toy.parameters[i].grad(),
                                module->toy.average(i, 3, step)));
        }
        module->toy.zero_grad();
      }
    });
  }
}

// Each large allocation of a forward or backward fails on rank 1 in turn.
TEST(BuffersTest, AllRanksThrowAndRecoverIfAnAllocationFails) {
  const testing::AllocationFailures failures;
  constexpr int64_t kNumel = 2048;
  for (const bool in_forward : {false, true}) {
    run_ranks(2, [&](const Group& group) {
      const int rank = group->getRank();
      ToyModule module(ToyModel::Sizes(kAll.size(), {kNumel}));
      DistributedDataParallel model(module, group);
      const auto num_averages = [&](int step) {
        return std::ranges::count_if(kAll, [&](size_t i) {
          const at::Tensor& gradient = module->toy.parameters[i].grad();
          return gradient.defined() &&
                 at::equal(gradient, module->toy.average(i, 2, step));
        });
      };
      int number = 0;
      for (bool has_failed = true; has_failed; ++number) {
        SCOPED_TRACE(number);
        has_failed = false;
        try {
          if (in_forward && rank == 1) failures.fail(number, 4 * kNumel);
          const at::Tensor loss = model(kAll, rank, number);
          failures.stop();
          if (!in_forward && rank == 1) failures.fail(number, 4 * kNumel);
          loss.backward();
        } catch (const c10::Error& error) {
          has_failed = true;
          EXPECT_THAT(
              error.what(),
              HasSubstr(rank == 1 ? "can't allocate memory" : "rank 1"));
          EXPECT_EQ(num_averages(number), 0);
          if (in_forward && rank == 1) {  // its peer is in backward
            EXPECT_THROW(model(kAll, rank, number), c10::Error);
          }
        }
        failures.stop();
        ASSERT_TRUE(model.reducer().can_continue());
        module->toy.zero_grad();
        model(kAll, rank, number).backward();
        EXPECT_EQ(num_averages(number), std::ssize(kAll));
        module->toy.zero_grad();
      }
      EXPECT_GT(number, 1);
    });
  }
}

// Only the broadcast of buffers needs a barrier in forward.
TEST(BuffersTest, WithoutBuffersARankMayRunAnExtraForward) {
  run_ranks(2, [&](const Group& group) {
    torch::nn::Linear module(
        torch::nn::LinearOptions(/*in_features=*/1, 1).bias(false));
    DistributedDataParallel model(module, group);
    for (int s = 0; s < 3; ++s) {
      if (group->getRank() == 0) model(at::ones({1, 1}));
      module->zero_grad();
      model(at::full({1, 1}, 1.0 + group->getRank())).sum().backward();
      EXPECT_EQ(module->weight.grad().item<float>(), 1.5);
    }
  });
}

TEST(IgnoredNamesTest, AreNotComparedBroadcastOrReduced) {
  run_ranks(2, [](const Group& group) {
    const int rank = group->getRank();
    ToyModule module(
        testing::ToyModel::Sizes{{3, 2}, {5 + rank}, {2, 2, 2}, {7}});
    const at::Tensor own = module->toy.parameters[1];
    const at::Tensor other = module->toy.parameters[2];
    {
      const at::NoGradGuard no_grad;
      own.fill_(rank);
      other.fill_(rank);
    }
    DistributedDataParallel model(module, group, {.ignored = {"p1", "seen"}});
    EXPECT_TRUE(at::equal(own, at::full_like(own, rank)));
    EXPECT_TRUE(at::equal(other, at::zeros_like(other)));
    for (int s = 0; s < 2; ++s) {
      module->toy.zero_grad();
      model(kAll, rank, s).backward();
      EXPECT_TRUE(at::equal(own.grad(), module->toy.gradient(1, rank, s)));
      EXPECT_TRUE(at::equal(other.grad(), module->toy.average(2, 2, s)));
    }
    EXPECT_EQ(module->seen.item<float>(), 2 * (rank + 1));
  });
}

TEST(IgnoredNamesTest, MustExistOnEveryRank) {
  run_ranks(2, [](const Group& group) {
    std::vector<std::string> ignored = {"p1"};
    if (group->getRank() == 1) ignored = {"p1", "p9", "sen"};
    try {
      DistributedDataParallel model(ToyModule(), group, {.ignored = ignored});
      ADD_FAILURE() << "no error on rank " << group->getRank();
    } catch (const c10::ValueError& error) {
      EXPECT_THAT(
          error.what(),
          AllOf(HasSubstr("ignored: module brigade::testing::ToyModuleImpl has "
                          "no 'p9', 'sen'"),
                HasSubstr("rank 1")));
    }
  });
}

}  // namespace
}  // namespace brigade
