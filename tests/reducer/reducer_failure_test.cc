#include <c10/util/Exception.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/process_group.h"
#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/reducer/failing.h"
#include "brigade/tests/reducer/toy_model.h"
#include "brigade/tests/support/local_ranks.h"
#include "brigade/tests/support/recording_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::AllOf;
using testing::completed;
using testing::expect_trains;
using ::testing::HasSubstr;
using testing::run_ranks;
using testing::step;
using testing::text_of;
using testing::ToyModel;
using testing::UserError;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// Runs a backward that throws before the gradient of parameter i.
void throw_before(const ToyModel& model, size_t i, const at::Tensor& loss) {
  const unsigned hook = model.parameters[i].register_hook(
      [](const at::Tensor&) { throw UserError("user error"); });
  EXPECT_THROW(loss.backward(), UserError);
  model.parameters[i].remove_hook(hook);
}

// Hooks that misbehave once, on all ranks: one error, then training goes on.
class BadHookTest : public ::testing::Test {
 protected:
  // Calls `misbehave` the first time it gets bucket 1.
  static std::shared_ptr<c10d::CommHookInterface> hook(
      Group group,
      std::function<testing::FuturePtr(c10d::GradBucket&)> misbehave) {
    return make_comm_hook(
        [=, is_broken = true](c10d::GradBucket& bucket) mutable {
          if (bucket.getIndex() == 1 && std::exchange(is_broken, false)) {
            return misbehave(bucket);
          }
          std::vector<at::Tensor> tensors = {bucket.getBuffer()};
          tensors[0].div_(group->getSize());
          return group->allreduce(tensors)->getFuture();
        });
  }

  template <typename Error>
  void expect_error(
      std::function<testing::FuturePtr(c10d::GradBucket&)> misbehave,
      const std::string& text) {
    run_ranks(2, [&](const Group& group) {
      const ToyModel model({{2}, {3}, {4}});
      Reducer reducer(model.parameters, group,
                      {.bucket_plan = {{2}, {1}, {0}},
                       .parameter_names = model.names,
                       .comm_hook = hook(group, misbehave)});
      const at::Tensor loss = model.loss(group->getRank());
      EXPECT_THAT(text_of<Error>([&] { step(reducer, loss); }),
                  AllOf(HasSubstr(text), HasSubstr("bucket 1 of 3"),
                        HasSubstr("'p1'"), HasSubstr("iteration 1 on rank")));
      // No collective is left on the group.
      std::vector<at::Tensor> barrier = {at::zeros({1})};
      group->allreduce(barrier)->wait();
      expect_trains(reducer, model, group->getRank(), 2);
    });
  }
};

TEST_F(BadHookTest, ThatThrows) {
  expect_error<c10::Error>(
      [](auto&) -> testing::FuturePtr { throw UserError("out of memory"); },
      "the comm hook threw: out of memory");
}

TEST_F(BadHookTest, ThatThrowsAValueErrorKeepsItsType) {
  expect_error<c10::ValueError>(
      [](auto&) -> testing::FuturePtr {
        TORCH_CHECK_VALUE(false, "a bad value");
      },
      "a bad value");
}

TEST_F(BadHookTest, ThatReturnsNoFuture) {
  expect_error<c10::Error>([](auto&) { return testing::FuturePtr(); },
                           "must return a future for bucket ");
}

TEST_F(BadHookTest, WhoseFutureHoldsNoTensor) {
  expect_error<c10::TypeError>(
      [](auto&) { return completed(c10::IValue(int64_t{3})); },
      "expected a tensor, found Int");
}

TEST_F(BadHookTest, WhoseFutureHoldsATensorOfAnotherSize) {
  expect_error<c10::Error>(
      [](auto&) { return completed(at::zeros({2})); },
      "a dense tensor of 3 elements on cpu, found a tensor of shape [2]");
}

TEST_F(BadHookTest, WhoseFutureHoldsIntegers) {
  expect_error<c10::TypeError>(
      [](auto&) { return completed(at::zeros({3}, at::kLong)); },
      "must return a floating-point tensor for bucket ");
}

