// Arguments of comm hooks and the delivery of their results.

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <memory>
#include <thread>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/reducer/toy_model.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using testing::completed;
using testing::run_ranks;
using testing::step;
using testing::ToyModel;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

TEST(CommHookContractTest, GetsRawGradientsByParameter) {
  run_ranks(2, [](const Group& group) {
    const ToyModel model({{2, 2}, {3}, {5}});
    std::vector<size_t> indices;
    auto hook = make_comm_hook([&](c10d::GradBucket& bucket) {
      indices.push_back(bucket.getIndex());
      EXPECT_EQ(bucket.isLast(), bucket.getIndex() == 1);
      const std::vector<at::Tensor> parameters = bucket.getParameters();
      const std::vector<at::Tensor> gradients = bucket.getGradients();
      EXPECT_EQ(parameters.size(), bucket.getIndex() == 0 ? 2 : 1);
      for (size_t k = 0; k < parameters.size(); ++k) {
        for (size_t i = 0; i < 3; ++i) {
          if (!parameters[k].is_same(model.parameters[i])) continue;
          // Not divided by the world size, in the parameter's shape.
          EXPECT_TRUE(
              at::equal(gradients[k], model.gradient(i, group->getRank())));
        }
      }
      return completed(bucket.getBuffer());
    });
    Reducer reducer(model.parameters, group,
                    {.bucket_plan = {{2, 0}, {1}}, .comm_hook = hook});
    step(reducer, model.loss(group->getRank()));
    EXPECT_THAT(indices, ::testing::ElementsAre(0, 1));
    // The hook reduced nothing, so neither did the reducer.
    EXPECT_TRUE(at::equal(model.parameters[1].grad(),
                          model.gradient(1, group->getRank())));
  });
}

TEST(CommHookContractTest, GetsComplexGradientsAsPairsOfReals) {
  for (const bool views : {true, false}) {
    const at::Tensor w =
        at::ones({2, 3}, at::kComplexFloat).set_requires_grad(true);
    const at::Tensor b =
        at::ones({2}, at::kComplexFloat).set_requires_grad(true);
    auto hook = make_comm_hook([](c10d::GradBucket& bucket) {
      EXPECT_EQ(bucket.getBuffer().scalar_type(), at::kFloat);
      EXPECT_THAT(bucket.getBuffer().sizes(), ::testing::ElementsAre(16));
      const std::vector<at::Tensor> gradients = bucket.getGradients();
      EXPECT_THAT(gradients.at(0).sizes(), ::testing::ElementsAre(2, 3, 2));
      EXPECT_THAT(gradients.at(1).sizes(), ::testing::ElementsAre(2, 2));
      EXPECT_TRUE(at::equal(gradients.at(1),
                            at::tensor({0.F, 2.F, 0.F, 2.F}).reshape({2, 2})));
      return completed(bucket.getBuffer().to(at::kHalf));
    });
    Reducer reducer({w, b}, single_process_group(),
                    {.bucket_plan = {{0, 1}},
                     .gradient_as_bucket_view = views,
                     .comm_hook = hook});
    for (int s = 0; s < 3; ++s) {
      w.mutable_grad().reset();
      b.mutable_grad().reset();
      const at::Tensor loss =
          at::imag(w).sum() + at::real(w).sum() * 3 + at::imag(b).sum() * 2;
      step(reducer, loss);
      EXPECT_TRUE(at::equal(
          w.grad(), at::full({2, 3}, c10::complex<float>(3, 1), w.options())));
      EXPECT_TRUE(at::equal(
          b.grad(), at::full({2}, c10::complex<float>(0, 2), b.options())));
    }
  }
}

TEST(CommHookContractTest, MayReturnAnotherTensorOfAnotherDtypeAndShape) {
  for (const bool views : {true, false}) {
    const ToyModel model({{2}, {3}});
    auto hook = make_comm_hook([](c10d::GradBucket& bucket) {
      return completed(
          (bucket.getBuffer() * 10).to(at::kDouble).reshape({-1, 1}));
    });
    Reducer reducer(model.parameters, single_process_group(),
                    {.gradient_as_bucket_view = views, .comm_hook = hook});
    for (int s = 0; s < 3; ++s) {
      model.zero_grad(/*set_to_none=*/s == 1);
      step(reducer, model.loss(0, s));
      for (size_t i = 0; i < 2; ++i) {
        EXPECT_TRUE(at::equal(model.parameters[i].grad(),
                              model.gradient(i, 0, s) * 10));
        EXPECT_EQ(model.parameters[i].grad().scalar_type(), at::kFloat);
      }
    }
  }
}

