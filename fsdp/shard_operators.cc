// Operators on sharded tensors: the boxed fallback of kShardedKey.
//
// In a forward or backward, the fallback unshards the parameters among the
// arguments and runs the operator on them. Otherwise it applies the operator's
// rule, which it derives once from the schema and tags:
//
//   local      Elementwise operators, copies and optimizers: on local tensors.
//              Sharded arguments must be cut identically; plain ones must be
//              0-dimensional. Results are sharded as the arguments.
//   draw       In-place random fills: fills an unsharded tensor and copies the
//              local part, so equal seeds give the bits of one process.
//   reduce     Norms, sums and extrema over all elements; collective. Norms and
//              GradScaler's check take one all-reduce for all tensors of a
//              call; the others gather the tensors. Results are plain.
//   handle     detach and alias: on the sharded tensor itself.
//   decompose  Composite operators: applies the rules of their parts.
//   refused    All others: NotImplementedError names operator and parameter.
//
// Autograd records only `handle` and `decompose`. For the other rules, grad
// mode with a sharded argument that requires a gradient is a RuntimeError.

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "brigade/fsdp/sharded_tensor.h"

namespace brigade {
namespace {

// ---- Rules.

enum class Rule { kLocal, kDraw, kReduce, kHandle, kDecompose, kRefused };

using Names = std::unordered_set<std::string_view>;

const Names kHandles = {"detach", "detach_", "alias"};

// Module::to(), zero_grad(), optimizers' states, averages of models.
const Names kCopies = {"clone",     "copy_",      "_to_copy",  "fill",
                       "fill_",     "zero",       "zero_",     "ones_like",
                       "full_like", "zeros_like", "empty_like"};

// Initialisation of modules.
const Names kDraws = {"normal_", "uniform_",    "random_",   "exponential_",
                      "cauchy_", "log_normal_", "geometric_"};

// Their kernels are empty_like() and a draw.
const Names kDrawsLike = {"randn_like", "rand_like", "randint_like"};

// Names with overloads.
const Names kReductions = {
    // clip_grad_norm_(), LAMB.
    "linalg_vector_norm", "norm.Scalar", "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype", "_foreach_norm.Scalar",
    // GradScaler.
    "_amp_foreach_non_finite_check_and_unscale_",
    // Logs and checks of values.
    "sum", "sum.dim_IntList", "mean", "mean.dim", "max", "max.dim", "min",
    "min.dim", "amax", "amin", "any", "all", "dot", "equal", "isclose",
    "allclose", "prod", "std.correction", "var.correction", "argmax", "argmin",
    "median", "histc", "count_nonzero", "count_nonzero.dim_IntList",
    "_local_scalar_dense"};

// Tagged pointwise but not elementwise.
const Names kNotElementwise = {"rrelu", "rrelu_", "native_dropout_backward"};

// Allowed in grad mode: their results need no gradient.
const Names kNotRecorded = {"eq",        "ne",         "lt",
                            "le",        "gt",         "ge",
                            "equal",     "isnan",      "isinf",
                            "isfinite",  "zeros_like", "ones_like",
                            "full_like", "empty_like", "_local_scalar_dense",
                            "isclose",   "allclose",   "argmax",
                            "argmin",    "histc",      "count_nonzero"};

std::string_view base_name(const c10::FunctionSchema& schema) {
  std::string_view name = schema.name();
  name.remove_prefix(std::string_view("aten::").size());
  return name;
}

bool is_list(const c10::Argument& argument) {
  return argument.type()->isSubtypeOf(*c10::ListType::ofTensors());
}

bool is_tensor(const c10::Argument& argument) {
  return argument.type()->isSubtypeOf(
      *c10::OptionalType::create(c10::TensorType::get()));
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool is_elementwise(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  if (kNotElementwise.contains(base_name(schema)) ||
      !std::ranges::all_of(schema.returns(), [](const c10::Argument& result) {
        return is_tensor(result) || is_list(result);
      })) {
    return false;
  }
  if (op.hasTag(at::Tag::pointwise)) return true;
  // Some in-place operators lack the tag of their out-of-place variant.
  if (!schema.name().ends_with('_')) return false;
  const auto functional = c10::Dispatcher::singleton().findSchema(
      {schema.name().substr(0, schema.name().size() - 1),
       schema.overload_name()});
  return functional && functional->hasTag(at::Tag::pointwise);
}

// Overload names of _foreach operators differ from those of their base
// operator.
bool is_foreach_of_elementwise(std::string_view name) {
  name.remove_prefix(std::string_view("_foreach_").size());
  const bool is_copy = kCopies.contains(name);
  if (name.ends_with('_')) name.remove_suffix(1);
  if (is_copy || kCopies.contains(name)) return true;
  const std::string base = "aten::" + std::string(name);
  for (const char* overload :
       {"", "Tensor", "Scalar", "Tensor_Tensor", "Tensor_Scalar"}) {
    const auto op = c10::Dispatcher::singleton().findSchema({base, overload});
    if (op && is_elementwise(*op)) return true;
  }
  return false;
}

Rule find_rule(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  if (schema.getNamespace() == "aten") {
    const std::string_view name = base_name(schema);
    const std::string overload = std::string(name) +
                                 (schema.overload_name().empty() ? "" : ".") +
                                 schema.overload_name();
    if (kHandles.contains(name)) return Rule::kHandle;
    if (kReductions.contains(overload)) return Rule::kReduce;
    if (kCopies.contains(name) || is_elementwise(op)) {
      return Rule::kLocal;
    }
    if (kDraws.contains(name) || overload == "bernoulli_.float") {
      return Rule::kDraw;
    }
    if (kDrawsLike.contains(name)) return Rule::kDecompose;
    if (name.starts_with("_foreach_")) {
      return is_foreach_of_elementwise(name) ? Rule::kLocal : Rule::kRefused;
    }
    // Fused optimizers write the list of parameters, their first argument.
    const auto& arguments = schema.arguments();
    if (name.starts_with("_fused_") && !arguments.empty() &&
        is_list(arguments[0]) && writes(arguments[0])) {
      return Rule::kLocal;
    }
  }
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)
             ? Rule::kDecompose
             : Rule::kRefused;
}

struct OperatorFacts {
  Rule rule;
  bool is_recorded;          // by autograd
  bool is_cast;              // Module::to() calls it with grad mode on
  std::vector<char> writes;  // by argument
  std::optional<size_t> memory_format;
};

const OperatorFacts& facts_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<c10::OperatorHandle, OperatorFacts> known;
  const auto found = known.find(op);
  if (found != known.end()) return found->second;
  OperatorFacts facts{
      .rule = find_rule(op),
      .is_recorded = op.schema().getNamespace() != "aten" ||
                     !kNotRecorded.contains(base_name(op.schema())),
      .is_cast = op.schema().name() == "aten::_to_copy",
      .writes = {},
      .memory_format = {}};
  for (const c10::Argument& argument : op.schema().arguments()) {
    facts.writes.push_back(writes(argument) ? 1 : 0);
  }
  if (const auto place = op.schema().argumentIndexWithName("memory_format")) {
    facts.memory_format = static_cast<size_t>(*place);
  }
  return known.emplace(op, std::move(facts)).first->second;
}

// ---- Calls.

std::string name_of(const at::Tensor& sharded) {
  const Shard* const shard = shard_of(sharded);
  return shard == nullptr || shard->name.empty()
             ? "a sharded tensor of sizes " + c10::str(sharded.sizes())
             : "parameter '" + shard->name + "'";
}

// A sharded tensor among the arguments of a call.
struct ShardedArgument {
  at::Tensor tensor;
  Shard* shard;
  size_t argument;
  size_t index;                 // in a list argument, or 0
  at::Tensor replacement = {};  // the argument of the kernel
};

// True if both hold the same elements, perhaps of two models.
bool are_cut_identically(const ShardedArgument& a, const ShardedArgument& b) {
  return a.shard->offset == b.shard->offset &&
         a.shard->flat_offset == b.shard->flat_offset &&
         a.shard->flat_per_rank == b.shard->flat_per_rank &&
         a.shard->local.numel() == b.shard->local.numel() &&
         a.tensor.sizes() == b.tensor.sizes() &&
         a.tensor.strides() == b.tensor.strides();
}

void note_written(const ShardedArgument& written, bool bumps_version = true) {
  if (bumps_version && !written.tensor.is_inference()) {
    written.tensor.unsafeGetTensorImpl()->bump_version();
  }
  const Shard& shard = *written.shard;
  if (shard.owner != nullptr) shard.owner->written(shard.unit);
}

// One operator call; its arguments are on top of the stack.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op), stack_(stack), num_arguments_(op.schema().arguments().size()) {
    visit([&](const at::Tensor& tensor, size_t argument, size_t index) {
      if (Shard* const shard = shard_of(tensor)) {
        sharded_.push_back({tensor, shard, argument, index});
      } else {
        has_plain_ |= tensor.defined();
      }
    });
  }

  // In order.
  std::span<const ShardedArgument> sharded() const { return sharded_; }
  // True if there are tensors that are not sharded.
  bool has_plain() const { return has_plain_; }

  const c10::OperatorHandle& op() const { return op_; }
  c10::IValue& argument(size_t index) {
    return stack_[stack_.size() - num_arguments_ + index];
  }
  c10::IValue argument(const std::string& name) {
    const auto place = op_.schema().argumentIndexWithName(name);
    return place ? argument(static_cast<size_t>(*place)) : c10::IValue();
  }

  // `index`: position in a list argument, or 0.
  template <typename Visit>  // (const at::Tensor&, size_t argument, size_t
                             // index)
  void visit(const Visit& visit) {
    for (size_t i = 0; i < num_arguments_; ++i) {
      const c10::IValue& value = argument(i);
      if (value.isTensor()) {
        visit(value.toTensor(), i, size_t{0});
      } else if (value.isList()) {
        const auto list = value.toListRef();
        for (size_t k = 0; k < list.size(); ++k) {
          if (list[k].isTensor()) visit(list[k].toTensor(), i, k);
        }
      }
    }
  }

  // Runs below autograd, on `replace(argument)` for each sharded argument.
  template <typename Replace>
  void run_on(const Replace& replace) {
    const c10::IValue* copied = nullptr;
    for (ShardedArgument& each : sharded_) {
      each.replacement = replace(each);
      c10::IValue& value = argument(each.argument);
      if (value.isTensor()) {
        value = each.replacement;
        continue;
      }
      if (copied != &value) value = value.toList().copy();
      copied = &value;
      value.toList().set(each.index, each.replacement);
    }
    const at::AutoDispatchBelowADInplaceOrView below;
    run();
  }

  // Returns the sharded argument whose replacement is `result`, or null.
  const at::Tensor* original_of(const at::Tensor& result) const {
    for (const ShardedArgument& each : sharded_) {
      if (result.is_same(each.replacement)) return &each.tensor;
    }
    return nullptr;
  }

  void run() { op_.callBoxed(stack_); }
  void run_without_key() {
    const c10::impl::ExcludeDispatchKeyGuard no_key(kShardedKey);
    run();
  }
  std::span<c10::IValue> results() {
    return std::span(stack_).last(op_.schema().returns().size());
  }
  // Replaces run().
  void give_result(c10::IValue result) {
    torch::jit::drop(stack_, num_arguments_);
    stack_.push_back(std::move(result));
  }

  // True if this rank holds all elements of each sharded argument.
  bool are_whole() const {
    return std::ranges::all_of(sharded_, [](const ShardedArgument& each) {
      return each.shard->is_whole;
    });
  }

  [[noreturn]] void refuse(const std::string& why) const {
    C10_THROW_ERROR(NotImplementedError,
                    toString(op_.operator_name()) + ": " + why);
  }

 private:
  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  const size_t num_arguments_;
  c10::SmallVector<ShardedArgument, 4> sharded_;
  bool has_plain_ = false;
};