TEST_F(BadHookTest, WhoseFutureFails) {
  expect_error<c10::Error>(
      [](auto&) {
        auto future =
            c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
        future->setError(
            std::make_exception_ptr(UserError("the network is down")));
        return future;
      },
      "the network is down");
}

// A failed rank launches zeros without touching its gradients.
TEST(BackwardFailureTest, ZerosForPeersLeaveGradientsUnchanged) {
  run_ranks(2, [&](const Group& group) {
    const ToyModel model({{2}, {3}, {4}});
    Reducer reducer(model.parameters, group, {.bucket_plan = {{2}, {1}, {0}}});
    const int rank = group->getRank();
    for (int s = 0; s < 3; ++s) {
      const at::Tensor loss = model.loss(rank);
      reducer.prepare_for_backward(loss);
      throw_before(model, (rank + s) % 2, loss);
      model.zero_grad(/*set_to_none=*/false);
      model.loss(rank, s).backward();  // accumulates before the next prepare
      step(reducer, model.loss(rank, s + 1));
      for (size_t i = 0; i < 3; ++i) {
        EXPECT_TRUE(
            at::equal(model.parameters[i].grad(),
                      model.average(i, 2, s) + model.average(i, 2, s + 1)));
      }
      model.zero_grad(/*set_to_none=*/false);
    }
  });
}

// The first iteration fails on both ranks, at different places. Both still
// rebuild together.
TEST(BackwardFailureTest, AFailedFirstIterationKeepsTheRebuildCollective) {
  for (const int throws_late : {0, 1}) {
    run_ranks(2, [&](const Group& group) {
      const ToyModel model({{2}, {3}});
      Reducer reducer(model.parameters, group, {.bucket_cap_bytes = {1}});
      const int rank = group->getRank();
      const at::Tensor input = at::ones({1}).requires_grad_();
      const at::Tensor first = input * 0;  // its gradient comes last
      const at::Tensor loss = first.sum() + model.loss_in_order({0, 1}, rank);
      reducer.prepare_for_backward(loss);
      if (rank == throws_late) {
        first.register_hook([](const at::Tensor&) { throw UserError("late"); });
        EXPECT_THROW(loss.backward(), UserError);
      } else {
        throw_before(model, 1, loss);
      }
      for (int s = 0; s < 2; ++s) expect_trains(reducer, model, rank, 2, s);
      EXPECT_EQ(reducer.statistics().rebuilds, 1);
    });
  }
}
TEST(BackwardFailureTest, RetryingWithoutPreparingIsAnError) {
  const ToyModel model({{2}, {3}});
  Reducer reducer(model.parameters, single_process_group());
  const at::Tensor output = model.loss(0);
  reducer.prepare_for_backward(output);
  const unsigned hook = model.parameters[0].register_hook(
      [](const at::Tensor&) { throw UserError("once"); });
  EXPECT_THROW(output.backward({}, /*retain_graph=*/true), UserError);
  model.parameters[0].remove_hook(hook);
  EXPECT_THAT(text_of<c10::Error>([&] { output.backward(); }),
              HasSubstr("again after iteration 1 on rank 0 was reduced"));
  expect_trains(reducer, model, 0, 1);
}

TEST(BackwardFailureTest, AnUnpreparedForwardMayFail) {
  const ToyModel model({{2}, {3}});
  Reducer reducer(model.parameters, single_process_group());
  throw_before(model, 0, model.loss(0));
  expect_trains(reducer, model, 0, 1);
}

TEST(MisuseTest, SecondBackwardOverAReducedIteration) {
  const ToyModel model({{2}, {3}});
  Reducer reducer(model.parameters, single_process_group(),
                  {.parameter_names = model.names});
  const at::Tensor output = model.loss(0);
  const at::Tensor loss = output * 1;
  reducer.prepare_for_backward(output);
  loss.backward({}, /*retain_graph=*/true);
  EXPECT_THAT(
      text_of<c10::Error>([&] { loss.backward({}, /*retain_graph=*/true); }),
      AllOf(HasSubstr("backward reached parameter"),
            HasSubstr("again after iteration 1 on rank 0 was reduced")));
  // autograd::grad() does not accumulate.
  EXPECT_NO_THROW(torch::autograd::grad({loss}, model.parameters, {}, true));
  expect_trains(reducer, model, 0, 1);
}

