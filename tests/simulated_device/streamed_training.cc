#include "brigade/tests/simulated_device/streamed_training.h"

#include <torch/torch.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/fsdp/sharded_tensor.h"
#include "brigade/hooks/activation_checkpoint.h"

namespace brigade::testing {
namespace {

using simulated::current_stream_of;
using simulated::default_stream;
using simulated::make_wait;
using simulated::new_stream;
using Forward = StreamLayout::Forward;

constexpr const char* kForwardNames[] = {
    "the caller's stream", "a side stream", "two streams",
    "a stream per parameter", "two streams per parameter"};

// The release build, which scripts/test.sh --all runs, tries all layouts.
#ifdef __SANITIZE_ADDRESS__
constexpr bool kTriesFew = true;
#else
constexpr bool kTriesFew = false;
#endif

// With buckets of 64 bytes, some hold several parameters and some hold one.
const std::vector<std::vector<int64_t>> kSizes = {{4}, {3, 5}, {1},
                                                  {7}, {20},   {2, 2}};

std::vector<StreamLayout> make_layouts() {
  constexpr int kLayoutsPerForward = 8;
  std::vector<StreamLayout> layouts;
  for (const Forward forward : {Forward::kCaller, Forward::kSide, Forward::kTwo,
                                Forward::kOwn, Forward::kBoth}) {
    // Varies the other fields among the few layouts.
    const int chosen = static_cast<int>(forward) * 3 % kLayoutsPerForward;
    for (int bits = 0; bits < kLayoutsPerForward; ++bits) {
      if (kTriesFew && bits != chosen) continue;
      layouts.push_back({.forward = forward,
                         .calls_from_side = (bits & 4) != 0,
                         .is_made_on_side = (bits & 2) != 0,
                         .accumulates_in_forward = (bits & 1) != 0});
    }
  }
  return layouts;
}

std::vector<c10::Stream> streams_for(Forward forward, size_t num_parameters,
                                     int device_index) {
  std::vector<c10::Stream> streams;
  for (size_t i = 0; i < num_parameters; ++i) {
    const size_t period = forward == Forward::kSide  ? 1
                          : forward == Forward::kTwo ? 2
                                                     : num_parameters;
    streams.push_back(forward == Forward::kCaller
                          ? current_stream_of(device_index)
                      : i < period ? new_stream(device_index)
                                   : streams[i - period]);
  }
  return streams;
}

constexpr size_t kPerUnit = 2;

std::string name_of_gradient(size_t parameter, int step) {
  return absl::StrCat("gradient ", parameter, " of step ", step);
}

// Makes a stream that is ordered after the default one.
c10::Stream side_stream(int device = 0) {
  const c10::Stream stream = new_stream(device);
  make_wait(stream, default_stream(device));
  return stream;
}

std::vector<c10::Stream> side_streams() {
  return {side_stream(0), side_stream(1)};
}

// Copies a parameter; its backward writes the gradient into the slot.
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

std::string name_of(const StreamLayout& layout) {
  return absl::StrCat(
      "forward on ", kForwardNames[static_cast<int>(layout.forward)],
      layout.calls_from_side ? ", called from a side stream" : "",
      layout.is_made_on_side ? ", reducer made on a side stream" : "",
      layout.accumulates_in_forward ? ", accumulates in forward's" : "");
}

const std::vector<StreamLayout>& all_stream_layouts() {
  static const auto* const layouts =
      new std::vector<StreamLayout>(make_layouts());
  return *layouts;
}

StreamedModel::StreamedModel(const StreamLayout& layout, int device_index)
    : uses_both_(layout.forward == StreamLayout::Forward::kBoth),
      device_index_(device_index),
      streams_(streams_for(layout.forward, kSizes.size(), device_index)) {
  const at::TensorOptions options =
      simulated::on_device(at::kFloat, device_index);
  for (size_t i = 0; i < kSizes.size(); ++i) {
    parameters_.push_back(at::ones(kSizes[i], options).requires_grad_());
    const at::Tensor numbers = at::arange(parameters_[i].numel(), at::kLong);
    weights_on_cpu_.push_back(((numbers + 7 * static_cast<int64_t>(i)) % 12 + 1)
                                  .reshape(kSizes[i])
                                  .to(at::kFloat));
    weights_.push_back(weights_on_cpu_.back().to(options));
    if (!layout.accumulates_in_forward) continue;
    const c10::StreamGuard on_stream(streams_[i]);
    accumulators_.push_back(
        torch::autograd::impl::grad_accumulator(parameters_[i]));
  }
}

at::Tensor StreamedModel::use(size_t i, const c10::Stream& stream,
                              int step) const {
  const c10::Stream caller = current_stream_of(device_index_);
  make_wait(stream, caller);
  at::Tensor result;
  {
    const c10::StreamGuard on_stream(stream);
    // Quadratic, so that gradients may have a history.
    const at::Tensor p = read_ ? read_(parameters_[i]) : parameters_[i];
    if (shard_of(p) == nullptr) p.record_stream(stream);  // perhaps a copy
    result = (p * p * weights_[i] * ((step + 1) / 2.0)).sum();
  }
  make_wait(caller, stream);
  result.record_stream(caller);
  return result;
}

at::Tensor StreamedModel::term(size_t i, int step) const {
  const at::Tensor term = use(i, streams_[i], step);
  return uses_both_ ? term + use(i, streams_[(i + 1) % size()], step) : term;
}

at::Tensor StreamedModel::loss(int step,
                               const std::set<size_t>& left_out) const {
  at::Tensor loss;
  for (size_t i = 0; i < size(); ++i) {
    if (left_out.count(i) > 0) continue;
    const at::Tensor term = this->term(i, step);
    loss = loss.defined() ? loss + term : term;
  }
  return loss;
}

void StreamedModel::update() const {
  const at::NoGradGuard no_grad;
  const c10::Stream caller = current_stream_of(device_index_);
  for (const at::Tensor& parameter : parameters_) {
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined()) continue;
    gradient.record_stream(caller);
    at::Tensor(parameter).sub_(gradient, /*alpha=*/0);
  }
}

void StreamedModel::zero_grad(bool set_to_none) const {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : parameters_) {
    at::Tensor& gradient = parameter.mutable_grad();
    if (!gradient.defined()) continue;
    if (set_to_none) {
      gradient.reset();
    } else {
      gradient.detach().zero_();
    }
  }
}

