#include "brigade/hooks/activation_checkpoint.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Generator.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "brigade/hooks/autograd_hooks.h"
#include "brigade/hooks/parameter_casts.h"

namespace brigade {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::SavedVariableHooks;
using Function = std::function<void(std::span<const at::Tensor>)>;

std::vector<at::Generator> generators_for(std::span<const at::Tensor> inputs) {
  std::vector<at::Generator> generators = {
      at::globalContext().defaultGenerator(at::kCPU)};
  std::set<c10::DeviceIndex> devices;
  for (const at::Tensor& input : inputs) {
    if (input.defined() && at::isAccelerator(input.device().type()) &&
        devices.insert(input.device().index()).second) {
      generators.push_back(
          at::globalContext().defaultGenerator(input.device()));
    }
  }
  return generators;
}

std::vector<at::Tensor> states_of(std::vector<at::Generator> generators) {
  std::vector<at::Tensor> states;
  for (at::Generator& generator : generators) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    states.push_back(generator.get_state());
  }
  return states;
}

void set_states(std::vector<at::Generator> generators,
                const std::vector<at::Tensor>& states) {
  for (size_t i = 0; i < generators.size(); ++i) {
    const std::lock_guard<std::mutex> lock(generators[i].mutex());
    generators[i].set_state(states[i]);
  }
}

// This thread's settings for the CPU and LibTorch's accelerator.
struct AutocastState {
  struct OfDevice {
    at::DeviceType type;
    bool is_enabled;
    at::ScalarType dtype;
  };

  AutocastState() {
    std::vector<at::DeviceType> types = {at::kCPU};
    if (const auto accelerator = at::getAccelerator()) {
      types.push_back(*accelerator);
    }
    for (const at::DeviceType type : types) {
      devices.push_back({type, at::autocast::is_autocast_enabled(type),
                         at::autocast::get_autocast_dtype(type)});
    }
  }

  void restore() const {
    for (const auto& [type, is_enabled, dtype] : devices) {
      at::autocast::set_autocast_enabled(type, is_enabled);
      at::autocast::set_autocast_dtype(type, dtype);
    }
    at::autocast::set_autocast_cache_enabled(is_cache_enabled);
  }

  std::vector<OfDevice> devices;
  bool is_cache_enabled = at::autocast::is_autocast_cache_enabled();
};

// State of the first run that a later run restores, besides grad mode. Other
// thread-local state is the later run's own.
struct RunState {
  explicit RunState(std::vector<at::Generator> random_generators)
      : generators(std::move(random_generators)) {}

  const AutocastState autocast;
  const std::vector<at::Generator> generators;
  const std::vector<at::Tensor> generator_states = states_of(generators);
  const std::shared_ptr<const ParameterCasts> casts = ParameterCasts::current();
};

class RunStateGuard {
 public:
  explicit RunStateGuard(const RunState& state)
      : generators_(state.generators), casts_(state.casts) {
    state.autocast.restore();
    at::autocast::increment_nesting();
    set_states(generators_, state.generator_states);
  }
  ~RunStateGuard() {
    set_states(generators_, previous_generator_states_);
    // Cached casts would be stale once an optimizer changes the weights.
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    previous_autocast_.restore();
  }
  RunStateGuard(const RunStateGuard&) = delete;
  RunStateGuard& operator=(const RunStateGuard&) = delete;

 private:
  const at::AutoGradMode grad_mode_{true};
  const AutocastState previous_autocast_;
  const std::vector<at::Generator> generators_;
  const std::vector<at::Tensor> previous_generator_states_ =
      states_of(generators_);
  const ParameterCasts::Scope casts_;
};

// Saves the inputs as autograd saves tensors: an enclosing checkpoint can
// recompute them, and unpack() throws if they were changed in place.
std::vector<SavedVariable> save(std::span<const at::Tensor> inputs) {
  std::vector<SavedVariable> saved;
  saved.reserve(inputs.size());
  for (const at::Tensor& input : inputs) {
    saved.emplace_back(input, /*is_output=*/false);
  }
  return saved;
}