// ---- Elementwise operators.

// A call on the local tensors of its sharded arguments.
class LocalCall {
 public:
  LocalCall(Call& call, const OperatorFacts& facts)
      : call_(call), facts_(facts) {}

  // Throws if the arguments don't match, before any is written.
  void check() {
    check_sharded();
    if (call_.has_plain()) {
      call_.visit([&](const at::Tensor& tensor, size_t argument, size_t index) {
        if (tensor.defined() && shard_of(tensor) == nullptr) {
          check_plain(tensor, argument, index);
        }
      });
    }
    if (facts_.memory_format) check_memory_format();
  }

  // As check(), without plain arguments.
  void check_sharded() {
    for (const ShardedArgument& each : call_.sharded()) {
      if (each.index >= references_.size()) references_.resize(each.index + 1);
      const ShardedArgument*& reference = references_[each.index];
      if (reference == nullptr) {
        reference = &each;
      } else if (!are_cut_identically(*reference, each)) {
        refuse_mismatch(reference->tensor, each.tensor);
      }
    }
  }

  void run() {
    call_.run_on(
        [this](const ShardedArgument& each) { return local_of(each); });
    for (c10::IValue& value : call_.results()) {
      if (value.isTensor()) {
        value = wrap(value.toTensor(), *references_[0]);
      } else if (value.isTensorList()) {
        value = wrap(value.toTensorVector());
      }
    }
  }