TEST(CommHookContractTest, MayReplaceTheBucketsBuffer) {
  const ToyModel model({{2}, {3}});
  std::vector<const void*> seen;
  auto hook = make_comm_hook([&](c10d::GradBucket& bucket) {
    seen.push_back(bucket.getBuffer().const_data_ptr());
    at::Tensor half = bucket.getBuffer().to(at::kHalf);
    bucket.setBuffer(half);
    return completed(bucket.getBuffer());
  });
  Reducer reducer(model.parameters, single_process_group(),
                  {.bucket_plan = {{1, 0}}, .comm_hook = hook});
  for (int s = 0; s < 2; ++s) {
    model.zero_grad();
    step(reducer, model.loss(0, s));
    EXPECT_TRUE(at::equal(model.parameters[0].grad(), model.gradient(0, 0, s)));
  }
  EXPECT_EQ(seen[0], seen[1]);
}

// The compressed hooks divide before the cast, and the sum of two halves of
// these integers is exact in both formats.
TEST(CompressionTest, AveragesInHalfPrecision) {
  for (const bool views : {true, false}) {
    for (const bool fp16 : {true, false}) {
      run_ranks(2, [&](const Group& group) {
        const ToyModel model({{2, 3}, {300}, {}});
        Reducer reducer(
            model.parameters, group,
            {.gradient_as_bucket_view = views,
             .comm_hook = fp16 ? fp16_hook(group) : bf16_hook(group)});
        for (int s = 0; s < 4; ++s) {
          model.zero_grad(/*set_to_none=*/s < 2);
          step(reducer, model.loss(group->getRank(), s));
          for (size_t i = 0; i < 3; ++i) {
            EXPECT_TRUE(
                at::equal(model.parameters[i].grad(), model.average(i, 2, s)))
                << "views " << views << " fp16 " << fp16 << " step " << s;
          }
        }
      });
    }
  }
}

TEST(CompressionTest, DividesBeforeTheCast) {
  run_ranks(2, [](const Group& group) {
    const at::Tensor weight = at::ones({1}).requires_grad_();
    Reducer reducer({weight}, group, {.comm_hook = fp16_hook(group)});
    const at::Tensor loss = (weight * 65504).sum();  // the largest half
    step(reducer, loss);
    EXPECT_EQ(weight.grad().item<float>(), 65504);
  });
}

// Hooks run on the thread that calls backward.
TEST(ThreadLocalStateTest, GradModeAndAutocastAreOffInHooks) {
  const ToyModel model({{2}, {3}});
  bool grad_mode = true;
  bool autocast = true;
  std::thread::id ran_on;
  auto hook = make_comm_hook([&](c10d::GradBucket& bucket) {
    grad_mode = at::GradMode::is_enabled();
    autocast = at::autocast::is_autocast_enabled(at::kCPU);
    ran_on = std::this_thread::get_id();
    return completed(bucket.getBuffer());
  });
  Reducer reducer(model.parameters, single_process_group(),
                  {.comm_hook = hook});
  for (const bool wanted : {true, false}) {
    const at::Tensor loss = model.loss(0);
    at::autocast::set_autocast_enabled(at::kCPU, wanted);
    reducer.prepare_for_backward(loss);
    at::autocast::set_autocast_enabled(at::kCPU, false);
    std::thread other([&] {
      const at::NoGradGuard no_grad;
      at::autocast::set_autocast_enabled(at::kCPU, !wanted);
      loss.backward();
      EXPECT_EQ(at::autocast::is_autocast_enabled(at::kCPU), !wanted);
    });
    const std::thread::id other_id = other.get_id();
    other.join();
    EXPECT_EQ(ran_on, other_id);
    EXPECT_FALSE(grad_mode);
    EXPECT_FALSE(autocast);
    model.zero_grad();
  }
}

// A hook that runs the optimizer returns no gradients.
TEST(CommHookContractTest, AResultOfNoneDeliversNothing) {
  const ToyModel model({{2}, {3}});
  Reducer reducer(
      model.parameters, single_process_group(),
      {.comm_hook = make_comm_hook([](c10d::GradBucket& bucket) {
         for (const at::Tensor& parameter : bucket.getParameters()) {
           parameter.mutable_grad().reset();
         }
         return completed(c10::IValue());
       })});
  for (int s = 0; s < 2; ++s) {
    step(reducer, model.loss(0, s));
    EXPECT_FALSE(model.parameters[0].grad().defined());
  }
}

TEST(CommHookContractTest, AResultOfNoneKeepsUnusedGradients) {
  run_ranks(2, [](const Group& group) {
    const ToyModel model({{2}, {3}});
    const auto all_reduce = all_reduce_hook(group);
    bool delivers = true;
    auto hook = make_comm_hook([&](c10d::GradBucket& bucket) {
      bucket.getBufferRef().div_(2);
      return all_reduce->runHook(bucket)->then(
          [&delivers](c10::ivalue::Future& future) -> c10::IValue {
            if (delivers) return future.value();
            return c10::IValue();
          },
          c10::AnyType::get());
    });
    Reducer reducer(model.parameters, group,
                    {.find_unused_parameters = true, .comm_hook = hook});
    const int rank = group->getRank();
    step(reducer, model.loss(rank));
    delivers = false;
    model.parameters[0].mutable_grad().fill_(rank / 3.0);
    step(reducer, model.loss_in_order({1}, rank));
    EXPECT_TRUE(
        at::equal(model.parameters[0].grad(), at::full({2}, rank / 3.0)));
  });
}

