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
// (bucket_sweep/measurement.h):
//   step      median and quartiles over all rounds, of the slowest rank
//   exposed   step less the step without a reducer of the same round, median
//   alone     the buckets' all-reduces, one after the other, with nothing else
//   overlap   1 - exposed / alone, the share that backward hides; "none" when
//   packing,
//             latency and waiting for the slower rank cost more than it hides
//   sums      each gradient was compared with the average that it must be
// and below the table which size to choose, with its margin over the default.
//
// The program starts its ranks by itself; under torchrun, srun or mpirun it
// takes theirs.  All hosts then need the same options.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "brigade/benchmarks/bucket_size/workloads.h"
#include "brigade/benchmarks/support/gradient_shapes.h"
#include "brigade/benchmarks/support/local_launch.h"
#include "brigade/benchmarks/support/set_up.h"
#include "brigade/bucket_sweep/arms.h"
#include "brigade/bucket_sweep/measurement.h"
#include "brigade/bucket_sweep/report.h"
#include "brigade/bucket_sweep/summary.h"
#include "brigade/comm/process_group.h"
#include "brigade/examples/support/progress_bar.h"

namespace brigade::benchmarks {
namespace {

constexpr int64_t kDigitsImagesPerRank = 30;

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

struct Report {
  std::string name;
  std::string backward;  // what stands for it: "computed", "102 ms asleep"
  SweepSummary summary;
};

Report sweep_model(const Model& model,
                   const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                   const std::vector<BucketArm>& arms, const Options& options,
                   const std::function<void(const std::string&)>& after_visit) {
  Report report{.name = model.title, .backward = "computed", .summary = {}};
  std::unique_ptr<SweepWorkload> workload;
  SweepOptions sweep_options = options.sweep;
  if (model.shapes.empty()) {
    workload = make_digits_workload(group, kDigitsImagesPerRank);
    sweep_options.steps *= 10;  // they are short
  } else {
    const double ms =
        options.backward_ms > 0
            ? options.backward_ms
            : static_cast<double>(total_numel(model.shapes)) * 4e-6;
    report.backward = fmt::format("{:.0f} ms asleep", ms);
    workload = make_shaped_workload(
        group->getRank(), group->getSize(), model.shapes,
        std::chrono::nanoseconds(static_cast<int64_t>(ms * 1e6)));
  }
  report.summary =
      summarize(measure(*workload, arms, group, sweep_options, after_visit));
  return report;
}

std::string json_of(const SetUp& set_up, const std::vector<Report>& reports) {
  std::vector<std::string> facts;
  for (const auto& [name, value] : set_up) {
    facts.push_back(json_string(name) + ": " + json_string(value));
  }
  std::vector<std::string> models;
  for (const Report& report : reports) {
    models.push_back(to_json(report.name, report.summary, report.backward));
  }
  return fmt::format("{{\"set_up\": {{{}}},\n\"models\": [\n{}]}}\n",
                     fmt::join(facts, ", "), fmt::join(models, ",\n"));
}

// One rank.  Returns whether all sums were right.
bool run(const Options& options, int argc, char** argv) {
  at::set_num_threads(1);
  const std::vector<BucketArm> arms = arms_of(options.caps);

  GroupScope scope(init_process_group({.timeout = std::chrono::minutes(2)}));
  const auto& group = scope.group();
  const bool speaks = group->getRank() == 0;

  SetUp set_up = describe_set_up(argc, argv);
  set_up.insert(set_up.begin(),
                {"ranks", fmt::format("{}, Gloo", group->getSize())});
  if (speaks) {
    for (const auto& [name, value] : set_up) {
      fmt::print("{:<9} {}\n", name, value);
    }
  }

  const auto visits_per_model =
      static_cast<int64_t>(arms.size() + 2) * (options.sweep.rounds + 1);
  ProgressBar bar(
      stderr, static_cast<int64_t>(options.models.size()) * visits_per_model);
  bool all_right = true;
  std::vector<Report> reports;
  for (size_t i = 0; i < options.models.size(); ++i) {
    const Model model = find_model(options.models[i]);
    int64_t visits = static_cast<int64_t>(i) * visits_per_model;
    reports.push_back(
        sweep_model(model, group, arms, options, [&](const std::string& arm) {
          ++visits;
          if (speaks) {
            bar.show(visits, fmt::format("{}: {}", model.title, arm));
          }
        }));
    for (const ArmSummary& arm : reports.back().summary.arms) {
      all_right = all_right && arm.sums_verified;
    }
    if (speaks) {
      bar.clear();
      const Report& report = reports.back();
      fmt::print("\n{}", to_text(report.name, report.summary, report.backward));
      std::fflush(stdout);
    }
  }
  if (speaks && !options.json_file.empty()) {
    std::ofstream file(options.json_file);
    file << json_of(set_up, reports);
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
    arms_of(options.caps);
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
