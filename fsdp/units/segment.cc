#include "brigade/fsdp/units/segment.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/streams/stream_join.h"

namespace brigade {
namespace {

ShardLayout layout_of(const std::vector<NamedParameter>& parameters,
                      const SegmentOptions& options) {
  std::vector<ShardSpec> specs;
  specs.reserve(parameters.size());
  for (const NamedParameter& parameter : parameters) {
    specs.push_back({.numel = parameter.tensor.numel(),
                     .block_numel = parameter.block_numel});
  }
  absl::StatusOr<ShardLayout> layout =
      ShardLayout::create(std::move(specs), options.num_ranks);
  TORCH_CHECK_VALUE(layout.ok(), "unit '", options.unit,
                    "': ", std::string(layout.status().message()));
  return *std::move(layout);
}

// Those of memory that it shares with nobody, in which it is dense.
at::Tensor dense(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
}

// Its elements as they lie in memory.
at::Tensor in_memory_order(const at::Tensor& dense_tensor) {
  return dense_tensor.as_strided({dense_tensor.numel()}, {1});
}

// [S], of all parameters that this rank holds; padding is 0.
at::Tensor shard_of(const std::vector<NamedParameter>& parameters,
                    const ShardLayout& layout, int rank) {
  const at::NoGradGuard no_grad;
  at::Tensor shard =
      at::zeros({layout.shard_numel()}, parameters.front().tensor.options());
  for (size_t i = 0; i < parameters.size(); ++i) {
    const ShardRange range = layout.range(i, rank);
    if (range.numel == 0) continue;
    shard.narrow(0, range.in_shard, range.numel)
        .copy_(in_memory_order(dense(parameters[i].tensor.detach()))
                   .narrow(0, range.in_parameter, range.numel));
  }
  return shard;
}

std::string why_sharded(const std::string& unit) {
  return absl::StrCat("the parameters of unit '", unit,
                      "' are sharded here. Read them in the forward of their "
                      "unit, or inside of unshard().");
}

// Bytes of one may be copied to the other, on the host.
bool have_same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.is_cpu() &&
         a.layout() == at::kStrided && a.strides() == b.strides() &&
         !a.is_neg() && !a.is_conj();
}

// `shard` is `view` from here on; writes into either are counted together.
at::Tensor become_view(at::Tensor shard, const at::Tensor& view) {
  shard.set_data(view);
  shard.unsafeGetTensorImpl()->set_version_counter(
      view.unsafeGetTensorImpl()->version_counter());
  return shard;
}

// The current stream has used it; who drops it may be elsewhere.
void record_use(const at::Tensor& tensor) {
  if (tensor.is_cpu() || tensor.is_meta()) return;
  tensor.record_stream(current_stream(tensor.device()));
}

}  // namespace

Segment::Segment(std::vector<NamedParameter> parameters, SegmentOptions options)
    : options_(std::move(options)),
      parameters_(std::move(parameters)),
      layout_(layout_of(parameters_, options_)),
      can_be_trained_(
          at::isFloatingType(parameters_.front().tensor.scalar_type()) ||
          at::isComplexType(parameters_.front().tensor.scalar_type())),
      shard_(shard_of(parameters_, layout_, options_.rank)),
      whole_(options_.whole_dtype, layout_.whole_numel(), shard_.device(),
             why_sharded(options_.unit)),
      is_written_(parameters_.size(), 0),
      is_lent_(parameters_.size(), 0),
      gradient_writers_(shard_.device()),
      shard_gradient_(shard_, options_.reduce_dtype,
                      [this](const at::Tensor& flat, size_t parameter) {
                        return view_of(flat, parameter);
                      }) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& parameter = parameters_[i].tensor;
    const at::Tensor shape = dense(parameter.detach());
    record_use(parameter);  // its values have been read
    views_.push_back(
        whole_.view(layout_.offset(i), shape.sizes(), shape.strides()));
    parameter.set_data(views_.back());
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor view = view_of(shard_, i).detach();
    shards_.push_back(
        options_.shards.empty() ? view : become_view(options_.shards[i], view));
    shards_[i].requires_grad_(is_trained(i));
    was_trained_.push_back(is_trained(i) ? 1 : 0);
  }
}

