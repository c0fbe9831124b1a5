#include "brigade/hooks/graph_search.h"

#include <torch/torch.h>

#include <algorithm>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "brigade/hooks/autograd_hooks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using torch::autograd::Node;

std::vector<at::Tensor> make_parameters(size_t count) {
  std::vector<at::Tensor> parameters;
  for (size_t i = 0; i < count; ++i) {
    parameters.push_back(torch::ones({2}, at::requires_grad()));
  }
  return parameters;
}

// The parameters w[0..3] and a search over them.
class GraphSearchTest : public ::testing::Test {
 protected:
  GraphSearchTest() {
    std::vector<Node*> nodes;
    for (const at::Tensor& parameter : w) {
      accumulators_.push_back(
          torch::autograd::impl::grad_accumulator(parameter));
      nodes.push_back(accumulators_.back().get());
    }
    search.emplace(nodes);
  }

  std::vector<size_t> unreached(const std::vector<at::Tensor>& outputs) {
    return search->unreached(outputs);
  }

  std::vector<at::Tensor> w = make_parameters(4);
  const at::Tensor x = torch::ones({2});
  std::optional<GraphSearch> search;

 private:
  std::vector<NodePtr> accumulators_;
};

TEST_F(GraphSearchTest, FindsAllWithoutOutputsOrHistory) {
  EXPECT_THAT(unreached({}), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(unreached({at::Tensor(), x, (w[0] * 2).detach()}),
              ElementsAre(0, 1, 2, 3));
  const torch::NoGradGuard no_grad;
  EXPECT_THAT(unreached({w[0] * w[1]}), ElementsAre(0, 1, 2, 3));
}

TEST_F(GraphSearchTest, ReachesAParameterThatIsAnOutput) {
  EXPECT_THAT(unreached({w[1], w[3] * 2}), ElementsAre(0, 2));
  EXPECT_THAT(unreached({w[0], w[1], w[2], w[3]}), IsEmpty());
}

TEST_F(GraphSearchTest, IgnoresLeavesThatAreNotParameters) {
  for (int i = 0; i < 20; ++i) {
    // The leaves have no accumulator; the view creates its node when grad_fn()
    // is called.
    std::vector<at::Tensor> outputs = make_parameters(5);
    at::Tensor base = w[0] * 2;
    at::Tensor view = base[0];
    base.mul_(w[1]);
    outputs.push_back(view);
    EXPECT_THAT(unreached(outputs), ElementsAre(2, 3));
  }
}

TEST_F(GraphSearchTest, SearchesWhileABackwardRuns) {
  at::Tensor middle = w[0] * w[1];
  std::vector<size_t> found;
  middle.register_hook([&](const at::Tensor&) { found = unreached({middle}); });
  middle.sum().backward();
  EXPECT_THAT(found, ElementsAre(2, 3));
}

TEST_F(GraphSearchTest, WalksAMillionNodesDeep) {
  at::Tensor deep = w[3] * 2;
  for (int i = 0; i < 1'000'000; ++i) deep.neg_();
  EXPECT_THAT(unreached({deep}), ElementsAre(0, 1, 2));
  EXPECT_THAT(unreached({w[0] * 2}), ElementsAre(1, 2, 3));
}

TEST_F(GraphSearchTest, WalksAGraphWithExponentiallyManyPaths) {
  at::Tensor ladder = w[0] * w[2];
  for (int i = 0; i < 100; ++i) ladder = ladder + ladder;  // 2^100 paths
  EXPECT_THAT(unreached({ladder}), ElementsAre(1, 3));
}

TEST(GraphSearchErrorTest, NamesABadAccumulator) {
  const std::vector<at::Tensor> w = make_parameters(1);
  const auto accumulator = torch::autograd::impl::grad_accumulator(w[0]);
  const auto error_of = [](std::vector<Node*> nodes) -> std::string {
    try {
      GraphSearch search(nodes);
    } catch (const c10::ValueError& error) {
      return error.what_without_backtrace();
    }
    return "";
  };
  EXPECT_THAT(error_of({accumulator.get(), nullptr}), HasSubstr("parameter 1"));
  EXPECT_THAT(error_of({accumulator.get(), accumulator.get()}),
              HasSubstr("parameter 1 twice"));
}

void collect_naively(const Node* node, std::set<const Node*>& found) {
  if (!node || !found.insert(node).second) return;
  for (const auto& edge : node->next_edges()) {
    collect_naively(edge.function.get(), found);
  }
}

TEST(GraphSearchFuzzTest, AgreesWithANaiveSearch) {
  std::mt19937 random(17);
  const auto below = [&random](size_t bound) { return random() % bound; };
  for (int model = 0; model < 40; ++model) {
    const std::vector<at::Tensor> w = make_parameters(1 + below(60));
    std::vector<NodePtr> accumulators;
    std::vector<Node*> nodes;
    for (const at::Tensor& parameter : w) {
      accumulators.push_back(
          torch::autograd::impl::grad_accumulator(parameter));
      nodes.push_back(accumulators.back().get());
    }
    GraphSearch search(nodes);
    for (int forward = 0; forward < 10; ++forward) {
      std::vector<at::Tensor> tensors = {torch::ones({2})};
      // Deep graphs with more uses than parameters, some of which are unused.
      const auto recent = [&] {
        const size_t back = below(std::min<size_t>(tensors.size(), 4));
        return tensors[tensors.size() - 1 - back];
      };
      const size_t operations = below(200);
      const size_t used = 1 + below(w.size());
      for (size_t i = 0; i < operations; ++i) {
        const at::Tensor a = recent();
        const at::Tensor b = below(2) ? w[below(used)] : recent();
        switch (below(20)) {
          case 0:
            tensors.push_back(a.detach());
            break;
          case 1:
            tensors.push_back(at::stack({a, b, a}).sum(0));
            break;
          case 2:
            tensors.push_back(at::addcmul(a, b, a));
            break;
          case 3:
            tensors.push_back(tensors[below(tensors.size())] + b);
            break;
          default:
            tensors.push_back(a * b);
            break;
        }
      }
      std::vector<at::Tensor> outputs;
      for (size_t i = below(4); i > 0; --i) {
        outputs.push_back(below(5) ? recent() : w[below(used)]);
      }

      std::set<const Node*> reached;
      for (const at::Tensor& output : outputs) {
        collect_naively(
            torch::autograd::impl::gradient_edge(output).function.get(),
            reached);
      }
      std::vector<size_t> expected;
      for (size_t i = 0; i < nodes.size(); ++i) {
        if (!reached.contains(nodes[i])) expected.push_back(i);
      }
      ASSERT_EQ(search.unreached(outputs), expected)
          << "model " << model << ", forward " << forward;
    }
  }
}

}  // namespace
}  // namespace brigade