 private:
  void check_plain(const at::Tensor& tensor, size_t argument, size_t index) {
    // An element of a list goes with the same index, a single tensor with all.
    const bool is_in_list = call_.argument(argument).isList();
    for (size_t k = 0; k < references_.size(); ++k) {
      if (references_[k] == nullptr || (is_in_list && k != index)) continue;
      const at::Tensor& whole = references_[k]->tensor;
      if (tensor.dim() > 0) {
        call_.refuse(c10::str("mixes a plain tensor of sizes ", tensor.sizes(),
                              " with ", name_of(whole),
                              ". Call it inside unsharded() (Python: "
                              "whole_parameters()). If it is an optimizer's "
                              "state, let the first step() run outside."));
      }
      const bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
      if (whole.dim() == 0 && !is_number && makes_tensors() &&
          tensor.scalar_type() != whole.scalar_type()) {
        call_.refuse(c10::str("mixes a plain tensor of dtype ",
                              tensor.scalar_type(), " with ", name_of(whole),
                              ", which is 0-dimensional of dtype ",
                              whole.scalar_type(), ". Cast one of them."));
      }
    }
  }

  [[noreturn]] void refuse_mismatch(const at::Tensor& a,
                                    const at::Tensor& b) const {
    if (a.sizes() != b.sizes() || a.strides() != b.strides()) {
      call_.refuse(
          c10::str("expected sharded tensors of equal sizes and "
                   "strides, found sizes ",
                   a.sizes(), " and ", b.sizes(), ", strides ", a.strides(),
                   " and ", b.strides(), "."));
    }
    call_.refuse(name_of(a) + " and " + name_of(b) +
                 " are sharded differently. Shard them in units of the same "
                 "parameters, over the same ranks.");
  }

