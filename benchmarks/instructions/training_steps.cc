// Takes training steps and prints nothing: count_instructions.py runs this
// under callgrind.
//
//   training_steps [--mode alone|copies|views|find_unused|static_graph]
//                  [--parameters 200] [--steps 10]
//
// Parameters have 4 elements each.  The world has one rank and no network.

#include <CLI/CLI.hpp>
#include <map>
#include <optional>
#include <string>

#include "brigade/benchmarks/reducer_cost/tiny_model.h"
#include "brigade/comm/process_group.h"
#include "brigade/reducer/reducer.h"

namespace brigade::benchmarks {
namespace {

const std::map<std::string, std::optional<ReducerOptions>>& modes() {
  static const auto* modes =
      new std::map<std::string, std::optional<ReducerOptions>>{
          {"alone", std::nullopt},
          {"copies", ReducerOptions{.gradients_as_bucket_views = false}},
          {"views", ReducerOptions{}},
          {"find_unused", ReducerOptions{.find_unused_parameters = true,
                                         .gradients_as_bucket_views = false}},
          {"static_graph", ReducerOptions{.static_graph = true,
                                          .gradients_as_bucket_views = false}}};
  return *modes;
}

void train(const std::optional<ReducerOptions>& options, int64_t num_parameters,
           int num_steps) {
  TinyModel model(num_parameters);
  std::optional<Reducer> reducer;
  if (options) {
    reducer.emplace(model.parameters(), single_process_group({at::kCPU}),
                    *options);
  }
  for (int i = 0; i < num_steps; ++i) {
    const at::Tensor loss = model.forward();
    if (reducer) reducer->prepare_for_backward(loss);
    loss.backward();
    model.clear_gradients();
  }
}

}  // namespace
}  // namespace brigade::benchmarks

int main(int argc, char** argv) {
  using brigade::benchmarks::modes;
  std::string mode = "copies";
  int64_t num_parameters = 200;
  int num_steps = 10;
  CLI::App app("Takes training steps, to count their instructions.");
  app.add_option("--mode", mode)->check(CLI::IsMember(&modes()));
  app.add_option("--parameters", num_parameters)->check(CLI::PositiveNumber);
  app.add_option("--steps", num_steps)->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  brigade::benchmarks::train(modes().at(mode), num_parameters, num_steps);
}
