// What a sharded unit costs beside its computation and the network: 50 units of
// 8 small parameters over a recording group of two ranks, which answers at
// once, against the same computation alone. Both take turns; printed are
// microseconds per unit and step, medians with quartiles.
//
//   build/release/benchmarks/unit_cost [--units 50] [--rounds 200]

#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "brigade/comm/recording_group.h"
#include "brigade/fsdp/segmented_model.h"

namespace brigade::benchmarks {
namespace {

constexpr int kParameters = 8;
constexpr int kWarmUp = 20;

using Clock = std::chrono::steady_clock;

struct Model {
  explicit Model(int num_units) {
    for (int unit = 0; unit < num_units; ++unit) {
      std::vector<at::Tensor>& scales = units.emplace_back();
      for (int i = 0; i < kParameters; ++i) {
        scales.push_back(torch::rand({16}).requires_grad_());
      }
    }
  }

  static at::Tensor run(const std::vector<at::Tensor>& scales, at::Tensor x) {
    for (const at::Tensor& scale : scales) x = x * scale;
    return x;
  }

  std::vector<UnitRequest> requests() const {
    std::vector<UnitRequest> requests;
    for (size_t unit = 0; unit < units.size(); ++unit) {
      UnitRequest& request = requests.emplace_back();
      request.name = std::to_string(unit);
      for (const at::Tensor& scale : units[unit]) {
        request.parameters.push_back(
            {.name = fmt::format("{}.{}", unit, request.parameters.size()),
             .tensor = scale});
      }
    }
    return requests;
  }

  std::vector<std::vector<at::Tensor>> units;
};

template <typename Step>
double microseconds(const Step& step) {
  const auto begin = Clock::now();
  step();
  return std::chrono::duration<double, std::micro>(Clock::now() - begin)
      .count();
}

std::string quartiles(std::vector<double> values) {
  std::ranges::sort(values);
  const auto at = [&](double share) {
    return values[static_cast<size_t>(share *
                                      static_cast<double>(values.size() - 1))];
  };
  return fmt::format("{:.1f} [{:.1f}, {:.1f}]", at(0.5), at(0.25), at(0.75));
}

void measure(int num_units, int rounds) {
  const at::Tensor x = torch::rand({4, 16});
  const Model alone(num_units);
  const Model sharded(num_units);
  const RecordingGroup recording(2);
  SegmentedModel model(
      make_sharded_units(sharded.requests(), recording.group(), {}),
      recording.group());
  const auto step_alone = [&] {
    at::Tensor y = x;
    for (const auto& unit : alone.units) y = Model::run(unit, y);
    y.sum().backward();
    for (const auto& unit : alone.units) {
      for (const at::Tensor& scale : unit) scale.mutable_grad().reset();
    }
  };
  const auto step_sharded = [&] {
    model
        .forward([&] {
          at::Tensor y = x;
          for (const auto& unit : sharded.units) {
            y = Model::run(unit, std::move(y));
          }
          return y;
        })
        .sum()
        .backward();
    for (const auto& unit : sharded.units) {
      for (const at::Tensor& scale : unit) scale.mutable_grad().reset();
    }
  };
  std::vector<double> plain;
  std::vector<double> extra;
  for (int round = -kWarmUp; round < rounds; ++round) {
    const double without = microseconds(step_alone);
    const double with = microseconds(step_sharded);
    if (round < 0) continue;
    plain.push_back(without / num_units);
    extra.push_back((with - without) / num_units);
  }
  fmt::print("{} units of {} parameters, {} rounds, us per unit and step\n",
             num_units, kParameters, rounds);
  fmt::print("alone    {}\nsharding {}\n", quartiles(plain), quartiles(extra));
}

}  // namespace
}  // namespace brigade::benchmarks

int main(int argc, char** argv) {
  CLI::App app("What a sharded unit costs beside its computation.");
  int num_units = 50;
  int rounds = 200;
  app.add_option("--units", num_units)->check(CLI::PositiveNumber);
  app.add_option("--rounds", rounds)->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  brigade::benchmarks::measure(num_units, rounds);
  return 0;
}