TEST(CommHookContractTest, TheHookMayBeReplacedBetweenIterations) {
  run_ranks(2, [](const Group& group) {
    const ToyModel model({{2}, {3}});
    Reducer reducer(model.parameters, group);
    const int rank = group->getRank();
    step(reducer, model.loss(rank, 0));
    reducer.set_comm_hook(make_comm_hook([group](c10d::GradBucket& bucket) {
      return testing::all_reduced(group, bucket);
    }));
    step(reducer, model.loss(rank, 1));  // on top of the averages of step 0
    EXPECT_TRUE(
        at::equal(model.parameters[1].grad(),
                  2 * model.average(1, 2, 0) + 2 * model.average(1, 2, 1)));
    model.zero_grad();
    const at::Tensor loss = model.loss(rank, 2);
    reducer.prepare_for_backward(loss);
    reducer.set_comm_hook(nullptr);  // the iteration stays prepared
    loss.backward();
    EXPECT_TRUE(at::equal(model.parameters[1].grad(), model.average(1, 2, 2)));
  });
}

TEST(CommHookContractTest, AHookWithTheSameTraitsKeepsTheBuckets) {
  run_ranks(2, [](const Group& group) {
    const ToyModel model({{2}, {3}});
    Reducer reducer(model.parameters, group);
    step(reducer, model.loss(group->getRank(), 0));
    const at::Tensor view = model.parameters[1].grad();
    int64_t buckets = 0;
    reducer.set_comm_hook(make_comm_hook([&](c10d::GradBucket& bucket) {
      ++buckets;
      return completed(bucket.getBuffer());
    }));
    EXPECT_TRUE(model.parameters[1].grad().is_same(view));
    step(reducer, model.loss(group->getRank(), 1));
    EXPECT_EQ(buckets, 1);
    EXPECT_TRUE(model.parameters[1].grad().is_same(view));
    reducer.set_comm_hook(nullptr);  // the default hook scales gradients
    model.zero_grad();
    step(reducer, model.loss(group->getRank(), 2));
    EXPECT_TRUE(at::equal(model.parameters[1].grad(), model.average(1, 2, 2)));
  });
}

TEST(CommHookContractTest, AHookWithAnotherWireDtypeGetsNewBuckets) {
  run_ranks(2, [](const Group& group) {
    const ToyModel model({{2}, {3}});
    Reducer reducer(model.parameters, group);
    step(reducer, model.loss(group->getRank(), 0));
    reducer.set_comm_hook(fp16_hook(group));
    model.zero_grad();
    const at::Tensor loss = (model.parameters[0] * (1 + 1.0 / 4096)).sum() +
                            model.parameters[1].sum();
    step(reducer, loss);
    // 1 + 2^-12 rounds to 1 in float16.
    EXPECT_TRUE(at::equal(model.parameters[0].grad(), at::ones({2})));
  });
}

// Buffers of the default hook are donated to gradients; a user's hook may keep
// its buffers.
TEST(CommHookContractTest, AHookThatMayKeepBuffersGetsNewBuckets) {
  const int64_t numel = 1 << 16;
  const at::Tensor weight = at::ones({numel}).requires_grad_();
  Reducer reducer({weight}, single_process_group(),
                  {.gradient_as_bucket_view = false});
  const auto train = [&](double gradient) {
    weight.mutable_grad().reset();
    step(reducer, (weight * gradient).sum());
  };
  train(1);
  train(2);  // donates the bucket's memory
  at::Tensor kept;
  reducer.set_comm_hook(make_comm_hook([&](c10d::GradBucket& bucket) {
    kept = bucket.getBuffer();
    return completed(kept);
  }));
  train(4);
  train(8);
  kept.fill_(100);
  EXPECT_TRUE(at::equal(weight.grad(), at::full({numel}, 8.0)));
}

// A sum and an average would give other gradients on each rank.
TEST(CommHookContractTest, UnnamedHooksOfDifferentTypesAreAnError) {
  run_ranks(2, [](const Group& group) {
    const ToyModel model({{2}, {3}});
    const CommHookPtr sum = make_comm_hook(
        [](c10d::GradBucket& bucket) { return completed(bucket.getBuffer()); });
    const CommHookPtr average = make_comm_hook([](c10d::GradBucket& bucket) {
      return completed(bucket.getBuffer().div(2));
    });
    const int rank = group->getRank();
    try {
      Reducer reducer(model.parameters, group,
                      {.comm_hook = rank == 0 ? sum : average});
      ADD_FAILURE() << "rank " << rank << " did not throw";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr("lambda"));
    }
  });
}

}  // namespace
}  // namespace brigade