bool Segment::is_trained() const {
  return std::ranges::any_of(parameters_, [](const NamedParameter& parameter) {
    return parameter.tensor.requires_grad();
  });
}

bool Segment::follow_shards() {
  bool is_changed = false;
  for (size_t i = 0; i < shards_.size(); ++i) {
    const bool was_trained = was_trained_[i] != 0;
    const bool is_trained_now = shards_[i].requires_grad() != was_trained
                                    ? shards_[i].requires_grad()
                                    : is_trained(i);
    if (is_trained_now == was_trained) continue;
    was_trained_[i] = is_trained_now ? 1 : 0;
    parameters_[i].tensor.set_requires_grad(is_trained_now);
    shards_[i].set_requires_grad(is_trained_now);
    is_changed = true;
    if (!is_trained_now) forget(i);
  }
  return is_changed;
}

void Segment::rename_unit(const std::string& name) {
  options_.unit = name;
  whole_.set_why_unbound(why_sharded(name));
}

void Segment::rename_parameter(size_t parameter, std::string name) {
  parameters_[parameter].name = std::move(name);
}

void Segment::forget(size_t parameter) {
  is_written_[parameter] = 0;
  shard_gradient_.zero_partial(parameter);
}

int64_t Segment::whole_bytes() const {
  return layout_.whole_numel() *
         static_cast<int64_t>(c10::elementSize(options_.whole_dtype));
}

int64_t Segment::gradient_bytes() const {
  return layout_.whole_numel() *
         static_cast<int64_t>(c10::elementSize(options_.reduce_dtype));
}

at::Tensor Segment::view_of(const at::Tensor& flat, size_t parameter) const {
  const ShardRange range = layout_.range(parameter, options_.rank);
  const at::Tensor& whole = parameters_[parameter].tensor;
  return range.numel == whole.numel()
             ? flat.as_strided(whole.sizes(), whole.strides(), range.in_shard)
             : flat.narrow(0, range.in_shard, range.numel);
}

void Segment::bind(at::Tensor memory) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (has_own_memory(i)) continue;
    give_own_memory(i);
    TORCH_CHECK(false, "fully_shard: parameter '", parameters_[i].name,
                "' was given other memory, by an assignment to its data, which "
                "is lost.\nWrite into it instead, where whole parameters may "
                "be written.");
  }
  whole_.bind(whole_in(memory));
  bound_memory_ = std::move(memory);
  bound_versions_.resize(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    bound_versions_[i] = parameters_[i].tensor._version();
  }
}

void Segment::expect_other_memory() {
  accumulators_.clear();
  for (const NamedParameter& parameter : parameters_) {
    accumulators_.push_back(
        torch::autograd::impl::try_get_grad_accumulator(parameter.tensor));
  }
}

std::optional<size_t> Segment::written_parameter() const {
  for (size_t i = 0; i < bound_versions_.size(); ++i) {
    if (parameters_[i].tensor._version() != bound_versions_[i]) return i;
  }
  return std::nullopt;
}

void Segment::note_possible_step() {
  const bool has_gradients = std::ranges::any_of(
      shards_, [](const at::Tensor& shard) { return shard.grad().defined(); });
  if (has_gradients || may_be_stepped_) ++num_possible_steps_;
  may_be_stepped_ = has_gradients;
}

at::Tensor Segment::unbind() {
  whole_.unbind();
  bound_version_ = -1;
  return std::exchange(bound_memory_, at::Tensor());
}

at::Tensor Segment::whole_in(const at::Tensor& memory) const {
  return memory.narrow(0, 0, whole_bytes()).view(options_.whole_dtype);
}

void Segment::write_own_slice(const at::Tensor& whole) const {
  const at::NoGradGuard no_grad;
  whole.narrow(0, options_.rank * layout_.shard_numel(), layout_.shard_numel())
      .copy_(shard_);
}

void Segment::assign(size_t parameter, const at::Tensor& whole) {
  const at::NoGradGuard no_grad;
  const at::Tensor& like = parameters_[parameter].tensor;
  const at::Tensor in_memory =
      at::empty_strided(like.sizes(), like.strides(), shard_.options());
  in_memory.copy_(whole);
  const ShardRange range = layout_.range(parameter, options_.rank);
  shard_.narrow(0, range.in_shard, range.numel)
      .copy_(in_memory.as_strided({range.numel}, {1}, range.in_parameter));
}

