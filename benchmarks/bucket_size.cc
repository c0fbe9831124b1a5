// What does the size of buckets cost, or gain?
//
//   torchrun --standalone --nproc-per-node 2 --no-python bucket_size
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
// Per workload a table of bucket_sweep/sweep.h, of caps that take turns with
// the same loop without a reducer (bucket_sweep/measurement.h):
//   step      median and quartiles over all rounds, of the slowest rank
//   exposed   step less the step without a reducer of the same round, median
//   alone     the buckets' all-reduces, one after the other, with nothing else
//   overlap   1 - exposed / alone, the share that backward hides; "none" if
//             packing, latency and the slower rank cost more than it hides
//   sums      whether each gradient was the average that it must be

#include <fmt/format.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "brigade/benchmarks/support/gradient_shapes.h"
#include "brigade/benchmarks/support/set_up.h"
#include "brigade/bucket_sweep/measurement.h"
#include "brigade/bucket_sweep/sweep.h"
#include "brigade/examples/digits/dataset.h"
#include "brigade/examples/digits/network.h"
#include "brigade/examples/support/program.h"
#include "brigade/hooks/autograd_node.h"

namespace brigade::benchmarks {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;
using Clock = std::chrono::steady_clock;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr int64_t kDigitsImagesPerRank = 30;

// What the nodes of one backward share.
struct Backward {
  Clock::time_point begin{};  // when its first node ran
  std::vector<at::Tensor> gradients;
};

// Stands for one layer: sends on what it got, and at its time the gradient of
// its parameter.
class Layer : public Node {
 public:
  Layer(std::shared_ptr<Backward> backward, size_t parameter, bool is_first,
        std::chrono::nanoseconds due)
      : backward_(std::move(backward)),
        parameter_(parameter),
        is_first_(is_first),
        due_(due) {}

 private:
  variable_list apply(variable_list&& inputs) override {
    if (is_first_) backward_->begin = Clock::now();
    std::this_thread::sleep_until(backward_->begin + due_);
    return {inputs[0], std::move(backward_->gradients[parameter_])};
  }

  const std::shared_ptr<Backward> backward_;
  const size_t parameter_;
  const bool is_first_;
  const std::chrono::nanoseconds due_;
};

// One gradient per shape, which becomes ready when its share of `backward`, by
// its size, has passed: nothing is computed, and the thread sleeps, as a CPU
// does while a GPU works.
class ShapedWorkload : public SweepWorkload {
 public:
  ShapedWorkload(const Group& group, const Shapes& shapes,
                 std::chrono::nanoseconds backward)
      : factor_(group->getRank() + 1),
        average_factor_((group->getSize() + 1) / 2.0) {
    const auto total = static_cast<double>(total_numel(shapes));
    int64_t numel_due = 0;
    due_.resize(shapes.size());
    for (size_t i = shapes.size(); i-- > 0;) {
      numel_due += numel(shapes[i]);
      due_[i] = std::chrono::duration_cast<std::chrono::nanoseconds>(
          backward * (static_cast<double>(numel_due) / total));
    }
    for (const std::vector<int64_t>& shape : shapes) {
      // Never written, so that it takes up no memory.
      parameters_.push_back(at::empty(shape).requires_grad_());
    }
  }

  const std::vector<at::Tensor>& parameters() const override {
    return parameters_;
  }

  void set_up_step() override {
    backward_ = std::make_shared<Backward>();
    for (size_t i = 0; i < parameters_.size(); ++i) {
      parameters_[i].mutable_grad().reset();
      backward_->gradients.push_back(
          checking_ ? pattern(i, factor_)
                    : at::full_like(parameters_[i].detach(), factor_));
    }
  }

  at::Tensor forward() override {
    at::Tensor loss = at::zeros({});
    Edge below;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const bool runs_first = i + 1 == parameters_.size();
      const auto layer = make_node<Layer>(backward_, i, runs_first, due_[i]);
      layer->set_next_edges(
          {below, torch::autograd::impl::gradient_edge(parameters_[i])});
      below = Edge(layer, layer->add_input_metadata(loss));
    }
    torch::autograd::impl::set_gradient_edge(loss, below);
    return loss;
  }

  void begin_check() override { checking_ = true; }
  void end_check() override { checking_ = false; }

  bool gradients_are_averages() override {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      // Exact for two ranks; 1 / ranks is rounded for some others.
      const at::Tensor& gradient = parameters_[i].grad();
      if (!gradient.defined() ||
          !at::allclose(gradient, pattern(i, average_factor_), /*rtol=*/1e-6,
                        /*atol=*/0)) {
        return false;
      }
    }
    return true;
  }

 private:
  // Integers that differ from element to element and parameter to parameter.
  at::Tensor pattern(size_t parameter, double factor) const {
    constexpr int64_t kPeriod = 1021;
    const int64_t count = parameters_[parameter].numel();
    const auto begin = static_cast<int64_t>(parameter);
    return at::arange(begin, begin + count, at::kInt)
        .remainder(kPeriod)
        .add(1)
        .to(at::kFloat)
        .mul(factor)
        .view(parameters_[parameter].sizes());
  }

  const double factor_;          // this rank's gradients have it
  const double average_factor_;  // the average over the ranks
  std::vector<at::Tensor> parameters_;
  std::vector<std::chrono::nanoseconds> due_;  // since backward began
  std::shared_ptr<Backward> backward_;
  bool checking_ = false;
};

