#include <torch/torch.h>

#include <tuple>
#include <utility>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/reducer/toy_model.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace local_replicas_test {

using testing::run_ranks;
using testing::ToyModel;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr int kCopies = 4;  // of the model, over all ranks

const ToyModel::Sizes kSizes = {{3, 2}, {5}, {}, {2, 2, 2}, {0}, {7}};

// Ranks x local replicas = kCopies. Copy c is replica c % replicas of rank
// c / replicas.
class Copies {
 public:
  Copies(const Group& group, ReducerOptions options)
      : per_rank_(kCopies / group->getSize()),
        first_(group->getRank() * per_rank_),
        models_(make_models(per_rank_)),
        reducer_(parameters_of(models_), group, std::move(options)) {}

  // One backward through the losses of all local replicas.
  void step(int step, const std::vector<std::vector<size_t>>& uses) {
    std::vector<at::Tensor> losses;
    for (int r = 0; r < per_rank_; ++r) {
      losses.push_back(
          models_[r].loss_in_order(uses[first_ + r], first_ + r, step));
    }
    reducer_.prepare_for_backward(losses);
    at::Tensor sum = losses[0];
    for (int r = 1; r < per_rank_; ++r) sum = sum + losses[r];
    sum.backward();
  }

  void step(int step) { step_in({0, 1, 2, 3, 4, 5}, step); }

  void step_in(const std::vector<size_t>& order, int s) {
    step(s, std::vector<std::vector<size_t>>(kCopies, order));
  }

  void zero_grad(bool set_to_none = true) {
    for (const ToyModel& model : models_) model.zero_grad(set_to_none);
  }

  const std::vector<ToyModel>& models() const { return models_; }
  Reducer& reducer() { return reducer_; }

 private:
  static std::vector<ToyModel> make_models(int n) {
    std::vector<ToyModel> models;
    for (int i = 0; i < n; ++i) models.emplace_back(kSizes);
    return models;
  }

  static std::vector<std::vector<at::Tensor>> parameters_of(
      const std::vector<ToyModel>& models) {
    std::vector<std::vector<at::Tensor>> replicas;
    for (const ToyModel& model : models) replicas.push_back(model.parameters);
    return replicas;
  }

  const int per_rank_;
  const int first_;
  const std::vector<ToyModel> models_;
  Reducer reducer_;
};

// Ranks x gradients as views x bucket cap in bytes. 1 rank of 4 replicas, 2 of
// 2 and 4 of 1 must give the same bits: those of ToyModel::average().
class LocalReplicasTest
    : public ::testing::TestWithParam<std::tuple<int, bool, int64_t>> {
 protected:
  ReducerOptions options() const {
    return {.bucket_cap_bytes = {std::get<2>(GetParam())},
            .gradient_as_bucket_view = std::get<1>(GetParam())};
  }

  template <typename Test>
  void run(ReducerOptions options, const Test& test) {
    run_ranks(std::get<0>(GetParam()), [&](const Group& group) {
      Copies copies(group, options);
      test(copies);
    });
  }
};

void expect_average(const Copies& copies, size_t parameter,
                    const at::Tensor& expected) {
  for (const ToyModel& model : copies.models()) {
    ASSERT_TRUE(model.parameters[parameter].grad().defined());
    EXPECT_TRUE(at::equal(model.parameters[parameter].grad(), expected))
        << "parameter " << parameter;
  }
}

TEST_P(LocalReplicasTest, EveryReplicaGetsTheAverageOverAll) {
  run(options(), [](Copies& copies) {
    for (int s = 0; s < 4; ++s) {
      copies.zero_grad(/*set_to_none=*/s % 2 == 0);
      copies.step(s);
      for (size_t i = 0; i < kSizes.size(); ++i) {
        expect_average(copies, i, copies.models()[0].average(i, kCopies, s));
      }
    }
    EXPECT_EQ(copies.reducer().statistics().rebuilds, 1);
  });
}

