#include "brigade/hooks/checkpoint.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Generator.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "brigade/hooks/backward_end.h"
#include "brigade/hooks/parameter_casts.h"
#include "brigade/hooks/saved_tensor_scope.h"

namespace brigade {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::SavedVariableHooks;
using Function = std::function<void(std::span<const at::Tensor>)>;

// The states of generators at one moment.
using RandomState = std::vector<std::pair<at::Generator, at::Tensor>>;

void add_state(at::Generator generator, RandomState& states) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  at::Tensor state = generator.get_state();
  states.emplace_back(generator, std::move(state));
}

// Of the CPU and of the accelerators that `inputs` are on.
RandomState random_state_for(std::span<const at::Tensor> inputs) {
  RandomState states;
  add_state(at::globalContext().defaultGenerator(at::kCPU), states);
  std::set<c10::DeviceIndex> devices;
  for (const at::Tensor& input : inputs) {
    if (!input.defined() || !at::isAccelerator(input.device().type()) ||
        !devices.insert(input.device().index()).second) {
      continue;
    }
    add_state(at::globalContext().defaultGenerator(input.device()), states);
  }
  return states;
}

RandomState present_state(const RandomState& of) {
  RandomState states;
  for (const auto& [generator, _] : of) add_state(generator, states);
  return states;
}

void restore(const RandomState& states) {
  for (const auto& [generator, state] : states) {
    at::Generator writable = generator;
    const std::lock_guard<std::mutex> lock(writable.mutex());
    writable.set_state(state);
  }
}

// This thread's autocast, for CPUs and the accelerator LibTorch was built for.
class CastState {
 public:
  static CastState now() {
    CastState state;
    std::vector<at::DeviceType> types = {at::kCPU};
    if (const auto accelerator = at::getAccelerator()) {
      types.push_back(*accelerator);
    }
    for (const at::DeviceType type : types) {
      state.devices_.push_back(
          {.type = type,
           .is_enabled = at::autocast::is_autocast_enabled(type),
           .dtype = at::autocast::get_autocast_dtype(type)});
    }
    state.has_cache_ = at::autocast::is_autocast_cache_enabled();
    return state;
  }

  void restore() const {
    for (const OfDevice& device : devices_) {
      at::autocast::set_autocast_enabled(device.type, device.is_enabled);
      at::autocast::set_autocast_dtype(device.type, device.dtype);
    }
    at::autocast::set_autocast_cache_enabled(has_cache_);
  }

 private:
  struct OfDevice {
    at::DeviceType type;
    bool is_enabled;
    at::ScalarType dtype;
  };
  std::vector<OfDevice> devices_;
  bool has_cache_ = false;
};

// Under which the first run ran. Grad mode is on in all runs; other
// thread-local state is that of the thread which runs the function again.
struct Conditions {
  const CastState casts = CastState::now();
  const RandomState random;  // of no generator if it is not preserved
  const std::shared_ptr<const ParameterCasts> parameters =
      ParameterCasts::current();  // or null
};

// While it lives, its thread runs under `conditions`. Random numbers that are
// drawn meanwhile are not missed afterwards.
class ConditionsGuard {
 public:
  explicit ConditionsGuard(const Conditions& conditions)
      : random_before_(present_state(conditions.random)),
        parameters_(conditions.parameters) {
    conditions.casts.restore();
    at::autocast::increment_nesting();
    restore(conditions.random);
  }
  ~ConditionsGuard() {
    restore(random_before_);
    // Casts that outlive the region would outlive the weights' values.
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    casts_before_.restore();
  }
  ConditionsGuard(const ConditionsGuard&) = delete;
  ConditionsGuard& operator=(const ConditionsGuard&) = delete;

 private:
  const at::AutoGradMode grad_mode_{true};
  const CastState casts_before_ = CastState::now();
  const RandomState random_before_;
  const ParameterCasts::Scope parameters_;
};

// The inputs, kept as autograd keeps tensors, so that an enclosing checkpoint
// need not hold them in memory.
class KeptInputs {
 public:
  explicit KeptInputs(std::span<const at::Tensor> inputs) {
    inputs_.reserve(inputs.size());
    for (const at::Tensor& input : inputs) {
      inputs_.push_back(
          {.saved = SavedVariable(input, /*is_output=*/false),
           .version =
               input.defined() ? static_cast<uint32_t>(input._version()) : 0,
           .requires_grad = input.defined() && input.requires_grad()});
    }
  }

