// What does the size of buckets cost, or gain?
//
// Workloads
//   digits     the network of examples/digits: 8 gradients, computed for real
//   resnet50   161 gradients of ResNet-50's shapes
//   bert-base  199 gradients of BERT-base's
//   gpt2       148 gradients of GPT-2 small's
//   resnet50-half  ResNet-50 with half the channels; for --quick
// In all but the first, backward sleeps and each gradient becomes ready when
// its share of the time has passed, as if a GPU computed it: what is measured
// is the reducer and the link, and overlap is real.
//
// Per workload and cap, interleaved with the same loop without a reducer
// (sweep.h):
//   step      median and quartiles over all rounds, of the slowest rank
//   exposed   step less the step without a reducer of the same round, median
//   alone     the buckets' all-reduces, one after the other, with nothing else
//   overlap   1 - exposed / alone, the share that backward hides; "none" when
//   packing,
//             latency and waiting for the slower rank cost more than it hides
//   sums      each gradient was compared with the average that it must be
//
// The program starts its ranks by itself; under torchrun, srun or mpirun it
// takes theirs.  All hosts then need the same options.

#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "brigade/benchmarks/bucket_size/report.h"
#include "brigade/benchmarks/bucket_size/sweep.h"
#include "brigade/benchmarks/bucket_size/workload.h"
#include "brigade/benchmarks/support/gradient_shapes.h"
#include "brigade/benchmarks/support/local_launch.h"
#include "brigade/benchmarks/support/set_up.h"
#include "brigade/comm/process_group.h"
#include "brigade/examples/support/progress_bar.h"