// Two forwards, then a backward of each. The second forward's backward has
// ended the iteration of the first one's outputs.
TEST(MisuseTest, BackwardOverAForwardThatAnotherReplaced) {
  const ToyModel model(ToyModel::Sizes{{2}});
  Reducer reducer(model.parameters, single_process_group());
  const at::Tensor first = model.loss(0);
  const at::Tensor second = model.loss(0);
  reducer.prepare_for_backward(first);
  step(reducer, second);
  // Here the loss is the watched output.
  EXPECT_THAT(text_of<c10::Error>([&] { first.backward(); }),
              HasSubstr("backward reached parameter 0 again after"));
}

// As by a checkpoint around the wrapped module, on one rank.
TEST(MisuseTest, ForwardInsideOfItsOwnBackward) {
  run_ranks(2, [&](const Group& group) {
    const ToyModel model({{2}, {3}});
    Reducer reducer(model.parameters, group, {.parameter_names = model.names});
    const int rank = group->getRank();
    const unsigned hook =
        model.parameters[1].register_hook([&](const at::Tensor&) {
          if (rank == 1) reducer.prepare_for_backward(model.loss(rank));
        });
    const at::Tensor loss = model.loss_in_order({0, 1}, rank);
    reducer.prepare_for_backward(loss);
    if (rank == 1) {
      EXPECT_THAT(
          text_of<c10::Error>([&] { loss.backward(); }),
          AllOf(HasSubstr("outside of the backward of iteration 1 on "
                          "rank 1, found a forward inside of it"),
                HasSubstr("Put checkpoints inside the wrapped module")));
    } else {
      EXPECT_THAT(text_of<c10::DistBackendError>([&] { loss.backward(); }),
                  HasSubstr("rank 1 failed in iteration 1"));
    }
    model.parameters[1].remove_hook(hook);
    expect_trains(reducer, model, rank, 2);
  });
}

TEST(MisuseTest, GradientThatBecomesReadyTwiceInOneIteration) {
  const ToyModel model({{2}, {3}});
  Reducer reducer(model.parameters, single_process_group(),
                  {.parameter_names = model.names});
  const at::Tensor half = model.loss_in_order({1}, 0);
  reducer.prepare_for_backward(half);
  half.backward({}, /*retain_graph=*/true);
  EXPECT_THAT(text_of<c10::Error>([&] { half.backward(); }),
              AllOf(HasSubstr("the gradient of parameter 1 ('p1')"),
                    HasSubstr("became ready twice in iteration 1 on rank 0")));
  expect_trains(reducer, model, 0, 1);
}

TEST(MisuseTest, MissingGradientsAreNamedAtTheNextPrepare) {
  run_ranks(2, [&](const Group& group) {
    const ToyModel model({{2}, {3}, {1}});
    Reducer reducer(model.parameters, group, {.parameter_names = model.names});
    step(reducer, model.loss_in_order({1}, group->getRank()));
    EXPECT_THAT(
        text_of<c10::Error>([&] {
          reducer.prepare_for_backward(model.loss(group->getRank()));
        }),
        AllOf(HasSubstr("2 of 3 parameters got no gradient in iteration 1"),
              HasSubstr("parameters 0 ('p0'), 2 ('p2')")));
    expect_trains(reducer, model, group->getRank(), 2);
  });
}

