#include "brigade/hooks/activation_checkpoint.h"

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "brigade/hooks/autograd_hooks.h"
#include "brigade/hooks/graph_search.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Counts the activations that are in memory, by weak references.
class Witness {
 public:
  at::Tensor see(at::Tensor tensor) {
    seen_.emplace_back(tensor.storage().getWeakStorageImpl());
    return tensor;
  }
  size_t num_alive() const {
    size_t alive = 0;
    for (const auto& storage : seen_) alive += !storage.expired();
    return alive;
  }
  size_t num_seen() const { return seen_.size(); }

 private:
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> seen_;
};

template <typename Action>
std::string error_of(const Action& action) {
  try {
    action();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

class CheckpointTest : public ::testing::Test {
 protected:
  CheckpointTest() { torch::manual_seed(7); }

  // Three activations, two of them saved for backward.
  at::Tensor block(const at::Tensor& input) {
    ++runs;
    const at::Tensor product = witness.see(input * w);
    const at::Tensor wave = witness.see(product.sin());
    return witness.see(wave * product);
  }
  std::function<at::Tensor(const at::Tensor&)> block() {
    return [this](const at::Tensor& input) { return block(input); };
  }

  // Returns the gradients of `leaves` after forward().sum().backward().
  std::vector<at::Tensor> gradients(
      const std::vector<at::Tensor>& leaves,
      const std::function<at::Tensor()>& forward) {
    torch::manual_seed(3);
    for (const at::Tensor& leaf : leaves) leaf.mutable_grad().reset();
    forward().sum().backward();
    std::vector<at::Tensor> found;
    for (const at::Tensor& leaf : leaves) {
      found.push_back(leaf.grad().defined() ? leaf.grad().clone()
                                            : at::Tensor());
    }
    return found;
  }

  void expect_equal_gradients(const std::vector<at::Tensor>& leaves,
                              const std::function<at::Tensor()>& plain,
                              const std::function<at::Tensor()>& checkpointed) {
    const auto expected = gradients(leaves, plain);
    const auto found = gradients(leaves, checkpointed);
    for (size_t i = 0; i < leaves.size(); ++i) {
      ASSERT_EQ(found[i].defined(), expected[i].defined()) << "leaf " << i;
      if (!found[i].defined()) continue;
      EXPECT_TRUE(found[i].equal(expected[i])) << "leaf " << i;
    }
  }

  at::Tensor w = torch::randn({4}, at::requires_grad());
  at::Tensor x = torch::randn({4}, at::requires_grad());
  Witness witness;
  int runs = 0;
};

TEST_F(CheckpointTest, HasTheValuesAndGradientsOfThePlainCall) {
  EXPECT_TRUE(checkpoint(block(), x).equal(block(x)));
  expect_equal_gradients(
      {x, w}, [&] { return block(x * 2); },
      [&] { return checkpoint(block(), x * 2); });
}

TEST_F(CheckpointTest, FreesActivationsBetweenForwardAndBackward) {
  const at::Tensor plain = block(x);
  EXPECT_EQ(witness.num_alive(), 3);
  witness = Witness();
  at::Tensor output = checkpoint(block(), x);
  EXPECT_EQ(witness.num_seen(), 3);
  EXPECT_EQ(witness.num_alive(), 1);  // the output
  at::Tensor loss = output.sum();
  output.reset();
  EXPECT_EQ(witness.num_alive(), 0);
  loss.backward();
  EXPECT_EQ(runs, 3);
  EXPECT_EQ(witness.num_seen(), 6);
  EXPECT_EQ(witness.num_alive(), 0);
}

TEST_F(CheckpointTest, FreesActivationsAfterARetainedBackward) {
  at::Tensor loss = checkpoint(block(), x).sum();
  loss.backward({}, /*retain_graph=*/true);
  EXPECT_EQ(witness.num_alive(), 0);
  const at::Tensor once = w.grad().clone();
  loss.backward();
  EXPECT_EQ(runs, 3);
  EXPECT_TRUE(w.grad().equal(once + once));
}

TEST_F(CheckpointTest, RefusesASecondBackwardOfAReleasedGraph) {
  const at::Tensor loss = checkpoint(block(), x).sum();
  loss.backward();
  EXPECT_THAT(error_of([&] { loss.backward(); }), HasSubstr("retain_graph"));
}

TEST_F(CheckpointTest, ComputesGradientsOfCapturedParametersIfNoInputNeedsOne) {
  const at::Tensor data = torch::ones({4});
  expect_equal_gradients(
      {w}, [&] { return block(data); },
      [&] { return checkpoint(block(), data); });
  const auto without_inputs = [&] { return block(data); };
  expect_equal_gradients({w}, without_inputs,
                         [&] { return checkpoint(without_inputs); });
}

TEST_F(CheckpointTest, ReturnsAnything) {
  using Nest = std::tuple<at::Tensor, std::vector<at::Tensor>,
                          std::map<std::string, at::Tensor>, std::string>;
  const auto function = [&](const at::Tensor& a) -> Nest {
    return {a * w,
            {a.sin(), at::Tensor(), a.argmax()},
            {{"captured", w}, {"input", a}},
            "text"};
  };
  const auto total = [](const Nest& nest) {
    const auto& [first, list, by_name, text] = nest;
    EXPECT_EQ(text, "text");
    EXPECT_FALSE(list[1].defined());
    EXPECT_EQ(list[2].scalar_type(), at::kLong);
    return first + list[0] * 5 + by_name.at("captured") * 2 +
           by_name.at("input") * 3;
  };
  expect_equal_gradients(
      {x, w}, [&] { return total(function(x)); },
      [&] { return total(checkpoint(function, x)); });
  EXPECT_TRUE(w.is_leaf());
}

TEST_F(CheckpointTest, DrawsTheSameRandomNumbersAgain) {
  const auto function = [&](const at::Tensor& a) {
    return torch::dropout(a * w, 0.5, /*train=*/true) * torch::randn({4});
  };
  expect_equal_gradients(
      {x, w}, [&] { return function(x) * torch::randn({4}); },
      [&] { return checkpoint(function, x) * torch::randn({4}); });
}

TEST_F(CheckpointTest, RunsUnderTheSameAutocastAgain) {
  const at::Tensor weight = torch::randn({4, 4}, at::requires_grad());
  std::vector<at::ScalarType> dtypes;
  const auto function = [&](const at::Tensor& a) {
    at::Tensor product = a.matmul(weight);
    dtypes.push_back(product.scalar_type());
    return product.sin();
  };
  const auto under_autocast = [&](const std::function<at::Tensor()>& forward) {
    return [=] {
      at::autocast::set_autocast_enabled(at::kCPU, true);
      at::autocast::increment_nesting();
      at::Tensor output = forward();
      at::autocast::decrement_nesting();
      at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCPU, false);
      return output.to(at::kFloat);
    };
  };
  const at::Tensor input = torch::randn({2, 4}, at::requires_grad());
  expect_equal_gradients(
      {input, weight}, under_autocast([&] { return function(input); }),
      under_autocast([&] { return checkpoint(function, input); }));
  EXPECT_THAT(dtypes, ElementsAre(at::kBFloat16, at::kBFloat16, at::kBFloat16));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST_F(CheckpointTest, Nests) {
  const auto outer = [&](const at::Tensor& a) {
    return checkpoint(block(), checkpoint(block(), a).cos());
  };
  expect_equal_gradients(
      {x, w}, [&] { return block(block(x).cos()); },
      [&] { return checkpoint(outer, x); });
  witness = Witness();
  at::Tensor loss = checkpoint(outer, x).sum();
  EXPECT_EQ(witness.num_alive(), 0);
  loss.backward();
  EXPECT_EQ(witness.num_alive(), 0);
}

TEST_F(CheckpointTest, PropagatesTheFunctionsException) {
  bool throws = true;
  const auto function = [&](const at::Tensor& a) {
    if (throws) throw std::domain_error("in the function");
    return (a * w).sin();
  };
  EXPECT_THROW(checkpoint(function, x), std::domain_error);
  EXPECT_TRUE(at::GradMode::is_enabled());
  throws = false;
  const at::Tensor loss = checkpoint(function, x).sum();
  throws = true;
  EXPECT_THROW(loss.backward({}, /*retain_graph=*/true), std::domain_error);
  throws = false;
  loss.backward();
  EXPECT_TRUE(w.grad().equal((x * (x * w).cos()).detach()));
}

TEST_F(CheckpointTest, NamesAnInputThatWasChangedInPlace) {
  const at::Tensor data = torch::ones({4});
  const at::Tensor loss =
      checkpoint([&](const at::Tensor& a,
                     const at::Tensor& b) { return (a * b * w).sin(); },
                 x, data)
          .sum();
  data.add_(1);
  EXPECT_THAT(error_of([&] { loss.backward(); }),
              HasSubstr("modified by an inplace operation"));
}

TEST_F(CheckpointTest, OnlyCallsTheFunctionWithoutGradMode) {
  const torch::NoGradGuard no_grad;
  const at::Tensor output = checkpoint(block(), x);
  EXPECT_FALSE(output.requires_grad());
  EXPECT_EQ(runs, 1);
}

TEST_F(CheckpointTest, CallsGradientHooksOncePerParameter) {
  struct Listener {
    void operator()(VariableIndex variable, bool) {
      ready.push_back(variable.parameter);
    }
    std::vector<size_t> ready;
  } listener;
  const std::vector<at::Tensor> parameters = {w};
  const GradientHooks hooks(std::array{parameters}, std::ref(listener));
  GraphSearch search(hooks.accumulators());
  const at::Tensor output = checkpoint(block(), torch::ones({4}));
  EXPECT_THAT(search.unreached({&output, 1}), IsEmpty());
  output.sum().backward();
  EXPECT_THAT(listener.ready, ElementsAre(0));
}

TEST_F(CheckpointTest, SupportsGivenInputsAndSecondDerivatives) {
  const auto function = [&](const at::Tensor& a) { return (a * w).sin() * a; };
  const auto second_derivative = [&](const at::Tensor& output) {
    const at::Tensor first =
        torch::autograd::grad({output.sum()}, {x}, {}, /*retain_graph=*/true,
                              /*create_graph=*/true)[0];
    return torch::autograd::grad({first.square().sum()}, {x, w});
  };
  const auto expected = second_derivative(function(x));
  const auto found = second_derivative(checkpoint(function, x));
  EXPECT_TRUE(found[0].equal(expected[0]));
  EXPECT_TRUE(found[1].equal(expected[1]));
  EXPECT_FALSE(w.grad().defined());
}

TEST_F(CheckpointTest, SupportsABackwardInsideTheFunction) {
  const auto function = [&](const at::Tensor& a) {
    const at::Tensor value = (a * w).sin();
    return torch::autograd::grad({value.sum()}, {w}, {}, true, true)[0] * a;
  };
  function(x).sum().backward();
  const at::Tensor expected = w.grad().clone();
  w.mutable_grad().reset();
  checkpoint(function, x).sum().backward();
  EXPECT_TRUE(w.grad().equal(expected));
}

TEST_F(CheckpointTest, RefusesAnotherNumberOfSavedTensors) {
  bool more = false;
  const at::Tensor loss = checkpoint(
                              [&](const at::Tensor& a) {
                                at::Tensor b = (a * w).sin();
                                return more ? b.cos() : b;
                              },
                              x)
                              .sum();
  more = true;
  EXPECT_THAT(error_of([&] { loss.backward(); }),
              HasSubstr("saved 3 tensors for backward in its first run and 4"));
}

TEST_F(CheckpointTest, RefusesSavedTensorsOfAnotherShape) {
  int64_t size = 4;
  const at::Tensor loss =
      checkpoint(
          [&](const at::Tensor& a) { return a.narrow(0, 0, size).sin(); }, x)
          .sum();
  size = 3;
  EXPECT_THAT(error_of([&] { loss.backward(); }),
              HasSubstr("saved tensor 0 of 1 was Float [4] in the function's "
                        "first run and Float [3] in its second"));
}

TEST_F(CheckpointTest, NamesACapturedTensorThatWasChangedInPlace) {
  const at::Tensor captured = torch::ones({4});
  const auto function = [&](const at::Tensor& a) { return a * w * captured; };
  const at::Tensor first = checkpoint(function, x).sum();
  captured.add_(1);
  EXPECT_THAT(error_of([&] { first.backward(); }),
              HasSubstr("tensor that the function captured, Float [4], was "
                        "changed in place"));
  const at::Tensor second = checkpoint(function, x).sum();
  {
    const torch::NoGradGuard no_grad;
    w.add_(1);  // an optimizer's step
  }
  EXPECT_THAT(error_of([&] { second.backward(); }),
              HasSubstr("parameter that the function captured, Float [4], was "
                        "changed in place"));
}

TEST_F(CheckpointTest, RefusesAnInPlaceChangeOfASavedTensor) {
  const at::Tensor loss = checkpoint(
                              [&](const at::Tensor& a) {
                                at::Tensor b = (a * w).sigmoid();
                                b.mul_(2);  // sigmoid saves its result
                                return b.sum();
                              },
                              x)
                              .sum();
  EXPECT_THAT(error_of([&] { loss.backward(); }),
              HasSubstr("changed in place a tensor that backward needs"));
}

TEST_F(CheckpointTest, DoesNotRecomputeForParametersOrOutsideTensors) {
  const at::Tensor product = checkpoint(
      [&](const at::Tensor& a) {
        ++runs;
        return a * w;
      },
      x);
  ((x * w).exp() + product).sum().backward();
  EXPECT_EQ(runs, 1);
}

}  // namespace
}  // namespace brigade