// Whether it reads what is bound for it, and no other memory that was assigned
// to its data, be it another parameter's.
bool Segment::has_own_memory(size_t parameter) const {
  const at::Tensor& found = parameters_[parameter].tensor;
  const at::Tensor& own = views_[parameter];
  return whole_.has_view(found) &&
         found.storage_offset() == own.storage_offset() &&
         found.sizes() == own.sizes() && found.strides() == own.strides();
}

// Who gives a parameter other memory, as torch::load() does, makes autograd
// forget where its gradients come.
void Segment::give_own_memory(size_t parameter) {
  const at::Tensor& tensor = parameters_[parameter].tensor;
  tensor.set_data(views_[parameter]);
  if (accumulators_.empty() || !accumulators_[parameter]) return;
  torch::autograd::impl::set_grad_accumulator(
      tensor, WeakNodePtr(accumulators_[parameter]));
}

std::string Segment::describe_unfit_memory() const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i].tensor;
    if (has_own_memory(i)) continue;
    if (parameter.sizes() != views_[i].sizes()) {
      return c10::str("fully_shard: parameter '", parameters_[i].name, "' of ",
                      views_[i].sizes(), " was given memory of ",
                      parameter.sizes(), ".\nGive it values of its own shape.");
    }
    if (parameter.scalar_type() != views_[i].scalar_type()) {
      return c10::str("fully_shard: parameter '", parameters_[i].name, "' of ",
                      views_[i].scalar_type(), " was cast to ",
                      parameter.scalar_type(),
                      " while it was whole.\nCast the module before it is "
                      "sharded.");
    }
  }
  return "";
}

void Segment::drop_other_memory() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!has_own_memory(i)) give_own_memory(i);
  }
}

// What was put in the place of parameters' memory is copied there.
void Segment::take_back_parameters() {
  std::vector<at::Tensor> assigned(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (has_own_memory(i)) continue;
    // It may be another one's memory.
    assigned[i] = parameters_[i].tensor.detach().clone();
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!assigned[i].defined()) continue;
    views_[i].copy_(assigned[i]);
    give_own_memory(i);
  }
}

void Segment::read_own_slice() {
  const at::NoGradGuard no_grad;
  take_back_parameters();
  const at::Tensor own = whole_.memory().narrow(
      0, options_.rank * layout_.shard_numel(), layout_.shard_numel());
  if (own.scalar_type() == dtype()) {
    shard_.copy_(own);
  } else {  // what was not changed keeps its digits
    shard_.copy_(at::where(own.eq(shard_.to(own.scalar_type())), shard_,
                           own.to(dtype())));
  }
}

// Where the gradient of a parameter lies among all.
at::Tensor Segment::slot(const at::Tensor& flat, size_t parameter) const {
  const at::Tensor& like = parameters_[parameter].tensor;
  return flat.as_strided(like.sizes(), like.strides(),
                         layout_.offset(parameter));
}

void Segment::take(size_t parameter, const at::Tensor& gradient,
                   GradientMemory& memory) {
  const at::Tensor& like = parameters_[parameter].tensor;
  TORCH_CHECK_NOT_IMPLEMENTED(
      gradient.layout() == at::kStrided, "parameter '",
      parameters_[parameter].name, "' of unit '", options_.unit,
      "' got a gradient of layout ", gradient.layout(),
      "; sharded gradients are dense.\nMake it dense, or leave the parameter "
      "out of sharding.");
  const at::NoGradGuard no_grad;
  acquire_gradients(memory);
  wait_to_write();
  if (gradient.numel() == 0 || is_own_slot(parameter, gradient)) {
    // There is nothing to be written.
  } else if (!is_written_[parameter] &&
             gradient.scalar_type() == reduce_dtype() &&
             have_same_layout(gradient, like)) {
    std::memcpy(static_cast<char*>(gradients_.mutable_data_ptr()) +
                    layout_.offset(parameter) * gradients_.element_size(),
                gradient.const_data_ptr(), gradient.nbytes());
  } else {
    // Another view of the slot must not be read while that is written.
    const at::Tensor source =
        gradient.is_alias_of(gradients_) ? gradient.clone() : gradient;
    const at::Tensor own = slot(gradients_, parameter);
    if (is_written_[parameter]) {
      gradient_writers_.join();
      own.add_(source);
    } else {
      own.copy_(source);
    }
  }
  is_written_[parameter] = 1;
}