  void check_memory_format() {
    c10::IValue& value = call_.argument(*facts_.memory_format);
    if (value.isNone()) return;
    const auto format = value.toMemoryFormat();
    const at::Tensor& whole = references_[0]->tensor;
    if (format != at::MemoryFormat::Preserve &&
        !(format == at::MemoryFormat::Contiguous && whole.is_contiguous())) {
      call_.refuse("expected the memory format of " + name_of(whole) +
                   ", found another. Leave memory_format out.");
    }
    value = c10::IValue();
  }

  // True if type promotion chooses the dtype of the results.
  bool makes_tensors() const {
    const auto& returns = call_.op().schema().returns();
    return !returns.empty() &&
           std::ranges::all_of(returns, [](const c10::Argument& result) {
             return result.alias_info() == nullptr;
           });
  }

  at::Tensor local_of(const ShardedArgument& each) {
    const at::Tensor& piece = each.shard->local;
    if (facts_.writes[each.argument] != 0) note_written(each);
    // Type promotion treats 0-dimensional tensors differently.
    const bool is_scalar = each.tensor.dim() == 0 && piece.numel() == 1;
    return is_scalar ? piece.view(at::IntArrayRef()) : piece;
  }

  at::Tensor wrap(const at::Tensor& result, const ShardedArgument& reference) {
    if (const auto* original = call_.original_of(result)) return *original;
    const at::Tensor& whole = reference.tensor;
    const at::Tensor local =
        whole.dim() == 0 && result.dim() == 0 ? result.reshape({1}) : result;
    if (local.sizes() != reference.shard->local.sizes()) {
      call_.refuse(c10::str("expected a local result of sizes ",
                            reference.shard->local.sizes(), ", found ",
                            result.sizes(), "."));
    }
    return make_sharded_like(whole, local);
  }