std::vector<at::Tensor> leaves_of(const std::vector<SavedVariable>& inputs) {
  std::vector<at::Tensor> leaves;
  leaves.reserve(inputs.size());
  for (const SavedVariable& input : inputs) {
    const at::Tensor tensor = input.unpack();
    leaves.push_back(tensor.defined() ? tensor.detach().set_requires_grad(
                                            tensor.requires_grad())
                                      : tensor);
  }
  return leaves;
}

// Properties of a tensor at the time when autograd saved it.
struct SavedTensor {
  explicit SavedTensor(const at::Tensor& tensor)
      : version(static_cast<uint32_t>(tensor._version())),
        memory(tensor.has_storage() ? tensor.storage().data() : nullptr),
        dtype(tensor.scalar_type()),
        sizes(tensor.sizes().vec()) {}

  at::Tensor tensor;
  uint32_t version;
  const void* memory;  // only compared
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
};

// Saved tensors of one checkpointed run, recomputed by running the function
// again.
//
// Each tensor that the first run saves gets a slot. The first take() in a
// backward runs the function again and fills all slots. A slot is emptied by
// its take(), the others at the end of the backward. Parameters (leaves that
// require a gradient) are alive anyway: their slots always hold them.
//
// Thread safety: any thread. The function runs with the lock held.
class Recomputation : public std::enable_shared_from_this<Recomputation> {
 public:
  // Constructed just before the first run, on its thread.
  Recomputation(std::span<const at::Tensor> inputs, Function function)
      : inputs_(save(inputs)),
        state_(generators_for(inputs)),
        function_(std::move(function)) {}

  // Returns the tensor's new slot.
  size_t add(const at::Tensor& tensor);

  void end_first_run() {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    first_run_is_over_ = true;
  }

  at::Tensor take(size_t slot);

 private:
  struct Slot {
    SavedTensor first;  // owns the tensor if it is a parameter
    at::Tensor recomputed;
  };

  void recompute();
  void check(const std::vector<SavedTensor>& second) const;
  void empty_slots() {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    for (Slot& slot : slots_) slot.recomputed.reset();
  }

  const std::vector<SavedVariable> inputs_;
  const RunState state_;
  const Function function_;

  std::recursive_mutex mutex_;
  // Guarded by mutex_.
  std::vector<Slot> slots_;
  bool first_run_is_over_ = false;
};

// Hooks of the first run: store a slot in place of the tensor.
class SlotHooks final : public SavedVariableHooks {
 public:
  explicit SlotHooks(std::shared_ptr<Recomputation> recomputation)
      : recomputation_(std::move(recomputation)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    slot_ = recomputation_->add(tensor);
  }
  at::Tensor call_unpack_hook() override { return recomputation_->take(slot_); }

 private:
  const std::shared_ptr<Recomputation> recomputation_;
  size_t slot_ = 0;
};

// Hooks of a later run: append the tensor to a list. Also keep the tensor, for
// a backward inside the function.
class ListingHooks final : public SavedVariableHooks {
 public:
  explicit ListingHooks(std::weak_ptr<std::vector<SavedTensor>> list)
      : list_(std::move(list)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    tensor_ = tensor.detach();
    if (const auto list = list_.lock()) {
      list->emplace_back(tensor_).tensor = tensor_;
    }
  }
  at::Tensor call_unpack_hook() override { return tensor_; }

 private:
  const std::weak_ptr<std::vector<SavedTensor>> list_;
  at::Tensor tensor_;
};

std::string describe_change(const SavedTensor& first, int64_t version) {
  return c10::str("checkpoint: a ",
                  first.tensor.defined() ? "parameter" : "tensor",
                  " that the function captured, ", first.dtype, " ",
                  at::IntArrayRef(first.sizes),
                  ", was changed in place before backward: expected version ",
                  first.version, ", found ", version,
                  ".\nChange a clone, or change it after backward.");
}