std::unique_ptr<SweepWorkload> make_digits_workload(const Group& group) {
  torch::manual_seed(1);
  const digits::Batches batches(digits::read_digits(),
                                kDigitsImagesPerRank * group->getSize(),
                                group->getSize(), /*seed=*/1);
  digits::DigitsNet net;
  const auto loss = [net,
                     batch = batches.batch(0, group->getRank())]() mutable {
    return torch::nn::functional::cross_entropy(net->forward(batch.pixels),
                                                batch.labels);
  };
  return std::make_unique<ModuleWorkload>(net->parameters(), loss, group);
}

struct Options {
  std::vector<std::string> models = {"digits", "resnet50", "bert-base", "gpt2"};
  std::vector<std::string> caps = {"each", "0.25", "1",   "4",
                                   "10",   "25",   "100", "one"};
  SweepOptions sweep;
  double backward_ms = 0;  // 0: 1 ms per MB of gradients
  bool quick = false;
};

struct Model {
  std::string title;
  Shapes shapes;  // empty: computes
};

const std::map<std::string, Model>& models() {
  static const auto* const all = new std::map<std::string, Model>{
      {"digits", {"digits", {}}},
      {"resnet50", {"ResNet-50", resnet50_shapes()}},
      {"resnet50-half", {"ResNet-50, half as wide", resnet50_shapes(2)}},
      {"bert-base", {"BERT-base", bert_base_shapes()}},
      {"gpt2", {"GPT-2 small", gpt2_small_shapes()}}};
  return *all;
}

int run(const Options& options, SetUp set_up) {
  at::set_num_threads(1);
  const std::vector<BucketArm> arms = arms_of(options.caps);
  GroupScope scope(init_process_group({.timeout = std::chrono::minutes(2)}));
  const Group& group = scope.group();
  const bool speaks = group->getRank() == 0;
  set_up.insert(set_up.begin(),
                {"ranks", fmt::format("{}, Gloo", group->getSize())});
  if (speaks) print(set_up);

  bool all_right = true;
  for (const std::string& name : options.models) {
    const Model& model = models().at(name);
    std::string backward = "computed";
    std::unique_ptr<SweepWorkload> workload;
    SweepOptions sweep = options.sweep;
    if (model.shapes.empty()) {
      workload = make_digits_workload(group);
      sweep.steps *= 10;  // they are short
    } else {
      const double ms =
          options.backward_ms > 0
              ? options.backward_ms
              : static_cast<double>(total_numel(model.shapes)) * 4e-6;
      backward = fmt::format("{:.0f} ms asleep", ms);
      workload = std::make_unique<ShapedWorkload>(
          group, model.shapes,
          std::chrono::nanoseconds(static_cast<int64_t>(ms * 1e6)));
    }
    const SweepSummary summary =
        summarize(measure(*workload, arms, group, sweep));
    for (const ArmSummary& arm : summary.arms) {
      all_right = all_right && arm.sums_verified;
    }
    if (!speaks) continue;
    fmt::print("\n{}", to_text(model.title, summary, backward));
    std::fflush(stdout);
  }
  return all_right ? 0 : 1;
}

int main(int argc, char** argv) {
  Options options;
  CLI::App app{
      "Times training steps with different bucket sizes, on the ranks that "
      "torchrun, srun or mpirun starts, against the same steps without a "
      "reducer. Without options: the full sweep."};
  app.option_defaults()->always_capture_default();
  app.add_option("--model", options.models, "What to train")
      ->check(CLI::IsMember(&models()))
      ->delimiter(',');
  app.add_option("--caps", options.caps,
                 "Sizes at which buckets close, in MiB; 'one' bucket for all, "
                 "or one for 'each' parameter")
      ->delimiter(',');
  app.add_option("--rounds", options.sweep.rounds, "Visits to each cap");
  app.add_option("--steps", options.sweep.steps,
                 "Timed steps per visit; ten times as many for digits");
  app.add_option("--backward-ms", options.backward_ms,
                 "Time that backward sleeps; 0: 1 ms per MB of gradients");
  app.add_flag("--quick", options.quick,
               "A few seconds: digits and a small ResNet-50, fewer rounds");
  CLI11_PARSE(app, argc, argv);
  if (options.quick) {
    if (app.count("--model") == 0) options.models = {"digits", "resnet50-half"};
    if (app.count("--caps") == 0) {
      options.caps = {"each", "1", "4", "10", "one"};
    }
    if (app.count("--rounds") == 0) options.sweep.rounds = 3;
  }
  return run_program("bucket_size",
                     [&] { return run(options, describe_set_up(argc, argv)); });
}

}  // namespace
}  // namespace brigade::benchmarks

int main(int argc, char** argv) {
  return brigade::benchmarks::main(argc, argv);
}
