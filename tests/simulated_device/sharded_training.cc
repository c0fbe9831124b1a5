#include "brigade/tests/simulated_device/sharded_training.h"

#include <torch/torch.h>

#include "brigade/tests/fsdp/sharded_net.h"
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

// Of the parameter, whose gradient it writes into the root's memory.
class WritesIntoSlot : public torch::autograd::Function<WritesIntoSlot> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& parameter, ShardedRoot* root,
                            int* num_written) {
    context->save_for_backward({parameter});
    context->saved_data["root"] = reinterpret_cast<int64_t>(root);
    context->saved_data["num_written"] = reinterpret_cast<int64_t>(num_written);
    return parameter.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      const torch::autograd::variable_list& gradients) {
    const auto pointer = [&](const char* name) {
      return context->saved_data[name].toInt();
    };
    auto& root = *reinterpret_cast<ShardedRoot*>(pointer("root"));
    at::Tensor slot =
        root.gradient_slot(context->get_saved_variables().front());
    if (!slot.defined()) return {gradients[0], {}, {}};
    slot.copy_(gradients[0]);
    ++*reinterpret_cast<int*>(pointer("num_written"));
    return {slot, {}, {}};
  }
};

std::vector<UnitSpec> units_of(const StreamedModel& model,
                               const ShardedProgram& program) {
  std::vector<UnitSpec> units(ShardedTraining::kNumUnits);
  for (size_t i = 0; i < model.size(); ++i) {
    UnitSpec& unit = units[i / kPerUnit];
    unit.name = c10::str("unit", i / kPerUnit);
    unit.parameters.push_back(
        {.name = c10::str("p", i), .tensor = model.parameters()[i]});
  }
  for (const auto& [unit, mesh] : program.meshes) units[unit].mesh = mesh;
  for (const size_t unit : program.spanning) units[unit].spans_passes = true;
  return units;
}

}  // namespace

bool has_one_stream(const StreamLayout& layout, const ShardedProgram& program) {
  return layout.forward == StreamLayout::Forward::kCaller ||
         (layout.forward == StreamLayout::Forward::kSide &&
          program.calls_on_own_stream);
}

ShardedTraining::ShardedTraining(const StreamLayout& layout,
                                 const ShardingOptions& options,
                                 ShardedProgram program)
    : program_(program),
      on_caller_(layout.calls_from_side ? side_stream() : default_stream()),
      recording_(kNumRanks),
      model_(layout) {
  for (const size_t i : program.frozen) {
    model_.parameters()[i].requires_grad_(false);
  }
  const c10::Stream caller = current_stream_of();
  const c10::Stream maker = layout.is_made_on_side ? new_stream() : caller;
  make_wait(maker, caller);
  {
    const c10::StreamGuard on_maker(maker);
    root_.emplace(units_of(model_, program_), recording_.group(), options);
  }
  make_wait(caller, maker);
  if (!program_.writes_into_slots) return;
  model_.read_through([this](const at::Tensor& parameter) {
    return WritesIntoSlot::apply(parameter, &*root_, &num_in_slots_);
  });
}

ShardedTraining::~ShardedTraining() {
  root_.reset();
  simulated::synchronize_all();
  for (const Expected& e : expected_) {
    EXPECT_TRUE(at::equal(e.found.cpu().flatten(), e.expected))
        << "parameter " << e.parameter << " at step " << e.step << " has "
        << e.found.cpu() << ", not " << e.expected;
  }
}

at::Tensor ShardedTraining::terms(size_t unit, at::Tensor h, int step) const {
  for (size_t i = 0; i < kPerUnit; ++i) {
    h = h + model_.term(unit * kPerUnit + i, step);
  }
  return h;
}

at::Tensor ShardedTraining::run(size_t unit, const at::Tensor& input,
                                int step) {
  return root_->call(unit, input,
                     [&](const at::Tensor& h) { return terms(unit, h, step); });
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
                                         return run(unit, h, step);
                                       },
                                       input)
                                 : run(unit, input, step);
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
  return root_->forward([&] {
    const at::Tensor input = at::ones({}, simulated::on_device());
    return root_->call(0, input, [&](at::Tensor h) {
      for (const size_t unit : units) h = call(unit, h, step);
      return terms(0, h, step);
    });
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
    const size_t parameter = unit * kPerUnit + i;
    if (program_.frozen.count(parameter) > 0) continue;
    const at::Tensor& gradient = root_->shards_of(unit)[i].grad();
    ASSERT_TRUE(gradient.defined()) << parameter << " at step " << step;
    gradient.record_stream(current_stream_of());
    expected_.push_back(
        {.found = gradient.detach().clone(),
         .expected =
             part_of(model_.gradient(parameter, step) * factor, *root_, unit, i,
                     root_->unit(unit).segments.front()->rank()),
         .parameter = parameter,
         .step = step});
  }
}

void ShardedTraining::update() {
  const torch::NoGradGuard no_grad;
  for (at::Tensor shard : root_->shards()) {
    if (!shard.grad().defined()) continue;
    shard.grad().record_stream(current_stream_of());
    shard.sub_(shard.grad(), /*alpha=*/0);
  }
}

void ShardedTraining::zero_grad() {
  for (const at::Tensor& shard : root_->shards()) shard.mutable_grad().reset();
}

}  // namespace brigade::testing
