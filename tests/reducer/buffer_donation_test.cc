#include <torch/torch.h>

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/reducer/bucket_replica.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/reducer/toy_model.h"
#include "brigade/tests/support/local_ranks.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using testing::expect_averaged;
using testing::run_ranks;
using testing::step;
using testing::ToyModel;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// One gradient that is large enough for donation, and one that is not.
const ToyModel::Sizes kSizes = {{BufferDonation::kMinBytes / 4}, {3}};
constexpr int kRanks = 2;

ReducerOptions copies() {
  return {.bucket_plan = {{0, 1}}, .gradient_as_bucket_view = false};
}

bool lies_in_bucket(const at::Tensor& gradient) {
  return gradient.storage().nbytes() > gradient.nbytes();
}

// The first step copies, since buckets may be rebuilt after it.
void take_first_step(Reducer& reducer, const ToyModel& model, int rank) {
  step(reducer, model.loss(rank, 0));
  EXPECT_FALSE(lies_in_bucket(model.parameters[0].grad()));
  model.zero_grad();
}

TEST(BufferDonationTest, MovesALargeGradientIntoTheBucket) {
  run_ranks(kRanks, [](const Group& group) {
    const ToyModel model(kSizes);
    Reducer reducer(model.parameters, group, copies());
    take_first_step(reducer, model, group->getRank());
    const void* memory = nullptr;
    for (int s = 1; s < 5; ++s) {
      model.zero_grad();
      step(reducer, model.loss(group->getRank(), s));
      expect_averaged(model, kRanks, s);
      const at::Tensor& large = model.parameters[0].grad();
      EXPECT_TRUE(lies_in_bucket(large));
      EXPECT_FALSE(large.is_view());
      EXPECT_FALSE(lies_in_bucket(model.parameters[1].grad()));
      if (s > 1) {
        EXPECT_EQ(large.const_data_ptr(), memory) << "step " << s;
      }
      memory = large.const_data_ptr();
    }
  });
}

TEST(BufferDonationTest, KeepsTheTensorThatAutogradMade) {
  run_ranks(kRanks, [](const Group& group) {
    const ToyModel model(kSizes);
    Reducer reducer(model.parameters, group, copies());
    take_first_step(reducer, model, group->getRank());
    const c10::TensorImpl* seen = nullptr;
    model.parameters[1].register_hook([&](const at::Tensor&) {
      seen = model.parameters[0].grad().unsafeGetTensorImpl();
    });
    step(reducer, model.loss_in_order({0, 1}, group->getRank()));
    const at::Tensor& gradient = model.parameters[0].grad();
    EXPECT_EQ(gradient.unsafeGetTensorImpl(), seen);
    EXPECT_TRUE(lies_in_bucket(gradient));
    EXPECT_GT(gradient._version(), 0);
    expect_averaged(model, kRanks, 0);
  });
}

// A user may keep these of a gradient and then set `.grad` to None.
TEST(BufferDonationTest, ReallocatesWhileMemoryIsHeld) {
  struct Keeper {
    std::string name;
    std::function<std::shared_ptr<void>(const at::Tensor&)> keep;
  };
  const auto keeps = [](auto made) {
    return std::make_shared<decltype(made)>(std::move(made));
  };
  const std::vector<Keeper> keepers = {
      {"the tensor", [&](const at::Tensor& g) { return keeps(g); }},
      {"an alias", [&](const at::Tensor& g) { return keeps(g.detach()); }},
      {"a part", [&](const at::Tensor& g) { return keeps(g.slice(0, 0, 1)); }},
      {"the storage", [&](const at::Tensor& g) { return keeps(g.storage()); }}};
  for (const Keeper& keeper : keepers) {
    run_ranks(kRanks, [&](const Group& group) {
      const ToyModel model(kSizes);
      Reducer reducer(model.parameters, group, copies());
      take_first_step(reducer, model, group->getRank());
      std::vector<std::shared_ptr<void>> kept;
      std::vector<const float*> memory;
      for (int s = 0; s < 5; ++s) {
        model.zero_grad();
        step(reducer, model.loss(group->getRank(), s));
        expect_averaged(model, kRanks, s);
        const at::Tensor& gradient = model.parameters[0].grad();
        EXPECT_EQ(lies_in_bucket(gradient),
                  s < BufferDonation::kMaxReallocations);
        kept.push_back(keeper.keep(gradient));
        memory.push_back(gradient.const_data_ptr<float>());
        for (int before = 0; before <= s; ++before) {
          EXPECT_EQ(*memory[before],
                    model.average(0, kRanks, before)[0].item<float>())
              << keeper.name << " of step " << before << " in step " << s;
        }
      }
    });
  }
}

