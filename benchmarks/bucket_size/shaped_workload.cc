#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <thread>

#include "brigade/benchmarks/bucket_size/workloads.h"
#include "brigade/hooks/autograd_node.h"

namespace brigade::benchmarks {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;
using Clock = std::chrono::steady_clock;

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

class ShapedWorkload : public SweepWorkload {
 public:
  ShapedWorkload(int rank, int world_size, const Shapes& shapes,
                 std::chrono::nanoseconds backward)
      : factor_(rank + 1), average_factor_((world_size + 1) / 2.0) {
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
    const auto begin = static_cast<int64_t>(parameter);
    const int64_t count = parameters_[parameter].numel();
    const at::Tensor period =
        at::arange(1, kPeriod + 1, at::kFloat).roll(-begin).mul_(factor);
    return period.repeat({count / kPeriod + 1})
        .narrow(0, 0, count)
        .clone()
        .view(parameters_[parameter].sizes());
  }

  const double factor_;          // this rank's gradients have it
  const double average_factor_;  // the average over the ranks
  std::vector<at::Tensor> parameters_;
  std::vector<std::chrono::nanoseconds> due_;  // since backward began
  std::shared_ptr<Backward> backward_;
  bool checking_ = false;
};

}  // namespace

std::unique_ptr<SweepWorkload> make_shaped_workload(
    int rank, int world_size, const Shapes& shapes,
    std::chrono::nanoseconds backward) {
  return std::make_unique<ShapedWorkload>(rank, world_size, shapes, backward);
}

}  // namespace brigade::benchmarks