// Rank 0 does not use all parameters.
TEST(OneBackwardTest, MissingGradientsAreNamedAtItsEnd) {
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    const ToyModel model({{2}, {3}, {1}});
    Reducer reducer(model.parameters, group,
                    {.bucket_cap_bytes = {4},
                     .parameter_names = model.names,
                     .one_backward_per_forward = true});
    for (int s = 0; s < 2; ++s) {
      const std::string text =
          rank == 0
              ? text_of<c10::Error>(
                    [&] { step(reducer, model.loss_in_order({1}, rank)); })
              : text_of<PeerError>([&] { step(reducer, model.loss(rank)); });
      EXPECT_THAT(
          text,
          AllOf(HasSubstr("2 of 3 parameters got no gradient in iteration"),
                HasSubstr("on rank 0"),
                HasSubstr("parameters 0 ('p0'), 2 ('p2')")));
      expect_trains(reducer, model, rank, 2);
    }
  });
}

TEST(OneBackwardTest, ABackwardWithoutGradientsDoesNotCount) {
  const ToyModel model({{2}, {3}});
  Reducer reducer(model.parameters, single_process_group(),
                  {.one_backward_per_forward = true});
  const at::Tensor input = at::ones({2}).requires_grad_();
  const at::Tensor output = model.loss(0) + input.sum();
  reducer.prepare_for_backward(output);
  EXPECT_NO_THROW(input.sum().backward());
  output.backward();
  EXPECT_EQ(reducer.statistics().reduced, 1);
}

TEST(MisuseTest, ParameterMovedOrCastAfterConstruction) {
  const ToyModel model({{2}, {3}});
  Reducer reducer(model.parameters, single_process_group(),
                  {.parameter_names = model.names});
  model.parameters[1].set_data(model.parameters[1].detach().to(at::kDouble));
  EXPECT_THAT(
      text_of<c10::Error>([&] { reducer.prepare_for_backward(model.loss(0)); }),
      HasSubstr("parameter 1 ('p1') was moved or cast after"));
}

TEST(MisuseTest, ParameterResizedAfterConstruction) {
  const ToyModel model(ToyModel::Sizes{{2}, {2, 3}});
  Reducer reducer(model.parameters, single_process_group(),
                  {.parameter_names = model.names});
  model.parameters[1].set_data(at::ones({3, 2}));
  EXPECT_THAT(text_of<c10::Error>([&] {
                reducer.prepare_for_backward(std::vector<at::Tensor>());
              }),
              HasSubstr("parameter 1 ('p1') had shape [2, 3] when the reducer "
                        "was made, it has [3, 2]"));
}

TEST(MisuseTest, AutogradDetectsAChangeOfASavedGradient) {
  for (const bool views : {true, false}) {
    const ToyModel model(ToyModel::Sizes{{2}});
    Reducer reducer(model.parameters, single_process_group(),
                    {.gradient_as_bucket_view = views});
    step(reducer, model.loss(0));
    const at::Tensor weight = at::ones({2}).requires_grad_();
    const at::Tensor penalty = (model.parameters[0].grad() * weight).sum();
    step(reducer, model.loss(0, 1));
    EXPECT_THAT(text_of<c10::Error>([&] { penalty.backward(); }),
                HasSubstr("modified by an inplace operation"));
  }
}

TEST(MisuseTest, SparseGradientOfADenseParameter) {
  const ToyModel model({{2}, {3}});
  Reducer reducer(model.parameters, single_process_group(),
                  {.parameter_names = model.names});
  const at::Tensor dense = at::ones({4, 2}).requires_grad_();
  Reducer of_dense({dense}, single_process_group());
  const at::Tensor rows = at::tensor({1, 3}, at::kLong);
  const at::Tensor loss =
      torch::embedding(dense, rows, -1, false, /*sparse=*/true).sum();
  of_dense.prepare_for_backward(loss);
  EXPECT_THAT(text_of<c10::Error>([&] { loss.backward(); }),
              AllOf(HasSubstr("the gradient of parameter 0 must be dense"),
                    HasSubstr("expect_sparse_gradients")));
}

// Makes the n-th collective of the iteration fail, and returns the error text.
std::string text_of_network_failure(RecordingGroup& recording, Reducer& reducer,
                                    const at::Tensor& loss, size_t n,
                                    bool at_launch) {
  const auto error = std::make_exception_ptr(UserError("connection closed"));
  const size_t sequence = recording.log().size() + n;
  if (at_launch) {
    recording.fail_at_launch(sequence, error);
  } else {
    recording.fail_at_completion(sequence, error);
  }
  return text_of<c10::DistBackendError>([&] { step(reducer, loss); });
}

