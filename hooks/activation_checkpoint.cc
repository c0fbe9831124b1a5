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

#include "brigade/hooks/backward_events.h"
#include "brigade/hooks/parameter_casts.h"
#include "brigade/hooks/saved_tensor_scope.h"

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

// This thread's autocast, for CPUs and the accelerator LibTorch was built for.
struct CastState {
  struct OfDevice {
    at::DeviceType type;
    bool is_enabled;
    at::ScalarType dtype;
  };

  CastState() {
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
    at::autocast::set_autocast_cache_enabled(has_cache);
  }

  std::vector<OfDevice> devices;
  bool has_cache = at::autocast::is_autocast_cache_enabled();
};

// Of the first run. Grad mode is on in all runs; other thread-local state is
// that of the thread which runs the function again.
struct Conditions {
  explicit Conditions(std::vector<at::Generator> preserved)
      : generators(std::move(preserved)) {}

  const CastState casts;
  const std::vector<at::Generator> generators;
  const std::vector<at::Tensor> random = states_of(generators);
  const std::shared_ptr<const ParameterCasts> parameters =
      ParameterCasts::current();  // or null
};

// While it lives, its thread runs under `conditions`. The generators then go on
// as if no numbers had been drawn meanwhile.
class ConditionsGuard {
 public:
  explicit ConditionsGuard(const Conditions& conditions)
      : generators_(conditions.generators), parameters_(conditions.parameters) {
    conditions.casts.restore();
    at::autocast::increment_nesting();
    set_states(generators_, conditions.random);
  }
  ~ConditionsGuard() {
    set_states(generators_, random_before_);
    // Casts that outlive the region would outlive the weights' values.
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    casts_before_.restore();
  }
  ConditionsGuard(const ConditionsGuard&) = delete;
  ConditionsGuard& operator=(const ConditionsGuard&) = delete;

 private:
  const at::AutoGradMode grad_mode_{true};
  const CastState casts_before_;
  const std::vector<at::Generator> generators_;
  const std::vector<at::Tensor> random_before_ = states_of(generators_);
  const ParameterCasts::Scope parameters_;
};

// The inputs, kept as autograd keeps tensors: an enclosing checkpoint need not
// hold them in memory, and unpack() throws if they were changed in place.
std::vector<SavedVariable> kept(std::span<const at::Tensor> inputs) {
  std::vector<SavedVariable> saved;
  saved.reserve(inputs.size());
  for (const at::Tensor& input : inputs) {
    saved.emplace_back(input, /*is_output=*/false);
  }
  return saved;
}

// Leaves with the inputs' values, that require a gradient where those do.
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
  Recomputation(std::span<const at::Tensor> inputs, Function function)
      : inputs_(kept(inputs)),
        conditions_(generators_for(inputs)),
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

  const std::vector<SavedVariable> inputs_;
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
  const std::vector<at::Tensor> inputs = leaves_of(inputs_);
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

CheckpointedRun::CheckpointedRun(std::span<const at::Tensor> inputs,
                                 Function function)
    : scope_(std::make_unique<Scope>(
          std::make_shared<Recomputation>(inputs, std::move(function)))) {}

CheckpointedRun::~CheckpointedRun() = default;

}  // namespace brigade
