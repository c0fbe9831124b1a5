// Takes training steps and prints nothing: count_instructions.py runs this
// under callgrind, which counts those of measured_steps().
//
//   training_steps [--mode alone|copies|views|find_unused|static_graph]
//                  [--parameters 200] [--steps 10] [--layouts 9]
//
// A chain of one operation per parameter of 4 elements, in a world of one rank
// without network. Each
// layout is another model, elsewhere in memory: torch looks up nodes of a graph
// by address, and how many of these collide is a matter of where they lie.

#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/reducer/reducer.h"

namespace brigade::benchmarks {

// Found by name, which is why it is not of this file alone.
[[gnu::noinline]] void measured_steps(int num_steps,
                                      const std::function<void()>& step) {
  for (int i = 0; i < num_steps; ++i) step();
}

namespace {

constexpr int kWarmUpSteps = 5;

const std::map<std::string, std::optional<ReducerOptions>>& modes() {
  static const auto* modes =
      new std::map<std::string, std::optional<ReducerOptions>>{
          {"alone", std::nullopt},
          {"copies", ReducerOptions{.gradient_as_bucket_view = false}},
          {"views", ReducerOptions{}},
          {"find_unused", ReducerOptions{.find_unused_parameters = true,
                                         .gradient_as_bucket_view = false}},
          {"static_graph", ReducerOptions{.static_graph = true,
                                          .gradient_as_bucket_view = false}}};
  return *modes;
}

// `layout`: what lies elsewhere in memory than with another one.
void train(const std::optional<ReducerOptions>& options, int64_t num_parameters,
           int num_steps, int layout) {
  std::vector<std::string> in_between;
  for (int i = 0; i < layout; ++i) in_between.emplace_back(1000 + 17 * i, ' ');
  const at::Tensor input = at::ones({4});
  std::vector<at::Tensor> parameters;
  for (int64_t i = 0; i < num_parameters; ++i) {
    parameters.push_back(at::ones({4}).requires_grad_());
  }
  std::optional<Reducer> reducer;
  if (options) {
    reducer.emplace(parameters, single_process_group({at::kCPU}), *options);
  }
  const auto step = [&] {
    at::Tensor x = input;
    for (const at::Tensor& parameter : parameters) {
      x = at::addcmul(x, parameter, input);
    }
    const at::Tensor loss = x.sum();
    if (reducer) reducer->prepare_for_backward(loss);
    loss.backward();
    for (const at::Tensor& parameter : parameters) {
      parameter.mutable_grad().reset();
    }
  };
  for (int i = 0; i < kWarmUpSteps; ++i) step();
  measured_steps(num_steps, step);
}

}  // namespace
}  // namespace brigade::benchmarks

int main(int argc, char** argv) {
  using brigade::benchmarks::modes;
  std::string mode = "copies";
  int64_t num_parameters = 200;
  int num_steps = 10;
  int num_layouts = 9;
  CLI::App app("Takes training steps, to count their instructions.");
  app.add_option("--mode", mode)->check(CLI::IsMember(&modes()));
  app.add_option("--parameters", num_parameters)->check(CLI::PositiveNumber);
  app.add_option("--steps", num_steps)->check(CLI::PositiveNumber);
  app.add_option("--layouts", num_layouts)->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  for (int layout = 0; layout < num_layouts; ++layout) {
    brigade::benchmarks::train(modes().at(mode), num_parameters, num_steps,
                               layout);
  }
}