TEST(PeerFailureTest, NamesTheBucketAndClosesTheGroup) {
  for (const bool at_launch : {false, true}) {
    RecordingGroup recording(2);
    const ToyModel model({{2}, {3}, {4}});
    Reducer reducer(
        model.parameters, recording.group(),
        {.bucket_plan = {{2}, {1}, {0}}, .parameter_names = model.names});
    EXPECT_THAT(text_of_network_failure(recording, reducer, model.loss(0),
                                        /*n=*/1, at_launch),
                AllOf(HasSubstr("bucket 1 of 3 (parameter 1 ('p1'))"),
                      HasSubstr("iteration 1 on rank 0"),
                      HasSubstr("connection closed")));
    EXPECT_FALSE(reducer.can_continue());
    EXPECT_THAT(
        text_of<c10::DistBackendError>([&] { step(reducer, model.loss(0)); }),
        AllOf(HasSubstr("found one that was closed"),
              HasSubstr("connection closed")));
  }
}

// The delivery of a bucket with an unused parameter waits for the map.
TEST(PeerFailureTest, NamesTheUsedMap) {
  struct Case {
    bool at_launch;
    bool has_users_hook;
  };
  for (const auto& [at_launch, has_users_hook] :
       {Case{true, false}, Case{false, false}, Case{false, true}}) {
    RecordingGroup recording(2);
    const ToyModel model({{2}, {3}});
    ReducerOptions options = {.find_unused_parameters = true};
    if (has_users_hook) {
      options.comm_hook =
          make_comm_hook([group = recording.group()](c10d::GradBucket& bucket) {
            return testing::all_reduced(group, bucket);
          });
    }
    Reducer reducer(model.parameters, recording.group(), options);
    EXPECT_THAT(
        text_of_network_failure(recording, reducer, model.loss_in_order({0}, 0),
                                /*n=*/1, at_launch),
        AllOf(HasSubstr("the used-parameter bitmap in iteration 1 on rank 0"),
              HasSubstr("connection closed")));
    EXPECT_FALSE(reducer.can_continue());
  }
}

TEST(PeerFailureTest, DestroyingTheReducerWithCollectivesInFlightIsClean) {
  RecordingGroup recording(2);
  const ToyModel model({{2}, {3}});
  auto reducer =
      std::make_unique<Reducer>(model.parameters, recording.group(),
                                ReducerOptions{.bucket_plan = {{1}, {0}}});
  const at::Tensor half = model.loss_in_order({1}, 0);
  step(*reducer, half);
  EXPECT_NO_THROW(reducer.reset());
}

struct Ending {
  ~Ending() { thread.set_value(std::this_thread::get_id()); }
  std::promise<std::thread::id> thread;
};

// The hook may own the group whose thread completes the future.
TEST(PeerFailureTest, TheHookOfCollectivesInFlightEndsOnAThreadOfItsOwn) {
  RecordingGroup recording(2);
  const ToyModel model({{2}, {3}});
  auto ending = std::make_shared<Ending>();
  std::future<std::thread::id> ended = ending->thread.get_future();
  const auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::AnyType::get());
  auto hook = make_comm_hook([future, ending = std::move(ending)](
                                 c10d::GradBucket&) { return future; });
  auto reducer = std::make_unique<Reducer>(
      model.parameters, recording.group(),
      ReducerOptions{.bucket_plan = {{1}, {0}}, .comm_hook = std::move(hook)});
  step(*reducer, model.loss_in_order({1}, 0));
  reducer.reset();
  EXPECT_EQ(ended.wait_for(std::chrono::seconds(0)),
            std::future_status::timeout);
  future->markCompleted(at::zeros({3}));
  EXPECT_NE(ended.get(), std::this_thread::get_id());
}

}  // namespace
}  // namespace brigade