  std::vector<at::Tensor> wrap(std::vector<at::Tensor> results) {
    for (size_t k = 0; k < results.size() && k < references_.size(); ++k) {
      if (references_[k] != nullptr) {
        results[k] = wrap(results[k], *references_[k]);
      }
    }
    return results;
  }

  Call& call_;
  const OperatorFacts& facts_;
  // By index in a list, or 0: the first sharded argument; perhaps null.
  c10::SmallVector<const ShardedArgument*, 4> references_;
};

// ---- Random fills.

void draw(Call& call) {
  const ShardedArgument& self = call.sharded()[0];
  const at::Tensor& local = self.shard->local;
  const at::NoGradGuard no_grad;
  const at::Tensor whole = at::empty_strided(
      self.tensor.sizes(), self.tensor.strides(), local.options());
  call.argument(0) = whole;
  call.run();
  local.copy_(whole.as_strided({whole.numel()}, {1})
                  .narrow(0, self.shard->offset, local.numel()));
  call.results()[0] = self.tensor;
  note_written(self);
}

// ---- Operators on unsharded tensors.

// Runs on local tensors that hold all elements, and gathers the others
// (collective). Results are plain.
void run_on_wholes(Call& call) {
  const auto& arguments = call.op().schema().arguments();
  call.run_on([&](const ShardedArgument& each) {
    const auto& [tensor, shard, argument, index, replacement] = each;
    if (!shard->is_whole) return gather_whole(tensor);
    // Results may be views, through which the caller writes later.
    note_written(each, writes(arguments[argument]));
    return shard->local.as_strided(tensor.sizes(), tensor.strides(),
                                   shard->local.storage_offset());
  });
  for (c10::IValue& result : call.results()) {
    if (!result.isTensor()) continue;
    if (const auto* original = call.original_of(result.toTensor())) {
      result = *original;
    }
  }
}

// ---- Reductions.

// REQUIRES: 1D `values`.
at::Tensor all_reduce(ShardGroup& group, const at::Tensor& values,
                      bool is_max) {
  const at::Tensor all = group.all_gather(values);
  return is_max ? all.amax(0) : all.sum(0);
}

// Norms in float64, with one all-reduce per shard group.
std::vector<at::Tensor> norms_of(const std::vector<at::Tensor>& sharded,
                                 double order) {
  const bool is_max = std::isinf(order);
  std::vector<at::Tensor> norms(sharded.size());
  for (size_t i = 0; i < sharded.size(); ++i) {
    if (norms[i].defined()) continue;
    ShardGroup& group = group_of(*shard_of(sharded[i]));
    std::vector<size_t> members;
    std::vector<at::Tensor> values;
    for (size_t k = i; k < sharded.size(); ++k) {
      const Shard& shard = *shard_of(sharded[k]);
      if (shard.group.get() != &group) continue;
      members.push_back(k);
      values.push_back(local_norm(shard.local, order));
    }
    at::Tensor together = at::stack(values);
    if (!is_max) together = together.pow(order);
    together = all_reduce(group, together, is_max);
    if (!is_max) together = together.pow(1 / order);
    for (size_t m = 0; m < members.size(); ++m) {
      norms[members[m]] = together[static_cast<int64_t>(m)];
    }
  }
  return norms;
}