at::Tensor Segment::gradient_slot(size_t parameter, GradientMemory& memory) {
  // Autograd adds up what several functions return before it is taken.
  if (is_written_[parameter] || std::exchange(is_lent_[parameter], 1)) {
    return {};
  }
  const at::NoGradGuard no_grad;
  acquire_gradients(memory);
  wait_to_write();
  return slot(gradients_, parameter);
}

// Whether it is what gradient_slot() has given, and no other view of that.
bool Segment::is_own_slot(size_t parameter, const at::Tensor& gradient) const {
  if (!is_lent_[parameter] || is_written_[parameter] ||
      !gradient.is_alias_of(gradients_)) {
    return false;
  }
  const at::Tensor own = slot(gradients_, parameter);
  return gradient.scalar_type() == own.scalar_type() &&
         gradient.sizes() == own.sizes() &&
         gradient.strides() == own.strides() &&
         gradient.const_data_ptr() == own.const_data_ptr() &&
         !gradient.is_conj() && !gradient.is_neg();
}

void Segment::acquire_gradients(GradientMemory& memory) {
  if (gradients_.defined()) return;
  gradient_memory_ =
      memory.acquire(gradient_bytes(), use_for(Purpose::kGradients));
  gradients_ = gradient_memory_.memory.narrow(0, 0, gradient_bytes())
                   .view(options_.reduce_dtype);
}

// On each stream that writes: whoever had the memory may still read it.
// With the first one padding is zeroed: nothing is left to be done where the
// last has come.
void Segment::wait_to_write() {
  if (gradient_writers_.note()) gradient_memory_.last_use.wait();
  if (std::exchange(is_padding_zeroed_, true)) return;
  int64_t end = 0;  // of what comes before
  for (size_t i = 0; i < parameters_.size(); ++i) {
    zero_gradients(end, layout_.offset(i));
    end = layout_.offset(i) + parameters_[i].tensor.numel();
  }
  zero_gradients(end, layout_.whole_numel());
}

void Segment::zero_gradients(int64_t begin, int64_t end) {
  if (begin < end) gradients_.narrow(0, begin, end - begin).zero_();
}

// REQUIRES: padding is zeroed.
void Segment::zero_unwritten_gradients() {
  int64_t end = 0;  // of the last that is written
  bool is_unwritten = false;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!is_written_[i]) {
      is_unwritten = true;
      continue;
    }
    if (is_unwritten) zero_gradients(end, layout_.offset(i));
    is_unwritten = false;
    end = layout_.offset(i) + parameters_[i].tensor.numel();
  }
  if (is_unwritten) zero_gradients(end, layout_.whole_numel());
}

at::Tensor Segment::finish_gradients(GradientMemory& memory) {
  const at::NoGradGuard no_grad;
  acquire_gradients(memory);
  // Else whoever wrote first has waited.
  if (!is_padding_zeroed_) gradient_memory_.last_use.wait();
  gradient_writers_.join();
  gradient_writers_.note();
  if (is_padding_zeroed_) {
    zero_unwritten_gradients();
  } else {
    gradients_.zero_();
  }
  return gradients_;
}

// New memory is free for the current stream alone, so the sum is to be behind
// that one too: it counts as one that has written.
void Segment::prepare_sum() {
  if (shard_gradient_.prepare()) gradient_writers_.note();
}

Buffer Segment::take_gradient_memory() {
  StreamPoint last_use = gradient_writers_.end();
  Buffer buffer = take_finished_gradients();
  buffer.last_use = std::move(last_use);
  return buffer;
}

Buffer Segment::take_finished_gradients() {
  std::ranges::fill(is_written_, 0);
  std::ranges::fill(is_lent_, 0);
  is_padding_zeroed_ = false;
  gradient_writers_.forget();
  gradients_ = at::Tensor();
  return std::exchange(gradient_memory_, Buffer());
}

}  // namespace brigade
