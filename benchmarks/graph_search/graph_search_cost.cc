// What the search for unused parameters costs per parameter, and that for the
// streams of a backward.
//
// GraphSearch against a bare walk (a stack, a set of visited nodes, a map from
// accumulators to parameters) over a chain of one operation per parameter of 4
// elements. Each search walks a graph that was made just before, as after a
// forward; making it is not timed. Both arms must find the same. Medians with
// the arms interleaved:
//
//   graph_search_cost --benchmark_enable_random_interleaving=true
//       --benchmark_report_aggregates_only=true

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <memory>
#include <stack>
#include <unordered_set>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "benchmark/benchmark.h"
#include "brigade/benchmarks/reducer_cost/tiny_model.h"
#include "brigade/hooks/graph_search.h"
#include "brigade/hooks/output_watch.h"

namespace brigade::benchmarks {
namespace {

using torch::autograd::Node;

class Accumulators {
 public:
  explicit Accumulators(const std::vector<at::Tensor>& parameters) {
    for (const at::Tensor& parameter : parameters) {
      owners_.push_back(torch::autograd::impl::grad_accumulator(parameter));
      nodes.push_back(owners_.back().get());
    }
  }

  std::vector<Node*> nodes;

 private:
  std::vector<NodePtr> owners_;
};

class BareWalk {
 public:
  explicit BareWalk(const std::vector<Node*>& accumulators)
      : used_(accumulators.size()) {
    for (size_t i = 0; i < accumulators.size(); ++i) {
      parameter_of_[accumulators[i]] = i;
    }
  }

  size_t num_unreached(const at::Tensor& output) {
    std::fill(used_.begin(), used_.end(), false);
    std::unordered_set<Node*> seen = {output.grad_fn().get()};
    std::stack<Node*> to_visit;
    to_visit.push(output.grad_fn().get());
    size_t unreached = used_.size();
    while (!to_visit.empty()) {
      Node* node = to_visit.top();
      to_visit.pop();
      const auto found = parameter_of_.find(node);
      if (found != parameter_of_.end() && !used_[found->second]) {
        used_[found->second] = true;
        --unreached;
      }
      for (const auto& edge : node->next_edges()) {
        Node* next = edge.function.get();
        if (next && seen.insert(next).second) to_visit.push(next);
      }
    }
    return unreached;
  }

 private:
  absl::flat_hash_map<Node*, size_t> parameter_of_;
  std::vector<bool> used_;
};

class OurWalk {
 public:
  explicit OurWalk(const std::vector<Node*>& accumulators)
      : search_(accumulators) {}

  size_t num_unreached(const at::Tensor& output) {
    return search_.unreached({&output, 1}).size();
  }

 private:
  GraphSearch search_;
};

// A search whose last parameter is not used: nothing ends it early.
template <typename Walk>
void search(benchmark::State& state) {
  const TinyModel model(state.range(0));
  const TinyModel unused(1);
  std::vector<at::Tensor> parameters = model.parameters();
  parameters.push_back(unused.parameters()[0]);
  const Accumulators accumulators(parameters);
  Walk walk(accumulators.nodes);
  for (auto _ : state) {
    const at::Tensor output = model.forward();
    const auto start = std::chrono::steady_clock::now();
    const size_t unreached = walk.num_unreached(output);
    const std::chrono::duration<double> elapsed =
        std::chrono::steady_clock::now() - start;
    if (unreached != 1) return state.SkipWithError("found another number");
    state.SetIterationTime(elapsed.count());
  }
  state.counters["us_per_parameter"] = benchmark::Counter(
      1e-6 * static_cast<double>(state.iterations() * state.range(0)),
      benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

void set_up(benchmark::internal::Benchmark* benchmark) {
  benchmark->Arg(1'000)
      ->Arg(5'000)
      ->UseManualTime()
      ->MinTime(0.05)
      ->Repetitions(15)
      ->Unit(benchmark::kMicrosecond);
}

BENCHMARK(search<OurWalk>)->Name("graph_search")->Apply(set_up);
BENCHMARK(search<BareWalk>)->Name("bare_walk")->Apply(set_up);

}  // namespace
}  // namespace brigade::benchmarks

BENCHMARK_MAIN();