  // Leaves with the inputs' values, that require a gradient where those do.
  std::vector<at::Tensor> leaves() const {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> leaves;
    leaves.reserve(inputs_.size());
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const Input& input = inputs_[i];
      const std::optional<at::Tensor> kept = input.saved.get_raw_data();
      if (kept && kept->defined()) {
        TORCH_CHECK(kept->_version() == input.version, "checkpoint: input ", i,
                    ", ", kept->toString(), " ", kept->sizes(),
                    ", was changed in place before backward: expected version ",
                    input.version, ", found ", kept->_version(),
                    ".\nChange a clone of it, or change it after backward.");
      }
      at::Tensor leaf = input.saved.unpack();
      if (leaf.defined()) {
        leaf = leaf.detach();
        leaf.set_requires_grad(input.requires_grad);
      }
      leaves.push_back(std::move(leaf));
    }
    return leaves;
  }

 private:
  struct Input {
    SavedVariable saved;
    uint32_t version = 0;
    bool requires_grad = false;
  };
  std::vector<Input> inputs_;
};

// A tensor at the moment when autograd saved it.
struct Saved {
  explicit Saved(const at::Tensor& tensor)
      : version(static_cast<uint32_t>(tensor._version())),
        memory(tensor.has_storage() ? tensor.storage().data() : nullptr),
        dtype(tensor.scalar_type()),
        sizes(tensor.sizes().vec()) {}

  at::Tensor tensor;  // undefined where nothing is kept
  uint32_t version;
  const void* memory;  // never read, compared only
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
};

// The saved tensors of one run of a function, got by running it again.
//
// Each saved tensor of the first run is a place in a list. The first one that
// is asked for runs the function again and fills the list; a place is emptied
// when its tensor is given out, and all that is left when the backward ends.
// Leaves that require a gradient are parameters, alive anyway: they are kept.
//
// Thread safety: all methods; the function runs with the lock held.
class Recomputation : public std::enable_shared_from_this<Recomputation> {
 public:
  // Made just before the first run, on its thread.
  Recomputation(const CheckpointOptions& options,
                std::span<const at::Tensor> inputs, Function function)
      : inputs_(inputs),
        conditions_{.random = options.preserve_rng_state
                                  ? random_state_for(inputs)
                                  : RandomState()},
        function_(std::move(function)) {}

  // The new place of a tensor that the first run saves.
  size_t add(const at::Tensor& tensor);

  void end_first_run() {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    first_run_is_over_ = true;
  }

  // The tensor of a place.
  at::Tensor take(size_t place);

 private:
  struct Place {
    Saved first;  // holds a tensor if that is a parameter
    at::Tensor again;
  };

  void recompute();
  void check(const std::vector<Saved>& again) const;
  void forget() {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    for (Place& place : places_) place.again.reset();
  }

  const KeptInputs inputs_;
  const Conditions conditions_;
  const Function function_;

  std::recursive_mutex mutex_;
  // Guarded by mutex_.
  std::vector<Place> places_;
  bool first_run_is_over_ = false;
};

// Of the first run: keeps a place.
class PlaceHooks final : public SavedVariableHooks {
 public:
  explicit PlaceHooks(std::shared_ptr<Recomputation> recomputation)
      : recomputation_(std::move(recomputation)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    place_ = recomputation_->add(tensor);
  }
  at::Tensor call_unpack_hook() override {
    return recomputation_->take(place_);
  }

 private:
  const std::shared_ptr<Recomputation> recomputation_;
  size_t place_ = 0;
};

// Of a later run: lists the tensor, and keeps it for a backward that the
// function itself runs.
class ListingHooks final : public SavedVariableHooks {
 public:
  explicit ListingHooks(std::weak_ptr<std::vector<Saved>> list)
      : list_(std::move(list)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    tensor_ = tensor.detach();
    if (const auto list = list_.lock()) {
      list->emplace_back(tensor_).tensor = tensor_;
    }
  }
  at::Tensor call_unpack_hook() override { return tensor_; }

 private:
  const std::weak_ptr<std::vector<Saved>> list_;
  at::Tensor tensor_;
};

