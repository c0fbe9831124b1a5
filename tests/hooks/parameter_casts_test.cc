#include "brigade/hooks/parameter_casts.h"

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "brigade/hooks/activation_checkpoint.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::HasSubstr;

// Returns a weight whose values bfloat16 rounds.
at::Tensor weight_of(at::IntArrayRef sizes) {
  at::Tensor weight = at::empty(sizes);
  weight.copy_(at::arange(weight.numel()).reshape(sizes) / 7 + 1.0 / 3);
  return weight.requires_grad_();
}

at::Tensor input_of(at::IntArrayRef sizes) {
  return (at::arange(12).slice(0, 0, c10::multiply_integers(sizes)) / 5)
      .reshape(sizes)
      .to(at::kBFloat16)
      .requires_grad_();  // so that autograd saves the weight
}

class ParameterCastsTest : public ::testing::Test {
 protected:
  // Returns forward() with the parameters in bfloat16.
  at::Tensor run(const std::function<at::Tensor()>& forward) const {
    const ParameterCasts::Scope scope(
        std::make_shared<ParameterCasts>(parameters_, at::kBFloat16));
    return forward();
  }

  template <typename Action>
  static std::string error_of(const Action& action) {
    try {
      action();
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "";
  }

  at::Tensor linear(const at::Tensor& input) const {
    return torch::nn::functional::linear(input, weight_, bias_);
  }

  struct Gradients {
    at::Tensor weight, bias, input;
  };

  // Returns the gradients of linear().square().sum(), with casts in the graph.
  Gradients expected_gradients(const at::Tensor& input) const {
    const auto leaf = [](const at::Tensor& tensor) {
      return tensor.detach().requires_grad_();
    };
    const Gradients leaves = {leaf(weight_), leaf(bias_), leaf(input)};
    torch::nn::functional::linear(leaves.input, leaves.weight.to(at::kBFloat16),
                                  leaves.bias.to(at::kBFloat16))
        .square()
        .sum()
        .backward();
    return {leaves.weight.grad(), leaves.bias.grad(), leaves.input.grad()};
  }

  void expect_gradients(const at::Tensor& input) const {
    const Gradients expected = expected_gradients(input);
    EXPECT_TRUE(at::equal(weight_.grad(), expected.weight));
    EXPECT_TRUE(at::equal(bias_.grad(), expected.bias));
    EXPECT_TRUE(at::equal(input.grad(), expected.input));
  }

  const at::Tensor weight_ = weight_of({2, 3});
  const at::Tensor bias_ = weight_of({2});
  const std::vector<at::Tensor> parameters_ = {weight_, bias_};
  const at::Tensor input_ = input_of({4, 3});
};

TEST_F(ParameterCastsTest, ParametersHoldCopiesInsideOnly) {
  const at::Tensor before = weight_.detach().clone();
  const void* const memory = weight_.data_ptr();
  const int64_t version = weight_._version();
  run([&] {
    EXPECT_EQ(weight_.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(weight_.is_leaf());
    EXPECT_TRUE(at::equal(weight_, before.to(at::kBFloat16)));
    return at::Tensor();
  });
  EXPECT_EQ(weight_.scalar_type(), at::kFloat);
  EXPECT_EQ(weight_.data_ptr(), memory);
  EXPECT_EQ(weight_._version(), version);
  EXPECT_TRUE(at::equal(weight_, before));
}

TEST_F(ParameterCastsTest, GradientsHaveTheBitsOfCastsInTheGraph) {
  const at::Tensor output = run([&] { return linear(input_); });
  EXPECT_EQ(output.scalar_type(), at::kBFloat16);
  output.square().sum().backward();
  EXPECT_EQ(weight_.grad().scalar_type(), at::kFloat);
  expect_gradients(input_);
}

TEST_F(ParameterCastsTest, GradientsOfSeveralUsesAreAddedInFullPrecision) {
  // bfloat16 can't represent 257.
  const at::Tensor large = at::full({2}, 256.0).to(at::kBFloat16);
  run([&] { return (bias_ * large).sum() + bias_.sum(); }).backward();
  EXPECT_TRUE(at::equal(bias_.grad(), at::full({2}, 257.0)));
}

TEST_F(ParameterCastsTest, ForwardsBeforeABackward) {
  const at::Tensor other = input_of({2, 3}) + 1;
  const at::Tensor first = run([&] { return linear(input_).square().sum(); });
  const at::Tensor second = run([&] { return linear(other).square().sum(); });
  {
    const at::NoGradGuard no_grad;
    run([&] { return linear(input_); });
  }
  (first.to(at::kFloat) + second.to(at::kFloat)).backward();
  EXPECT_TRUE(at::equal(weight_.grad(), expected_gradients(input_).weight +
                                            expected_gradients(other).weight));
}

TEST_F(ParameterCastsTest, ParametersMayChangeBeforeBackward) {
  const at::Tensor expected = expected_gradients(input_).weight;
  const at::Tensor loss = run([&] { return linear(input_).square().sum(); });
  {
    const at::NoGradGuard no_grad;
    weight_.fill_(100);
  }
  loss.backward();
  EXPECT_TRUE(at::equal(weight_.grad(), expected));
  EXPECT_TRUE(at::equal(weight_, at::full({2, 3}, 100.0)));
}

TEST_F(ParameterCastsTest, GradientsOfGradients) {
  const auto twice = [&](const at::Tensor& loss, const at::Tensor& weight) {
    const auto first = torch::autograd::grad({loss}, {weight}, {},
                                             /*retain_graph=*/true,
                                             /*create_graph=*/true);
    return torch::autograd::grad({first[0].square().sum()}, {weight})[0];
  };
  const at::Tensor leaf = weight_.detach().requires_grad_();
  const at::Tensor expected =
      twice((input_.matmul(leaf.to(at::kBFloat16).t())).square().sum(), leaf);
  const at::Tensor loss =
      run([&] { return input_.matmul(weight_.t()).square().sum(); });
  EXPECT_TRUE(at::equal(twice(loss, weight_), expected));
}

TEST_F(ParameterCastsTest, CheckpointsRunAgainWithTheSameCopies) {
  const Gradients expected = expected_gradients(input_);
  const at::Tensor loss = run([&] {
    return checkpoint(
        [this](const at::Tensor& x) {
          EXPECT_EQ(weight_.scalar_type(), at::kBFloat16);
          return checkpoint(
              [this](const at::Tensor& y) {
                EXPECT_EQ(weight_.scalar_type(), at::kBFloat16);
                return linear(y).square().sum();
              },
              x);
        },
        input_);
  });
  loss.backward();
  EXPECT_TRUE(at::equal(weight_.grad(), expected.weight));
  EXPECT_TRUE(at::equal(bias_.grad(), expected.bias));
  EXPECT_EQ(weight_.scalar_type(), at::kFloat);
}

TEST_F(ParameterCastsTest, FrozenAndOtherParameters) {
  const at::Tensor frozen = weight_of({3}).detach();
  const at::Tensor integer = at::ones({3}, at::kLong);
  const at::Tensor low = at::ones({3}, at::kBFloat16);
  const at::Tensor complex = at::ones({3}, at::kComplexFloat);
  const std::vector<at::Tensor> all = {frozen, integer, low, complex, weight_};
  {
    const ParameterCasts::Scope scope(
        std::make_shared<ParameterCasts>(all, at::kBFloat16));
    EXPECT_EQ(frozen.scalar_type(), at::kBFloat16);
    EXPECT_EQ(integer.scalar_type(), at::kLong);
    EXPECT_EQ(low.scalar_type(), at::kBFloat16);
    EXPECT_EQ(complex.scalar_type(), at::kComplexFloat);
  }
  EXPECT_EQ(frozen.scalar_type(), at::kFloat);
}

TEST_F(ParameterCastsTest, InferenceMode) {
  {
    const at::NoGradGuard no_grad;
    weight_.add_(1);  // increments the version
  }
  const at::Tensor before = weight_.detach().clone();
  {
    const c10::InferenceMode inference;
    const ParameterCasts::Scope scope(
        std::make_shared<ParameterCasts>(parameters_, at::kBFloat16));
    EXPECT_EQ(linear(input_).scalar_type(), at::kBFloat16);
    EXPECT_EQ(scope.first_changed(), std::nullopt);
  }
  EXPECT_FALSE(weight_.is_inference());
  EXPECT_TRUE(at::equal(weight_, before));
  run([&] { return linear(input_).square().sum(); }).backward();
  expect_gradients(input_);
}

TEST_F(ParameterCastsTest, LayoutsAreKept) {
  const at::Tensor kernel =
      weight_of({2, 3, 2, 2}).detach().to(at::MemoryFormat::ChannelsLast);
  const std::vector<at::Tensor> parameters = {kernel};
  const ParameterCasts::Scope scope(
      std::make_shared<ParameterCasts>(parameters, at::kHalf));
  EXPECT_TRUE(kernel.is_contiguous(at::MemoryFormat::ChannelsLast));
}

TEST_F(ParameterCastsTest, ReportsChangesInsideAScope) {
  const at::Tensor frozen = weight_of({2}).detach();
  const auto changed_by = [&](const std::function<void()>& change) {
    const std::vector<at::Tensor> parameters = {weight_, bias_, frozen};
    const ParameterCasts::Scope scope(
        std::make_shared<ParameterCasts>(parameters, at::kBFloat16));
    EXPECT_EQ(scope.first_changed(), std::nullopt);
    const at::NoGradGuard no_grad;
    change();
    return scope.first_changed();
  };
  EXPECT_EQ(changed_by([&] { bias_.add_(1); }), 1);
  EXPECT_EQ(changed_by([&] { bias_.set_data(at::zeros({2}, at::kBFloat16)); }),
            1);
  EXPECT_EQ(changed_by([&] { frozen.set_requires_grad(true); }), 2);
}

// Saved tensor hooks disable autograd's own version check.
TEST_F(ParameterCastsTest, ActivationsChangedInPlaceAreRefused) {
  at::Tensor hidden;
  const at::Tensor loss = run([&] {
    hidden = linear(input_);
    return hidden.square().sum();
  });
  {
    const at::NoGradGuard no_grad;
    hidden.add_(1);
  }
  EXPECT_THAT(error_of([&] { loss.backward(); }),
              HasSubstr("was changed in place: expected version 0, found 1"));
}

// A mixed-precision model inside of another.
TEST_F(ParameterCastsTest, CheckpointsInNestedScopes) {
  const at::Tensor loss = run([&] {
    return run([&] {
      return checkpoint(
          [this](const at::Tensor& x) {
            EXPECT_EQ(weight_.scalar_type(), at::kBFloat16);
            return linear(x).square().sum();
          },
          input_);
    });
  });
  loss.backward();
  expect_gradients(input_);
  EXPECT_EQ(weight_.scalar_type(), at::kFloat);
}

TEST_F(ParameterCastsTest, OuterCopiesInInnerScopesMayChangeToo) {
  const Gradients expected = expected_gradients(input_);
  const std::vector<at::Tensor> none;
  const at::Tensor loss = run([&] {
    const ParameterCasts::Scope inner(
        std::make_shared<ParameterCasts>(none, at::kBFloat16));
    return linear(input_).square().sum();
  });
  {
    const at::NoGradGuard no_grad;
    weight_.fill_(100);
  }
  loss.backward();
  EXPECT_TRUE(at::equal(input_.grad(), expected.input));
}

TEST_F(ParameterCastsTest, CheckpointsAroundAScopeKeepNoActivations) {
  c10::weak_intrusive_ptr<c10::StorageImpl> hidden_memory =
      input_.storage().getWeakStorageImpl();
  const at::Tensor loss = checkpoint(
      [&](const at::Tensor& x) {
        return run([&] {
          const at::Tensor hidden = linear(x);
          hidden_memory = hidden.storage().getWeakStorageImpl();
          return hidden.square().sum();
        });
      },
      input_);
  EXPECT_TRUE(hidden_memory.expired());
  loss.backward();
  expect_gradients(input_);
}

TEST_F(ParameterCastsTest, CheckpointsOfOtherForwardsAreRefusedInside) {
  const at::Tensor loss = checkpoint(
      [this](const at::Tensor& x) { return linear(x).square().sum(); },
      input_.to(at::kFloat));
  const auto backward_inside = [&] {
    run([&] {
      loss.backward();
      return at::Tensor();
    });
  };
  EXPECT_THAT(error_of(backward_inside), HasSubstr("Run backward outside"));
  EXPECT_EQ(weight_.scalar_type(), at::kFloat);
}

TEST_F(ParameterCastsTest, UseOnAnotherThreadIsAnError) {
  const auto casts =
      std::make_shared<ParameterCasts>(parameters_, at::kBFloat16);
  std::string error;
  {
    const ParameterCasts::Scope scope(casts);
    std::thread([&] {
      error = error_of([&] { const ParameterCasts::Scope same(casts); });
    }).join();
    EXPECT_EQ(weight_.scalar_type(), at::kBFloat16);
  }
  EXPECT_THAT(error, HasSubstr("in use on another thread"));
  EXPECT_EQ(weight_.scalar_type(), at::kFloat);
}

TEST_F(ParameterCastsTest, DisabledHooksAreAnError) {
  at::SavedTensorDefaultHooks::disable("not now");
  const std::string error = error_of([&] { run([] { return at::Tensor(); }); });
  at::SavedTensorDefaultHooks::enable();
  EXPECT_THAT(error, HasSubstr("needs saved tensor hooks, which are disabled"));
  EXPECT_EQ(weight_.scalar_type(), at::kFloat);
}

TEST_F(ParameterCastsTest, CopiesEndWithTheGraph) {
  for (const bool backward : {false, true}) {
    c10::weak_intrusive_ptr<c10::StorageImpl> copy =
        input_.storage().getWeakStorageImpl();
    at::Tensor loss = run([&] {
      copy = weight_.storage().getWeakStorageImpl();
      return checkpoint(
          [this](const at::Tensor& x) { return linear(x).square().sum(); },
          input_);
    });
    EXPECT_FALSE(copy.expired());
    if (backward) {
      loss.backward();
    } else {
      loss.reset();
    }
    EXPECT_TRUE(copy.expired()) << backward;
  }
}

}  // namespace
}  // namespace brigade