void reduce_norms(Call& call, double order) {
  const c10::IValue self = call.argument("self");
  const auto dtype = call.argument("dtype").toOptional<at::ScalarType>();
  std::vector<at::Tensor> results =
      self.isTensor() ? std::vector{self.toTensor()} : self.toTensorVector();
  std::vector<at::Tensor> sharded;
  for (const at::Tensor& tensor : results) {
    if (shard_of(tensor) != nullptr) sharded.push_back(tensor);
  }
  const std::vector<at::Tensor> norms = norms_of(sharded, order);
  for (size_t next = 0; at::Tensor & tensor : results) {
    tensor = shard_of(tensor) == nullptr
                 ? at::linalg_vector_norm(tensor, order, std::nullopt,
                                          /*keepdim=*/false, dtype)
                 : norms[next++].to(dtype.value_or(
                       c10::toRealValueType(tensor.scalar_type())));
  }
  if (!self.isTensor()) return call.give_result(std::move(results));
  const c10::IValue keeps = call.argument("keepdim");
  if (keeps.isBool() && keeps.toBool()) {
    const auto num_dims = static_cast<size_t>(self.toTensor().dim());
    results[0] = results[0].reshape(std::vector<int64_t>(num_dims, 1));
  }
  call.give_result(std::move(results[0]));
}

// GradScaler: unscales local gradients and all-reduces `found_inf`.
void unscale(Call& call, const OperatorFacts& facts) {
  LocalCall local(call, facts);
  local.check_sharded();  // ShardedGradScaler's other arguments have one dim
  const at::Tensor found_inf = call.argument("found_inf").toTensor();
  std::vector<ShardGroup*> groups;
  for (const ShardedArgument& each : call.sharded()) {
    if (std::ranges::find(groups, each.shard->group.get()) == groups.end()) {
      groups.push_back(each.shard->group.get());
    }
  }
  local.run();
  for (ShardGroup* const group : groups) {
    found_inf.copy_(all_reduce(*group, found_inf.reshape({1}), /*is_max=*/true)
                        .reshape(found_inf.sizes()));
  }
}

bool covers_all_dims(const c10::IValue& dims, int64_t num_dims) {
  if (dims.isNone()) return true;
  if (dims.isInt()) return num_dims == 1;
  const auto list = dims.toIntVector();
  return list.empty() || static_cast<int64_t>(list.size()) == num_dims;
}

void reduce(Call& call, const OperatorFacts& facts) {
  const at::NoGradGuard no_grad;
  const std::string_view name = base_name(call.op().schema());
  const c10::IValue dims = call.argument("dim");
  bool is_total = true;
  for (const ShardedArgument& each : call.sharded()) {
    is_total = is_total && covers_all_dims(dims, each.tensor.dim());
    group_of(*each.shard).require_all_ranks();
  }
  if (name.starts_with("_amp_foreach_")) return unscale(call, facts);
  double order = 2;
  for (const char* argument : {"ord", "p"}) {
    const c10::IValue value = call.argument(argument);
    if (value.isScalar()) order = value.toScalar().toDouble();
  }
  // Needs no memory for the unsharded tensor.
  if (is_total && name.ends_with("norm") && order > 0) {
    return reduce_norms(call, order);
  }
  run_on_wholes(call);
}

// REQUIRES: grad mode.
void check_requires_no_grad(Call& call) {
  call.visit([&](const at::Tensor& tensor, size_t, size_t) {
    TORCH_CHECK(!tensor.requires_grad(), toString(call.op().operator_name()),
                " of ",
                shard_of(tensor) != nullptr
                    ? name_of(tensor)
                    : "a tensor that requires grad and a sharded tensor",
                " outside of a forward is not recorded by autograd. Call it "
                "under torch.no_grad(). For a penalty in the loss use the "
                "optimizer's weight_decay, or compute it in forward().");
  });
}