std::string describe_change(const Saved& first, int64_t version) {
  return c10::str("checkpoint: a ",
                  first.tensor.defined() ? "parameter" : "tensor",
                  " that the function captured, ", first.dtype, " ",
                  at::IntArrayRef(first.sizes),
                  ", was changed in place before backward: expected version ",
                  first.version, ", found ", version,
                  ".\nChange a clone of it, or change it after backward.");
}

size_t Recomputation::add(const at::Tensor& tensor) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  Saved saved(tensor);
  // An alias: the tensor itself holds its gradient, and with it maybe us.
  if (tensor.is_leaf() && tensor.requires_grad()) {
    saved.tensor = tensor.detach();
  }
  places_.push_back({.first = std::move(saved), .again = at::Tensor()});
  return places_.size() - 1;
}

at::Tensor Recomputation::take(size_t place) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  const Saved& first = places_[place].first;
  if (first.tensor.defined()) {
    TORCH_CHECK(first.tensor._version() == first.version,
                describe_change(first, first.tensor._version()));
    return first.tensor;
  }
  const bool is_in_backward = running_backward_id() != -1;
  if (!places_[place].again.defined()) {
    recompute();
    if (is_in_backward) {
      watch_backward_end(
          weak_from_this(), [this] { forget(); }, [this] { forget(); });
    }
  }
  at::Tensor taken = std::exchange(places_[place].again, at::Tensor());
  if (!is_in_backward) forget();
  return taken;
}

void Recomputation::recompute() {
  const std::vector<at::Tensor> inputs = inputs_.leaves();
  const auto again = std::make_shared<std::vector<Saved>>();
  {
    const ConditionsGuard as_before(conditions_);
    const SavedTensorScope scope([list = std::weak_ptr(again)] {
      return std::make_unique<ListingHooks>(list);
    });
    function_(inputs);
  }
  check(*again);
  for (size_t i = 0; i < places_.size(); ++i) {
    places_[i].again = std::move((*again)[i].tensor);
  }
}

void Recomputation::check(const std::vector<Saved>& again) const {
  TORCH_CHECK(
      again.size() == places_.size() ||
          (!first_run_is_over_ && again.size() > places_.size()),
      "checkpoint: the function saved ", places_.size(),
      " tensors for backward when it ran first and ", again.size(),
      " when it ran again.\nLet it do the same in both runs: what it decides "
      "by must not have changed in between.");
  for (size_t i = 0; i < places_.size(); ++i) {
    const Saved& first = places_[i].first;
    const Saved& second = again[i];
    TORCH_CHECK(first.dtype == second.dtype && first.sizes == second.sizes,
                "checkpoint: saved tensor ", i, " of ", places_.size(), " was ",
                first.dtype, " ", at::IntArrayRef(first.sizes),
                " when the function ran first and ", second.dtype, " ",
                at::IntArrayRef(second.sizes),
                " when it ran again.\nLet it do the same in both runs.");
    TORCH_CHECK(
        first.memory != second.memory || first.version == second.version,
        describe_change(first, second.version));
    TORCH_CHECK(second.tensor._version() == second.version,
                "checkpoint: the function changed a tensor in place, ",
                second.dtype, " ", at::IntArrayRef(second.sizes),
                ", that backward needs as it was: expected version ",
                second.version, ", found ", second.tensor._version(),
                ".\nUse the operation that is not in place.");
  }
}

}  // namespace

class CheckpointedRun::Scope {
 public:
  explicit Scope(std::shared_ptr<Recomputation> recomputation)
      : recomputation_(std::move(recomputation)),
        saved_tensors_([recomputation = recomputation_] {
          return std::make_unique<PlaceHooks>(recomputation);
        }) {}
  ~Scope() { recomputation_->end_first_run(); }

 private:
  const std::shared_ptr<Recomputation> recomputation_;
  const SavedTensorScope saved_tensors_;
};

CheckpointedRun::CheckpointedRun(const CheckpointOptions& options,
                                 std::span<const at::Tensor> inputs,
                                 Function function)
    : scope_(std::make_unique<Scope>(std::make_shared<Recomputation>(
          options, inputs, std::move(function)))) {}

CheckpointedRun::~CheckpointedRun() = default;

}  // namespace brigade
