#include <torch/torch.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/ddp/distributed_data_parallel.h"
#include "brigade/tests/ddp/toy_module.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace comm_hooks_in_training_test {

using ::testing::HasSubstr;
using testing::Order;
using testing::run_ranks;
using testing::ToyModel;
using testing::ToyModule;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

const Order kAll = {0, 1, 2, 3};

void sgd_step(const at::Tensor& parameter) {
  at::Tensor target = parameter;
  target.sub_(parameter.grad(), 0.25);
}

using HookOf = std::function<CommHookPtr(const Group&)>;

TEST(StepInBackwardTest, TrainsAsAnOptimizerAfterBackward) {
  const HookOf averaging = [](const Group& group) {
    return all_reduce_hook(group);
  };
  const HookOf compressing = [](const Group& group) {
    return fp16_hook(group);
  };
  const HookOf own = [](const Group& group) {
    return make_comm_hook([group](c10d::GradBucket& bucket) {
      bucket.getBufferRef().div_(group->getSize());
      std::vector<at::Tensor> tensors = {bucket.getBuffer()};
      return group->allreduce(tensors)->getFuture();
    });
  };
  for (const HookOf& hook : {averaging, compressing, own}) {
    for (const bool views : {true, false}) {
      run_ranks(2, [&](const Group& group) {
        ToyModule module;
        DistributedDataParallel model(
            module, group,
            {.reducer = {
                 .bucket_cap_bytes = {40},
                 .gradient_as_bucket_view = views,
                 .comm_hook = step_in_backward(hook(group), sgd_step)}});
        std::vector<at::Tensor> expected;
        for (const at::Tensor& p : module->toy.parameters) {
          expected.push_back(p.detach().clone());
        }
        for (int s = 0; s < 4; ++s) {
          model(kAll, group->getRank(), s).backward();
          for (const size_t i : kAll) {
            expected[i] = expected[i] - module->toy.average(i, 2, s) * 0.25;
            EXPECT_FALSE(module->toy.parameters[i].grad().defined());
            EXPECT_TRUE(at::equal(module->toy.parameters[i], expected[i]))
                << "parameter " << i << " step " << s;
          }
        }
      });
    }
  }
}

TEST(StepInBackwardTest, StepsABucketDuringBackward) {
  const auto group = single_process_group();
  ToyModule module;
  DistributedDataParallel model(
      module, group,
      {.reducer = {
           .bucket_cap_bytes = {1},
           .comm_hook = step_in_backward(all_reduce_hook(group), sgd_step)}});
  const at::Tensor last = module->toy.parameters[3];
  const at::Tensor before = last.detach().clone();
  bool has_changed = false;
  module->toy.parameters[0].register_hook(
      [&](const at::Tensor&) { has_changed = !at::equal(last, before); });
  model(Order{3, 2, 1, 0}, 0, 0).backward();
  EXPECT_TRUE(has_changed);
}

TEST(StepInBackwardTest, PropagatesAStepsExceptionAndContinues) {
  run_ranks(2, [](const Group& group) {
    bool fails = true;
    const auto step = [&](const at::Tensor& parameter) {
      if (fails) throw std::domain_error("no step");
      sgd_step(parameter);
    };
    ToyModule module;
    DistributedDataParallel model(
        module, group,
        {.reducer = {
             .bucket_cap_bytes = {1},
             .comm_hook = step_in_backward(all_reduce_hook(group), step)}});
    try {
      model(kAll, group->getRank(), 0).backward();
      ADD_FAILURE() << "no error";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("no step"));
    }
    fails = false;
    module->toy.zero_grad();
    const at::Tensor before = module->toy.parameters[1].detach().clone();
    model(kAll, group->getRank(), 1).backward();
    EXPECT_TRUE(at::equal(module->toy.parameters[1],
                          before - module->toy.average(1, 2, 1) * 0.25));
  });
}

TEST(StepInBackwardTest, KeepsTheGradientsOfOtherParameters) {
  run_ranks(2, [](const Group& group) {
    ToyModule module;
    const at::Tensor stepped = module->toy.parameters[1];
    const at::Tensor before = stepped.detach().clone();
    const auto is_stepped = [&](const at::Tensor& parameter) {
      return parameter.is_same(stepped);
    };
    DistributedDataParallel model(
        module, group,
        {.reducer = {.bucket_plan = {{3}, {2}, {1}, {0}},
                     .comm_hook = step_in_backward(all_reduce_hook(group),
                                                   sgd_step, is_stepped)}});
    model(kAll, group->getRank(), 0).backward();
    EXPECT_TRUE(
        at::equal(stepped, before - module->toy.average(1, 2, 0) * 0.25));
    EXPECT_FALSE(stepped.grad().defined());
    for (const size_t i : {0, 2, 3}) {
      EXPECT_TRUE(at::equal(module->toy.parameters[i].grad(),
                            module->toy.average(i, 2, 0)));
    }
  });
}