TEST_P(LocalReplicasTest, OneCollectiveRunsPerBucket) {
  run(options(), [](Copies& copies) {
    copies.step(0);
    const int64_t before = copies.reducer().statistics().buckets_launched;
    copies.step(1);
    int64_t filled = 0;
    for (const std::vector<size_t>& bucket :
         copies.reducer().plan().buckets()) {
      filled += bucket != std::vector<size_t>{4};  // of no elements
    }
    EXPECT_EQ(copies.reducer().statistics().buckets_launched - before, filled);
  });
}

TEST_P(LocalReplicasTest, EachReplicaMarksUsedParameters) {
  ReducerOptions finding = options();
  finding.find_unused_parameters = true;
  run(finding, [](Copies& copies) {
    const std::vector<std::vector<size_t>> uses = {
        {0, 1}, {1, 3}, {5}, {1, 0, 5}};
    for (int s = 0; s < 3; ++s) {
      copies.zero_grad();
      copies.step(s, uses);
      for (size_t i = 0; i < kSizes.size(); ++i) {
        at::Tensor sum = at::zeros_like(copies.models()[0].parameters[i]);
        bool used = false;
        for (int c = 0; c < kCopies; ++c) {
          if (std::count(uses[c].begin(), uses[c].end(), i) == 0) continue;
          sum = sum + copies.models()[0].gradient(i, c, s);
          used = true;
        }
        if (used) {
          expect_average(copies, i, (sum / kCopies).detach());
          continue;
        }
        for (const ToyModel& model : copies.models()) {
          EXPECT_FALSE(model.parameters[i].grad().defined());
        }
      }
    }
  });
}

TEST_P(LocalReplicasTest, AStaticGraphCountsEachReplica) {
  ReducerOptions fixed = options();
  fixed.static_graph = true;
  run(fixed, [](Copies& copies) {
    const std::vector<std::vector<size_t>> uses = {
        {0, 1, 2, 3, 4, 5}, {5, 4, 3, 2, 1}, {5, 1, 2, 3}, {1}};
    for (int s = 0; s < 3; ++s) {
      copies.zero_grad();
      copies.step(s, uses);
      expect_average(copies, 1, copies.models()[0].average(1, kCopies, s));
      expect_average(copies, 0,
                     (copies.models()[0].gradient(0, 0, s) / kCopies).detach());
    }
  });
}

TEST_P(LocalReplicasTest, AUsersHookGetsTheAverageOfTheReplicas) {
  run_ranks(std::get<0>(GetParam()), [&](const Group& group) {
    ReducerOptions summing = options();
    const int64_t ranks = group->getSize();
    summing.comm_hook =
        make_comm_hook([group, ranks](c10d::GradBucket& bucket) {
          bucket.getBufferRef().div_(ranks);
          return testing::all_reduced(group, bucket);
        });
    Copies copies(group, summing);
    for (int s = 0; s < 2; ++s) {
      copies.zero_grad();
      copies.step(s);
      expect_average(copies, 1, copies.models()[0].average(1, kCopies, s));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Ranks, LocalReplicasTest,
    ::testing::Values(std::tuple(1, true, 1 << 20), std::tuple(1, false, 1),
                      std::tuple(2, true, 1), std::tuple(2, false, 1 << 20),
                      std::tuple(4, true, 1), std::tuple(4, false, 1)));

TEST(LocalReplicasErrorTest, RanksMustHaveTheSameNumber) {
  run_ranks(2, [](const Group& group) {
    std::vector<std::vector<at::Tensor>> replicas;
    for (int r = 0; r <= group->getRank(); ++r) {
      replicas.push_back({at::ones({2}).requires_grad_()});
    }
    EXPECT_THROW(Reducer(replicas, group), c10::ValueError);
  });
}

TEST(LocalReplicasErrorTest, AReplicaWithoutBackwardIsAnError) {
  const ToyModel first(kSizes);
  const ToyModel second(kSizes);
  Reducer reducer({first.parameters, second.parameters},
                  single_process_group());
  const at::Tensor loss = first.loss(0);
  reducer.prepare_for_backward(std::vector<at::Tensor>{loss, second.loss(1)});
  loss.backward();
  EXPECT_THROW(reducer.prepare_for_backward(first.loss(0)), c10::Error);
}

}  // namespace local_replicas_test
}  // namespace brigade
