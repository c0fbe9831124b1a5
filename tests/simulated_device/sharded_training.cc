#include "brigade/tests/simulated_device/sharded_training.h"

#include <torch/torch.h>

#include <utility>

#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gtest/gtest.h"

namespace brigade::testing {
namespace {

using simulated::current_stream_of;
using simulated::default_stream;
using simulated::make_wait;
using simulated::new_stream;

constexpr size_t kPerUnit = 2;

c10::Stream side_stream() {
  const c10::Stream stream = new_stream();
  make_wait(stream, default_stream());
  return stream;
}

// Of the parameter, whose gradient it writes into the model's memory.
class WritesIntoSlot : public torch::autograd::Function<WritesIntoSlot> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& parameter, SegmentedModel* model,
                            int* num_written) {
    context->save_for_backward({parameter});
    context->saved_data["model"] = reinterpret_cast<int64_t>(model);
    context->saved_data["num_written"] = reinterpret_cast<int64_t>(num_written);
    return parameter.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      const torch::autograd::variable_list& gradients) {
    const auto pointer = [&](const char* name) {
      return context->saved_data[name].toInt();
    };
    auto& model = *reinterpret_cast<SegmentedModel*>(pointer("model"));
    at::Tensor slot =
        model.gradient_slot(context->get_saved_variables().front());
    if (!slot.defined()) return {gradients[0], {}, {}};
    slot.copy_(gradients[0]);
    ++*reinterpret_cast<int*>(pointer("num_written"));
    return {slot, {}, {}};
  }
};

std::vector<UnitRequest> units_of(const StreamedModel& model,
                                  const ShardedProgram& program) {
  std::vector<UnitRequest> units(ShardedTraining::kNumUnits);
  for (size_t i = 0; i < model.size(); ++i) {
    UnitRequest& unit = units[i / kPerUnit];
    unit.name = c10::str("unit", i / kPerUnit);
    if (i >= kPerUnit) unit.parent = 0;
    unit.parameters.push_back(
        {.name = c10::str("p", i), .tensor = model.parameters()[i]});
  }
  for (const auto& [unit, mesh] : program.meshes) units[unit].mesh = mesh;
  for (const size_t unit : program.spanning) units[unit].spans_segments = true;
  return units;
}

}  // namespace

bool has_one_stream(const StreamLayout& layout, const ShardedProgram& program) {
  return layout.forward == StreamLayout::Forward::kCaller ||
         (layout.forward == StreamLayout::Forward::kSide &&
          program.calls_on_own_stream);
}

ShardedTraining::ShardedTraining(const StreamLayout& layout,
                                 const FullyShardOptions& options,
                                 ShardedProgram program)
    : program_(std::move(program)),
      on_caller_(layout.calls_from_side ? side_stream() : default_stream()),
      recording_(kNumRanks),
      model_(layout) {
  for (const size_t i : program_.frozen) {
    model_.parameters()[i].requires_grad_(false);
  }
  if (program_.timeout) {
    recording_.group()->getBackend(at::kCPU)->getBackendOptions()->timeout =
        *program_.timeout;
  }
  const c10::Stream caller = current_stream_of();
  const c10::Stream maker = layout.is_made_on_side ? new_stream() : caller;
  make_wait(maker, caller);
  {
    const c10::StreamGuard on_maker(maker);
    sharded_.emplace(make_sharded_units(units_of(model_, program_),
                                        recording_.group(), options),
                     recording_.group(), options);
  }
  make_wait(caller, maker);
  if (!program_.writes_into_slots) return;
  model_.read_through([this](const at::Tensor& parameter) {
    return WritesIntoSlot::apply(parameter, &*sharded_, &num_in_slots_);
  });
}

ShardedTraining::~ShardedTraining() {
  sharded_.reset();
  simulated::synchronize_all();
  for (const Expected& e : expected_) {
    const at::Tensor expected = model_.gradient(e.parameter, e.step)
                                    .flatten()
                                    .narrow(0, e.offset, e.found.numel()) *
                                e.factor;
    EXPECT_TRUE(at::equal(e.found.cpu(), expected))
        << "parameter " << e.parameter << " at step " << e.step << " has "
        << e.found.cpu() << ", not " << expected;
  }
}

const at::Tensor& ShardedTraining::parameter(size_t unit, size_t i) const {
  return model_.parameters()[unit * kPerUnit + i];
}

at::Tensor ShardedTraining::terms(size_t unit, at::Tensor h, int step) const {
  for (size_t i = 0; i < kPerUnit; ++i) {
    h = h + model_.term(unit * kPerUnit + i, step);
  }
  return h;
}

// Behind the current stream, which is behind it afterwards.
at::Tensor ShardedTraining::call(size_t unit, const at::Tensor& input,
                                 int step) {
  const c10::Stream caller = current_stream_of();
  const c10::Stream stream =
      program_.calls_on_own_stream ? model_.stream_of(unit * kPerUnit) : caller;
  make_wait(stream, caller);
  at::Tensor result;
  {
    const c10::StreamGuard on_stream(stream);
    input.record_stream(stream);
    result = program_.checkpoint ? checkpoint(
                                       *program_.checkpoint,
                                       [this, unit, step](const at::Tensor& h) {
                                         return terms(unit, h, step);
                                       },
                                       input)
                                 : terms(unit, input, step);
  }
  make_wait(caller, stream);
  result.record_stream(caller);
  return result;
}

at::Tensor ShardedTraining::forward(int step,
                                    const std::set<size_t>& left_out) {
  std::vector<size_t> units;
  for (size_t unit = 1; unit < kNumUnits; ++unit) {
    if (left_out.count(unit) == 0) units.push_back(unit);
  }
  return forward_through(units, step);
}

at::Tensor ShardedTraining::forward_through(const std::vector<size_t>& units,
                                            int step) {
  return sharded_->forward([&] {
    at::Tensor h = at::ones({}, simulated::on_device());
    for (const size_t unit : units) h = call(unit, h, step);
    return terms(0, h, step);
  });
}

void ShardedTraining::step(int step, const std::set<size_t>& left_out) {
  forward(step, left_out).backward();
}

void ShardedTraining::expect_gradients(int step, double factor,
                                       const std::set<size_t>& but_for) {
  for (size_t unit = 0; unit < kNumUnits; ++unit) {
    if (but_for.count(unit) == 0) expect_gradients_of(unit, step, factor);
  }
}

void ShardedTraining::expect_gradients_of(size_t unit, int step,
                                          double factor) {
  for (size_t i = 0; i < kPerUnit; ++i) {
    const size_t number = unit * kPerUnit + i;
    if (program_.frozen.count(number) > 0) continue;
    const at::Tensor& gradient = parameter(unit, i).grad();
    ASSERT_TRUE(gradient.defined()) << number << " at step " << step;
    const Shard& shard = *shard_of(gradient);
    shard.local.record_stream(current_stream_of());
    expected_.push_back({.found = shard.local.clone(),
                         .offset = shard.offset,
                         .parameter = number,
                         .step = step,
                         .factor = factor});
  }
}

void ShardedTraining::update() {
  const torch::NoGradGuard no_grad;
  for (at::Tensor parameter : model_.parameters()) {
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined()) continue;
    shard_of(gradient)->local.record_stream(current_stream_of());
    parameter.sub_(gradient, /*alpha=*/0);
    parameter.mutable_grad().reset();
  }
}

}  // namespace brigade::testing