TEST(StepInBackwardTest, NamesABucketWithSteppedAndOtherParameters) {
  run_ranks(2, [](const Group& group) {
    ToyModule module;
    const at::Tensor stepped = module->toy.parameters[1];
    const auto is_stepped = [&](const at::Tensor& parameter) {
      return parameter.is_same(stepped);
    };
    DistributedDataParallel model(
        module, group,
        {.reducer = {.comm_hook = step_in_backward(all_reduce_hook(group),
                                                   sgd_step, is_stepped)}});
    try {
      model(kAll, group->getRank(), 0).backward();
      ADD_FAILURE() << "no error";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("bucket 0 holds parameters with and "
                                          "without a step"));
    }
  });
}

TEST(StepInBackwardTest, NeedsAHookAndAStep) {
  const auto group = single_process_group();
  EXPECT_THROW(step_in_backward(nullptr, sgd_step), c10::ValueError);
  EXPECT_THROW(step_in_backward(all_reduce_hook(group), nullptr),
               c10::ValueError);
}

TEST(HookFailureTest, TrainingContinuesAfterOneRankThrewInBackward) {
  const HookOf own = [](const Group& group) {
    return make_comm_hook([group](c10d::GradBucket& bucket) {
      std::vector<at::Tensor> first = {at::ones({1})};
      group->allreduce(first);
      bucket.getBufferRef().div_(group->getSize());
      std::vector<at::Tensor> tensors = {bucket.getBuffer()};
      return group->allreduce(tensors)->getFuture();
    });
  };
  for (const bool finds_unused : {false, true}) {
    run_ranks(3, [&](const Group& group) {
      const int rank = group->getRank();
      ToyModule module;
      DistributedDataParallel model(
          module, group,
          {.reducer = {.bucket_cap_bytes = {1},
                       .find_unused_parameters = finds_unused,
                       .comm_hook = own(group)}});
      bool fails = rank == 1;
      module->toy.parameters[1].register_hook([&](const at::Tensor&) {
        if (fails) throw std::domain_error("on one rank");
      });
      EXPECT_ANY_THROW(model(kAll, rank, 0).backward()) << "rank " << rank;
      fails = false;
      for (int s = 1; s < 3; ++s) {
        module->toy.zero_grad();
        model(kAll, rank, s).backward();
        for (const size_t i : kAll) {
          EXPECT_TRUE(at::equal(module->toy.parameters[i].grad(),
                                module->toy.average(i, 3, s)))
              << "rank " << rank << " parameter " << i << " step " << s;
        }
      }
    });
  }
}

// Either all ranks step a parameter or none does.
TEST(HookFailureTest, ParametersStayEqualUnderStepsInBackward) {
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    ToyModule module;
    DistributedDataParallel model(
        module, group,
        {.reducer = {
             .bucket_cap_bytes = {1},
             .comm_hook = step_in_backward(all_reduce_hook(group), sgd_step)}});
    // Rank 0 shadows, and then receives rank 1's model.
    join(model, [&] {
      for (int s = 0; s < rank; ++s) model(kAll, rank, s).backward();
    });
    // Rank 0 launches the remaining buckets on zeros, and steps as rank 1 does.
    const at::Tensor loss = model(kAll, rank, 1);
    const at::Tensor above = loss * 1;
    above.register_hook([rank](const at::Tensor&) {
      if (rank == 0) throw std::domain_error("on one rank");
    });
    EXPECT_ANY_THROW(above.backward()) << "rank " << rank;
    if (rank == 0) {
      EXPECT_ANY_THROW(model(kAll, rank, 2));  // at the barrier
    }
    module->toy.zero_grad();
    model(kAll, rank, 2).backward();
    for (const at::Tensor& p : module->toy.parameters) {
      std::vector<at::Tensor> sum = {p.detach().clone()};
      group->allreduce(sum)->wait();
      EXPECT_TRUE(at::equal(sum[0], p * 2)) << "rank " << rank;
    }
  });
}

TEST(HookFailureTest, ADestroyedGroupIsAnError) {
  Group group = single_process_group();
  const auto hook = all_reduce_hook(group);
  group.reset();
  c10d::GradBucket bucket(0, 1, at::ones({1}), {0}, {1}, {{1}}, {},
                          std::nullopt);
  try {
    hook->runHook(bucket);
    ADD_FAILURE() << "no error";
  } catch (const c10::ValueError& error) {
    EXPECT_THAT(error.what(),
                HasSubstr("its process group has been destroyed"));
  }
}

}  // namespace comm_hooks_in_training_test
}  // namespace brigade