namespace brigade::benchmarks {
namespace {

constexpr int64_t kDigitsImagesPerRank = 30;
constexpr double kBytesPerMib = 1024.0 * 1024.0;

struct Options {
  std::vector<std::string> models = {"digits", "resnet50", "bert-base", "gpt2"};
  std::vector<std::string> caps = {"each", "0.25", "1",   "4",
                                   "10",   "25",   "100", "one"};
  int ranks = 2;
  SweepOptions sweep;
  double backward_ms = 0;  // 0: 1 ms per MB of gradients
  std::string json_file;
  bool quick = false;
};

struct Model {
  std::string title;
  Shapes shapes;  // empty: computes
};

Model find_model(const std::string& name) {
  if (name == "digits") return {"digits", {}};
  if (name == "resnet50") return {"ResNet-50", resnet50_shapes()};
  if (name == "resnet50-half") {
    return {"ResNet-50, half as wide", resnet50_shapes(2)};
  }
  if (name == "bert-base") return {"BERT-base", bert_base_shapes()};
  return {"GPT-2 small", gpt2_small_shapes()};
}

Arm parse_cap(const std::string& text) {
  if (text == "each") return {"one per parameter", 1};
  if (text == "one") return {"one", std::numeric_limits<int64_t>::max()};
  size_t used = 0;
  double mib = 0;
  try {
    mib = std::stod(text, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  TORCH_CHECK_VALUE(used == text.size() && mib > 0 && mib <= 1e6,
                    "--caps: expected sizes in MiB > 0, 'one' or 'each', got '",
                    text, "'");
  return {text + " MiB",
          std::max<int64_t>(1, static_cast<int64_t>(mib * kBytesPerMib))};
}

ModelReport measure(
    const Model& model, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const std::vector<Arm>& arms, const Options& options,
    const std::function<void(const std::string&)>& after_visit) {
  std::unique_ptr<Workload> workload;
  std::string backward = "computed";
  SweepOptions sweep_options = options.sweep;
  if (model.shapes.empty()) {
    workload = make_digits_workload(group, kDigitsImagesPerRank);
    sweep_options.steps *= 10;  // they are short
  } else {
    const double ms =
        options.backward_ms > 0
            ? options.backward_ms
            : static_cast<double>(total_numel(model.shapes)) * 4e-6;
    backward = fmt::format("{:.0f} ms asleep", ms);
    workload = make_shaped_workload(
        group->getRank(), group->getSize(), model.shapes,
        std::chrono::nanoseconds(static_cast<int64_t>(ms * 1e6)));
  }
  ModelReport report{.name = model.title, .backward = backward, .result = {}};
  for (const at::Tensor& parameter : workload->parameters()) {
    ++report.num_parameters;
    report.gradient_bytes += static_cast<int64_t>(parameter.nbytes());
  }
  report.result = sweep(*workload, group, arms, sweep_options, after_visit);
  return report;
}

// One rank.  Returns whether all sums were right.
bool run(const Options& options, int argc, char** argv) {
  at::set_num_threads(1);
  std::vector<Arm> arms;
  for (const std::string& cap : options.caps) arms.push_back(parse_cap(cap));

  GroupScope scope(init_process_group({.timeout = std::chrono::minutes(2)}));
  const auto& group = scope.group();
  const bool speaks = group->getRank() == 0;

  SetUp set_up = describe_set_up(argc, argv);
  set_up.insert(set_up.begin(),
                {"ranks", fmt::format("{}, Gloo", group->getSize())});
  if (speaks) fmt::print("{}", to_text(set_up));

  const auto visits_per_model =
      static_cast<int64_t>(arms.size() + 1) * options.sweep.rounds;
  ProgressBar bar(
      stderr, static_cast<int64_t>(options.models.size()) * visits_per_model);
  bool all_right = true;
  std::vector<ModelReport> reports;
  for (size_t i = 0; i < options.models.size(); ++i) {
    const Model model = find_model(options.models[i]);
    int64_t visits = static_cast<int64_t>(i) * visits_per_model;
    reports.push_back(
        measure(model, group, arms, options, [&](const std::string& arm) {
          ++visits;
          if (speaks) {
            bar.show(visits, fmt::format("{}: {}", model.title, arm));
          }
        }));
    for (const ArmResult& arm : reports.back().result.arms) {
      all_right = all_right && arm.sums_verified;
    }
    if (speaks) {
      bar.clear();
      fmt::print("\n{}", to_text(reports.back()));
      std::fflush(stdout);
    }
  }
  if (speaks && !options.json_file.empty()) {
    std::ofstream file(options.json_file);
    file << to_json(set_up, reports).dump(2) << '\n';
    TORCH_CHECK(file.good(), "cannot write '", options.json_file, "'");
  }
  return all_right;
}

int main(int argc, char** argv) {
  Options options;
  CLI::App app{
      "Times training steps with different bucket sizes, on N ranks of this "
      "machine (or those of torchrun, srun or mpirun), against the same steps "
      "without a reducer. Without options: the full sweep."};
  app.add_option("--model", options.models, "What to train")
      ->check(CLI::IsMember(
          {"digits", "resnet50", "resnet50-half", "bert-base", "gpt2"}))
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--caps", options.caps,
                 "Sizes at which buckets close, in MiB; 'one' bucket for all, "
                 "or one for 'each' parameter")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--ranks", options.ranks, "Processes to start")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--rounds", options.sweep.rounds, "Visits to each cap")
      ->check(CLI::Range(1, 10'000))
      ->capture_default_str();
  app.add_option("--steps", options.sweep.steps,
                 "Timed steps per visit; ten times as many for digits")
      ->check(CLI::Range(1, 10'000))
      ->capture_default_str();
  app.add_option("--backward-ms", options.backward_ms,
                 "Time that backward sleeps [1 ms per MB of gradients]")
      ->check(CLI::Range(0.001, 1e6));
  app.add_option("--json", options.json_file, "Write all figures to this file");
  app.add_flag("--quick", options.quick,
               "A few seconds: digits and a small ResNet-50, fewer rounds");
  CLI11_PARSE(app, argc, argv);
  if (options.quick) {
    if (app.count("--model") == 0) options.models = {"digits", "resnet50-half"};
    if (app.count("--caps") == 0)
      options.caps = {"each", "1", "4", "10", "one"};
    if (app.count("--rounds") == 0) options.sweep.rounds = 3;
  }

  std::string error;
  try {
    for (const std::string& cap : options.caps) parse_cap(cap);
    if (!is_rank()) return launch_local_ranks(options.ranks, argv);
    end_with_launcher();
    return run(options, argc, argv) ? 0 : 1;
  } catch (const c10::Error& e) {
    error = e.what_without_backtrace();
  } catch (const std::exception& e) {
    error = e.what();
  }
  std::replace(error.begin(), error.end(), '\n', ' ');
  fmt::print(stderr, "bucket_size: {}\n", error);
  return 1;
}

}  // namespace
}  // namespace brigade::benchmarks

int main(int argc, char** argv) {
  return brigade::benchmarks::main(argc, argv);
}