size_t Recomputation::add(const at::Tensor& tensor) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  SavedTensor saved(tensor);
  // Detached: the tensor's gradient may own this object, which is a cycle.
  if (tensor.is_leaf() && tensor.requires_grad()) {
    saved.tensor = tensor.detach();
  }
  slots_.push_back({.first = std::move(saved), .recomputed = at::Tensor()});
  return slots_.size() - 1;
}

at::Tensor Recomputation::take(size_t slot) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  const SavedTensor& first = slots_[slot].first;
  if (first.tensor.defined()) {
    TORCH_CHECK(first.tensor._version() == first.version,
                describe_change(first, first.tensor._version()));
    return first.tensor;
  }
  const bool is_in_backward = running_backward_id() != -1;
  if (!slots_[slot].recomputed.defined()) {
    recompute();
    if (is_in_backward) {
      watch_backward_end(
          weak_from_this(), [this] { empty_slots(); },
          [this] { empty_slots(); });
    }
  }
  at::Tensor taken = std::exchange(slots_[slot].recomputed, at::Tensor());
  if (!is_in_backward) empty_slots();
  return taken;
}

void Recomputation::recompute() {
  const std::vector<at::Tensor> inputs = leaves_of(inputs_);
  const auto second = std::make_shared<std::vector<SavedTensor>>();
  {
    const RunStateGuard guard(state_);
    const SavedTensorScope scope([list = std::weak_ptr(second)] {
      return std::make_unique<ListingHooks>(list);
    });
    function_(inputs);
  }
  check(*second);
  for (size_t i = 0; i < slots_.size(); ++i) {
    slots_[i].recomputed = std::move((*second)[i].tensor);
  }
}

void Recomputation::check(const std::vector<SavedTensor>& second) const {
  TORCH_CHECK(second.size() == slots_.size() ||
                  (!first_run_is_over_ && second.size() > slots_.size()),
              "checkpoint: the function saved ", slots_.size(),
              " tensors for backward in its first run and ", second.size(),
              " in its second.\nKeep values that its control flow depends on "
              "unchanged until backward.");
  for (size_t i = 0; i < slots_.size(); ++i) {
    const SavedTensor& before = slots_[i].first;
    const SavedTensor& now = second[i];
    TORCH_CHECK(before.dtype == now.dtype && before.sizes == now.sizes,
                "checkpoint: saved tensor ", i, " of ", slots_.size(), " was ",
                before.dtype, " ", at::IntArrayRef(before.sizes),
                " in the function's first run and ", now.dtype, " ",
                at::IntArrayRef(now.sizes),
                " in its second.\nKeep values that its shapes and dtypes "
                "depend on unchanged until backward.");
    TORCH_CHECK(before.memory != now.memory || before.version == now.version,
                describe_change(before, now.version));
    TORCH_CHECK(now.tensor._version() == now.version,
                "checkpoint: the function changed in place a tensor that "
                "backward needs, ",
                now.dtype, " ", at::IntArrayRef(now.sizes),
                ": expected version ", now.version, ", found ",
                now.tensor._version(), ".\nUse the out-of-place operation.");
  }
}

}  // namespace

class CheckpointedRun::Scope {
 public:
  explicit Scope(std::shared_ptr<Recomputation> recomputation)
      : recomputation_(std::move(recomputation)),
        saved_tensors_([recomputation = recomputation_] {
          return std::make_unique<SlotHooks>(recomputation);
        }) {}
  ~Scope() { recomputation_->end_first_run(); }

 private:
  const std::shared_ptr<Recomputation> recomputation_;
  const SavedTensorScope saved_tensors_;
};

CheckpointedRun::CheckpointedRun(std::span<const at::Tensor> inputs,
                                 Function function)
    : scope_(std::make_unique<Scope>(
          std::make_shared<Recomputation>(inputs, std::move(function)))) {}

CheckpointedRun::~CheckpointedRun() = default;

}  // namespace brigade
