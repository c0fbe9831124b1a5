#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/autograd/engine/dist_engine.h>
#include <torch/torch.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/reducer/data_parallel_policy.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/reducer/toy_model.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using testing::step;
using testing::ToyModel;
using torch::distributed::autograd::DistAutogradContainer;
using torch::distributed::autograd::DistEngine;

// A pass of distributed autograd that stays in this process.
class Pass {
 public:
  Pass() : container_(DistAutogradContainer::init(/*worker_id=*/0)) {
    context_ = container_.newContext();
  }
  ~Pass() { container_.releaseContext(context_->contextId()); }

  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;

  void backward(const at::Tensor& loss) {
    DistEngine::getInstance().execute(context_->contextId(), {loss},
                                      /*retainGraph=*/false);
  }

  at::Tensor gradient(const at::Tensor& parameter) const {
    return context_->getGradients().at(parameter);
  }

 private:
  DistAutogradContainer& container_;
  torch::distributed::autograd::ContextPtr context_;
};

// Imitates a second rank with the same gradients, so that the reduction changes
// them.
std::shared_ptr<c10d::CommHookInterface> doubling(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return make_comm_hook([group](c10d::GradBucket& bucket) {
    bucket.getBufferRef().mul_(2);
    return testing::all_reduced(group, bucket);
  });
}

class ContextGradientsTest : public ::testing::TestWithParam<bool> {
 protected:
  ReducerOptions options() const {
    return {.bucket_cap_bytes = {24},
            .gradient_as_bucket_view = GetParam(),
            .comm_hook = doubling(group)};
  }

  const c10::intrusive_ptr<c10d::ProcessGroup> group = single_process_group();
  ToyModel model = ToyModel({{3, 2}, {5}, {2, 2, 2}});
};

TEST_P(ContextGradientsTest, ReducesGradientsInTheContext) {
  Reducer reducer(model.parameters, group, options());
  const at::Tensor own = at::full({5}, 7.0);
  model.parameters[1].mutable_grad() = own;
  for (int s = 0; s < 3; ++s) {
    Pass pass;
    const at::Tensor loss = model.loss(/*rank=*/0, s);
    reducer.prepare_for_backward(loss);
    pass.backward(loss);
    for (size_t i = 0; i < model.parameters.size(); ++i) {
      EXPECT_TRUE(at::equal(pass.gradient(model.parameters[i]),
                            model.gradient(i, 0, s) * 2))
          << "parameter " << i << " step " << s;
    }
    EXPECT_FALSE(model.parameters[0].grad().defined());
    EXPECT_TRUE(model.parameters[1].grad().is_same(own));
    EXPECT_TRUE(at::equal(own, at::full({5}, 7.0)));
  }
  EXPECT_EQ(reducer.statistics().reduced, 3);
}

TEST_P(ContextGradientsTest, KeepsGradOfABackwardWithoutContext) {
  Reducer reducer(model.parameters, group, options());
  for (int s = 0; s < 3; ++s) {
    model.zero_grad();
    const at::Tensor loss = model.loss(0, s);
    step(reducer, loss);
    Pass pass;
    const at::Tensor other = model.loss(0, s + 1);
    reducer.prepare_for_backward(other);
    pass.backward(other);
    for (size_t i = 0; i < model.parameters.size(); ++i) {
      EXPECT_TRUE(
          at::equal(model.parameters[i].grad(), model.gradient(i, 0, s) * 2));
      EXPECT_TRUE(at::equal(pass.gradient(model.parameters[i]),
                            model.gradient(i, 0, s + 1) * 2));
    }
  }
}

TEST_P(ContextGradientsTest, RestoresGradIfTheHookThrows) {
  ReducerOptions failing = options();
  failing.comm_hook = make_comm_hook(
      [](c10d::GradBucket&) -> c10::intrusive_ptr<c10::ivalue::Future> {
        throw std::domain_error("in the hook");
      });
  Reducer reducer(model.parameters, group, failing);
  Pass pass;
  const at::Tensor loss = model.loss(0);
  reducer.prepare_for_backward(loss);
  EXPECT_ANY_THROW(pass.backward(loss));
  reducer.end_iteration();
  for (const at::Tensor& p : model.parameters) {
    EXPECT_FALSE(p.grad().defined());
  }
}

INSTANTIATE_TEST_SUITE_P(ViewsOrCopies, ContextGradientsTest,
                         ::testing::Bool());

}  // namespace
}  // namespace brigade
