#include "brigade/hooks/recomputation.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <utility>

#include "brigade/hooks/backward_end.h"

namespace brigade {
namespace {

using torch::autograd::SavedVariableHooks;

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

// Of a later run: shows the tensor, and keeps it for a backward that the
// function itself runs.
class ShowingHooks final : public SavedVariableHooks {
 public:
  using Show = std::function<void(const at::Tensor&)>;

  explicit ShowingHooks(std::shared_ptr<const Show> show)
      : show_(std::move(show)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    tensor_ = tensor.detach();
    (*show_)(tensor_);
  }
  at::Tensor call_unpack_hook() override { return tensor_; }

 private:
  const std::shared_ptr<const Show> show_;
  at::Tensor tensor_;
};

}  // namespace

Recomputation::Recomputation(std::span<const at::Tensor> inputs,
                             bool preserve_rng_state, Function function)
    : inputs_(inputs),
      conditions_(inputs, preserve_rng_state),
      function_(std::move(function)) {}

Recomputation::FirstRun::FirstRun(std::shared_ptr<Recomputation> recomputation)
    : recomputation_(recomputation), scope_([recomputation] {
        return std::make_unique<PlaceHooks>(recomputation);
      }) {}

Recomputation::FirstRun::~FirstRun() {
  const std::lock_guard<std::recursive_mutex> lock(recomputation_->mutex_);
  recomputation_->first_run_is_over_ = true;
}

Recomputation::Saved Recomputation::describe(const at::Tensor& tensor) {
  return {.tensor = at::Tensor(),
          .version = static_cast<uint32_t>(tensor._version()),
          .memory = tensor.has_storage() ? tensor.storage().data() : nullptr,
          .dtype = tensor.scalar_type(),
          .sizes = tensor.sizes().vec()};
}

std::string Recomputation::describe_change(const Saved& first,
                                           int64_t version) {
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
  Saved saved = describe(tensor);
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
    const RunConditions::Guard as_before(conditions_);
    const auto show = std::make_shared<const ShowingHooks::Show>(
        [weak = std::weak_ptr(again)](const at::Tensor& tensor) {
          const auto list = weak.lock();
          if (!list) return;
          list->push_back(describe(tensor));
          list->back().tensor = tensor;
        });
    const SavedTensorScope scope(
        [show] { return std::make_unique<ShowingHooks>(show); });
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

void Recomputation::forget() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (Place& place : places_) place.again.reset();
}

}  // namespace brigade