// ---- The fallback.

bool is_transformed_or_traced() {
  using Modes = c10::impl::TorchDispatchModeTLS;
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  if (keys.included_.has(c10::DispatchKey::Python) &&
      (Modes::get_mode(c10::impl::TorchDispatchModeKey::PROXY) ||
       Modes::get_mode(c10::impl::TorchDispatchModeKey::FUNCTIONAL))) {
    return true;
  }
  return keys.included_.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         (keys.included_ - keys.excluded_).has(c10::DispatchKey::Tracer);
}

void refuse_views(Call& call) {
  for (const ShardedArgument& each : call.sharded()) {
    const at::Tensor& tensor = each.tensor;
    if (tensor.nbytes() == tensor.storage().nbytes() &&
        tensor.is_non_overlapping_and_dense()) {
      continue;
    }
    call.refuse("a view of " + name_of(tensor) +
                ", made while it was unsharded, shows a part of it. Make the "
                "view again inside the model's forward.");
  }
}

// Calls `use(owner, parameters)` for each model of the parameters in `call`.
template <typename Use>
void for_each_owner(Call& call, const Use& use) {
  c10::SmallVector<const Shard*, 4> used;
  for (const ShardedArgument& each : call.sharded()) {
    if (each.shard->owner != nullptr &&
        std::find(used.begin(), used.end(), each.shard) == used.end()) {
      used.push_back(each.shard);
    }
  }
  for (auto* first = used.begin(); first != used.end();) {
    ParameterOwner* const owner = (*first)->owner;
    auto* const last = std::stable_partition(
        first, used.end(),
        [owner](const Shard* shard) { return shard->owner == owner; });
    use(*owner, std::span<const Shard* const>(first, last));
    first = last;
  }
}

// Returns the least state of the parameters; nullopt without parameters.
std::optional<ParameterState> use_parameters(Call& call) {
  std::optional<ParameterState> state;
  for_each_owner(call, [&](ParameterOwner& owner, const auto& parameters) {
    const ParameterState of_owner = owner.use(parameters);
    state = state ? std::min(*state, of_owner) : of_owner;
  });
  return state;
}

// Runs the call on unsharded parameters if autograd can record it on them;
// returns false otherwise.
// REQUIRES: grad mode.
bool run_after_forward(Call& call, const OperatorFacts& facts) {
  const bool are_parameters =
      std::ranges::all_of(call.sharded(), [&](const ShardedArgument& each) {
        return each.shard->owner != nullptr && facts.writes[each.argument] == 0;
      });
  bool is_recorded = false;
  call.visit([&](const at::Tensor& tensor, size_t, size_t) {
    is_recorded |= tensor.requires_grad();
  });
  if (!is_recorded || !are_parameters) return false;
  c10::SmallVector<std::pair<ParameterOwner*, size_t>, 4> units;
  for (const ShardedArgument& each : call.sharded()) {
    units.emplace_back(each.shard->owner, each.shard->unit);
  }
  const auto end = c10::make_scope_exit([&units] {
    for (const auto& [owner, unit] : units) owner->end_use_after_forward(unit);
  });
  for_each_owner(call, [&](ParameterOwner& owner, const auto& parameters) {
    is_recorded = is_recorded && owner.use_after_forward(parameters);
  });
  if (is_recorded) call.run_without_key();
  return is_recorded;
}

void check_use_of_unsharded(Call& call, ParameterState state) {
  const auto& arguments = call.op().schema().arguments();
  for (const auto& [tensor, shard, argument, index, _] : call.sharded()) {
    if (shard->owner == nullptr) {
      call.refuse(name_of(tensor) +
                  " in a forward, backward or unsharded(): it belongs to no "
                  "unit. Use a copy of its full tensor instead; call an "
                  "optimizer's step() outside.");
    }
    if (state == ParameterState::kUnsharded && writes(arguments[argument])) {
      call.refuse("writes to " + name_of(tensor) +
                  " in a forward or backward, where it would be lost. Write "
                  "outside of them.");
    }
  }
}