TEST(BufferDonationTest, ReallocatesAfterTheStorageWasMoved) {
  run_ranks(kRanks, [](const Group& group) {
    const ToyModel model(kSizes);
    Reducer reducer(model.parameters, group, copies());
    take_first_step(reducer, model, group->getRank());
    step(reducer, model.loss(group->getRank(), 0));
    ASSERT_TRUE(lies_in_bucket(model.parameters[0].grad()));
    const at::Tensor elsewhere =
        at::empty({kSizes[0][0] + kSizes[1][0]}, at::kFloat);
    c10::StorageImpl* storage =
        model.parameters[0].grad().storage().unsafeGetStorageImpl();
    std::memcpy(elsewhere.mutable_data_ptr(), storage->data(),
                storage->nbytes());
    storage->set_data_ptr_noswap(c10::DataPtr(
        elsewhere.mutable_data_ptr(), c10::Device(c10::DeviceType::CPU)));
    model.zero_grad();
    step(reducer, model.loss(group->getRank(), 1));
    expect_averaged(model, kRanks, 1);
    EXPECT_TRUE(at::equal(elsewhere.slice(0, 0, kSizes[0][0]),
                          model.average(0, kRanks, 0)));
  });
}

TEST(BufferDonationTest, GradientsThatAreKeptKeepTheirMemory) {
  for (const bool zeroed : {true, false}) {
    run_ranks(kRanks, [&](const Group& group) {
      const ToyModel model(kSizes);
      Reducer reducer(model.parameters, group, copies());
      take_first_step(reducer, model, group->getRank());
      step(reducer, model.loss(group->getRank(), 0));
      const void* memory = model.parameters[0].grad().const_data_ptr();
      for (int s = 1; s < 4; ++s) {
        if (zeroed) model.zero_grad(/*set_to_none=*/false);
        const at::Tensor before = model.parameters[0].grad().clone();
        step(reducer, model.loss(group->getRank(), s));
        // The earlier gradient is equal on all ranks, so its average is itself.
        EXPECT_TRUE(at::equal(model.parameters[0].grad(),
                              before + model.average(0, kRanks, s)));
        EXPECT_EQ(model.parameters[0].grad().const_data_ptr(), memory);
      }
    });
  }
}

TEST(BufferDonationTest, CopiesIfTheGradientIsSharedOrConverted) {
  struct Case {
    ReducerOptions options = copies();
    std::function<at::Tensor(const at::Tensor&)> look = [](const at::Tensor&) {
      return at::Tensor();
    };
    bool creates_graph = false;
    bool accumulates = false;
  };
  const std::map<std::string, std::function<Case(const Group&)>> cases = {
      {"the tensor",
       [](const Group&) {
         return Case{.look = [](const at::Tensor& g) { return g; }};
       }},
      {"an alias",
       [](const Group&) {
         return Case{.look = [](const at::Tensor& g) { return g.detach(); }};
       }},
      {"another library",
       [](const Group&) {
         return Case{.look = [](const at::Tensor& g) {
           g.storage().unsafeGetStorageImpl()->set_resizable(false);
           return at::Tensor();
         }};
       }},
      {"a graph of its own",
       [](const Group&) { return Case{.creates_graph = true}; }},
      {"an accumulated one",
       [](const Group&) { return Case{.accumulates = true}; }},
      {"a user's hook",
       [](const Group& group) {
         Case made;
         made.options.comm_hook = make_comm_hook(
             [hook = all_reduce_hook(group)](c10d::GradBucket& bucket) {
               bucket.getBufferRef().div_(kRanks);
               return hook->runHook(bucket);
             });
         return made;
       }},
      {"another dtype on the wire",
       [](const Group& group) {
         Case made;
         made.options.comm_hook = fp16_hook(group);
         return made;
       }},
  };
  for (const auto& [name, make] : cases) {
    run_ranks(kRanks, [&, &name = name, &make = make](const Group& group) {
      const ToyModel model(kSizes);
      const Case setting = make(group);
      Reducer reducer(model.parameters, group, setting.options);
      take_first_step(reducer, model, group->getRank());
      at::Tensor seen;
      const void* memory = nullptr;
      model.parameters[1].register_hook([&](const at::Tensor&) {
        seen = setting.look(model.parameters[0].grad());
        memory = model.parameters[0].grad().const_data_ptr();
      });
      if (setting.accumulates) {
        model.loss_in_order({0, 1}, group->getRank()).backward();
      }
      const at::Tensor loss = model.loss_in_order({0, 1}, group->getRank());
      reducer.prepare_for_backward(loss);
      loss.backward({}, setting.creates_graph, setting.creates_graph);
      const at::Tensor gradient = model.parameters[0].grad().detach();
      EXPECT_EQ(gradient.const_data_ptr(), memory) << name;
      const at::Tensor once = model.average(0, kRanks);
      const at::Tensor expected = setting.accumulates ? 2 * once : once;
      EXPECT_TRUE(at::equal(gradient, expected)) << name;
      if (seen.defined()) {
        EXPECT_TRUE(at::equal(seen, expected)) << name;
      }
      for (const at::Tensor& p : model.parameters) p.mutable_grad().reset();
    });
  }
}

TEST(BufferDonationTest, EveryLocalReplicaGetsTheResult) {
  const std::vector<ToyModel> models = {ToyModel(kSizes), ToyModel(kSizes)};
  Reducer reducer(std::vector{models[0].parameters, models[1].parameters},
                  single_process_group(), copies());
  for (int s = 0; s < 4; ++s) {
    for (const ToyModel& model : models) model.zero_grad();
    step(reducer, models[0].loss(0, s) + models[1].loss(1, s));
    for (const ToyModel& model : models) expect_averaged(model, kRanks, s);
  }
}

}  // namespace
}  // namespace brigade