ExpectedGradients::~ExpectedGradients() {
  simulated::synchronize_all();
  for (const auto& [found, expected, name] : expected_) {
    EXPECT_TRUE(at::equal(found.cpu(), expected))
        << name << " is " << found.cpu() << ", not " << expected;
  }
}

void ExpectedGradients::add(const at::Tensor& found, at::Tensor expected,
                            const std::string& name) {
  found.record_stream(current_stream_of(found.device().index()));
  expected_.push_back({found.detach().clone(), std::move(expected), name});
}

void set_timeout(RecordingGroup& recording, std::chrono::milliseconds timeout) {
  recording.group()->getBackend(at::kCPU)->getBackendOptions()->timeout =
      timeout;
}

StreamedTraining::StreamedTraining(const StreamLayout& layout, int num_replicas)
    : layout_(layout) {
  if (layout.calls_from_side) on_caller_.emplace(side_streams());
  for (int r = 0; r < num_replicas; ++r) {
    models_.emplace_back(layout, r);
  }
}

void StreamedTraining::make_reducer(ReducerOptions options) {
  if (options.bucket_cap_bytes == ReducerOptions().bucket_cap_bytes) {
    options.bucket_cap_bytes = {64};
  }
  std::optional<c10::MultiStreamGuard> on_side;
  if (layout_.is_made_on_side) on_side.emplace(side_streams());
  std::vector<std::vector<at::Tensor>> replicas;
  for (const StreamedModel& model : models_) {
    replicas.push_back(model.parameters());
  }
  reducer_.emplace(std::move(replicas), recording_.group(), std::move(options));
}

at::Tensor StreamedTraining::loss(int step, const std::set<size_t>& left_out) {
  at::Tensor sum;
  for (const StreamedModel& model : models_) {
    const at::Tensor loss = model.loss(step, left_out).to(simulated::device());
    sum = sum.defined() ? sum + loss : loss;
  }
  return sum;
}

void StreamedTraining::step(int step, const std::set<size_t>& left_out) {
  const at::Tensor loss = this->loss(step, left_out);
  reducer_->prepare_for_backward(loss);
  loss.backward();
}

void StreamedTraining::expect_gradients(int step,
                                        const std::set<size_t>& but_for,
                                        double factor) {
  for (size_t i = 0; i < models_[0].size(); ++i) {
    if (but_for.count(i) == 0) expect_gradient(i, step, factor);
  }
}

void StreamedTraining::expect_gradient(size_t parameter, int step,
                                       double factor) {
  for (const StreamedModel& model : models_) {
    const at::Tensor& gradient = model.parameters()[parameter].grad();
    ASSERT_TRUE(gradient.defined()) << name_of_gradient(parameter, step);
    expected_.add(gradient, model.gradient(parameter, step) * factor,
                  name_of_gradient(parameter, step));
  }
}

void StreamedTraining::update() {
  for (const StreamedModel& model : models_) model.update();
}

void StreamedTraining::zero_grad(bool set_to_none) {
  for (const StreamedModel& model : models_) model.zero_grad(set_to_none);
}

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
      model_(layout) {
  for (const size_t i : program_.frozen) {
    model_.parameters()[i].requires_grad_(false);
  }
  if (program_.timeout) set_timeout(recording_, *program_.timeout);
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

const at::Tensor& ShardedTraining::parameter(size_t unit, size_t i) const {
  return model_.parameters()[unit * kPerUnit + i];
}

at::Tensor ShardedTraining::terms(size_t unit, at::Tensor h, int step) const {
  for (size_t i = 0; i < kPerUnit; ++i) {
    h = h + model_.term(unit * kPerUnit + i, step);
  }
  return h;
}

// Computes after the work of the current stream, which then waits for it.
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
    result = program_.is_checkpointed
                 ? checkpoint(
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
    ASSERT_TRUE(gradient.defined()) << name_of_gradient(number, step);
    const Shard& shard = *shard_of(gradient);
    const at::Tensor whole = model_.gradient(number, step).flatten() * factor;
    expected_.add(shard.local,
                  whole.narrow(0, shard.offset, shard.local.numel()),
                  name_of_gradient(number, step));
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