[[noreturn]] void refuse_sharded(Call& call) {
  at::Tensor named;  // a parameter, if there is one
  for (const ShardedArgument& each : call.sharded()) {
    if (!named.defined() || !each.shard->name.empty()) named = each.tensor;
  }
  const Shard& shard = *shard_of(named);
  if (!shard.name.empty() && shard.group != nullptr && shard.owner == nullptr) {
    call.refuse(
        "needs " + name_of(named) +
        " unsharded, but this rank holds only its shard, and the model has not "
        "run a forward yet. (If it was destroyed, the values are gone.) " +
        kHowToUnshard);
  }
  call.refuse("needs " + name_of(named) +
              " unsharded; outside of forward and backward this rank holds "
              "only its shard. " +
              kHowToUnshard +
              " In an optimizer: use an elementwise one (SGD, Adam, AdamW, "
              "RMSprop, Adagrad).");
}

void on_sharded(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                torch::jit::Stack* stack) {
  Call call(op, *stack);
  if (call.sharded().empty()) {  // set_() replaced a storage
    return call.run_without_key();
  }
  const auto state = use_parameters(call);
  if (state && *state != ParameterState::kSharded) {
    check_use_of_unsharded(call, *state);
    return call.run_without_key();
  }
  const OperatorFacts& facts = facts_of(op);
  if (facts.rule == Rule::kHandle) return call.run_without_key();
  if (is_transformed_or_traced()) {
    call.refuse(
        std::string("torch.func and tracers can't follow a sharded tensor. ") +
        kHowToUnshard);
  }
  if (facts.rule == Rule::kDecompose) {
    return op.redispatchBoxed(
        keys &
            c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kShardedKey),
        stack);
  }
  const bool is_recorded = facts.is_recorded && at::GradMode::is_enabled();
  if (is_recorded && run_after_forward(call, facts)) return;
  refuse_views(call);
  if (facts.rule == Rule::kRefused && !call.are_whole()) {
    refuse_sharded(call);
  }
  if (is_recorded && !facts.is_cast) check_requires_no_grad(call);
  switch (facts.rule) {
    case Rule::kLocal: {
      LocalCall local(call, facts);
      try {
        local.check();
      } catch (const c10::NotImplementedError&) {
        if (!call.are_whole()) throw;
        return run_on_wholes(call);
      }
      const bool is_cast = facts.is_cast && is_recorded &&
                           call.argument(0).toTensor().requires_grad();
      local.run();
      if (!is_cast) return;
      const at::Tensor cast = call.results()[0].toTensor();
      // The next operator of a loss throws; Module::to() takes the data.
      if (cast.is_floating_point() || cast.is_complex()) cast.requires_grad_();
      return;
    }
    case Rule::kDraw:
      return draw(call);
    case Rule::kReduce:
      // Runs torch's own kernel, which gives the bits of one process.
      return call.are_whole() ? run_on_wholes(call) : reduce(call, facts);
    default:
      return run_on_wholes(call);
  }
}

}  // namespace

const torch::Library& register_shard_operators() {
  static const torch::Library* const library = [] {
    auto* made = new torch::Library(torch::Library::IMPL, "_", kShardedKey,
                                    __FILE__, static_cast<uint32_t>(__LINE__));
    made->fallback(torch::CppFunction::makeFromBoxedFunction<&on_sharded>());
    return made;
  }();
  return *library;
}

at::Tensor local_norm(const at::Tensor& local, double order) {
  if (local.numel() == 0) {
    return at::zeros({}, local.options().dtype(at::kDouble));
  }
  return at::linalg_vector_norm(local.is_complex() ? local.abs() : local, order,
                                std::nullopt, /*keepdim=*/false, at::kDouble);
}

}  // namespace brigade
