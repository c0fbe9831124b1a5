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
#include <ATen/TracerMode.h>
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

// True if both hold the same elements, perhaps of two models.
bool are_cut_identically(const at::Tensor& a, const at::Tensor& b) {
  const Shard& of_a = *shard_of(a);
  const Shard& of_b = *shard_of(b);
  return of_a.offset == of_b.offset && of_a.flat_offset == of_b.flat_offset &&
         of_a.flat_per_rank == of_b.flat_per_rank &&
         of_a.local.numel() == of_b.local.numel() && a.sizes() == b.sizes() &&
         a.strides() == b.strides();
}

void note_written(const at::Tensor& sharded, bool bumps_version = true) {
  if (bumps_version && !sharded.is_inference()) {
    sharded.unsafeGetTensorImpl()->bump_version();
  }
  const Shard& shard = *shard_of(sharded);
  if (shard.owner != nullptr) shard.owner->written(shard.unit);
}

// Pairs: argument of a call, sharded tensor that it replaces.
using Replaced = c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 4>;

const at::Tensor* original_of(const at::Tensor& result,
                              const Replaced& replaced) {
  for (const auto& [argument, original] : replaced) {
    if (result.is_same(argument)) return &original;
  }
  return nullptr;
}

// A sharded tensor among the arguments of a call.
struct ShardedArgument {
  const at::Tensor* tensor;
  Shard* shard;
  size_t argument;
  size_t index;  // in a list argument, or 0
};

// One operator call; its arguments are on top of the stack.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op), stack_(stack), num_arguments_(op.schema().arguments().size()) {
    visit([&](const at::Tensor& tensor, size_t argument, size_t index) {
      if (Shard* const shard = shard_of(tensor)) {
        sharded_.push_back({&tensor, shard, argument, index});
      }
    });
  }

  // In order. REQUIRES: no argument has been replaced.
  std::span<const ShardedArgument> sharded() const { return sharded_; }

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

  // Runs below autograd, on `replace(tensor, argument)` for sharded tensors.
  template <typename Replace>
  Replaced run_on(const Replace& replace) {
    Replaced replaced;
    const auto replace_sharded = [&](const at::Tensor& tensor,
                                     size_t argument) {
      if (shard_of(tensor) == nullptr) return tensor;
      replaced.push_back({replace(tensor, argument), tensor});
      return replaced.back().first;
    };
    for (size_t i = 0; i < num_arguments_; ++i) {
      c10::IValue& value = argument(i);
      if (value.isTensor()) {
        value = c10::IValue(replace_sharded(value.toTensor(), i));
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        list.reserve(value.toListRef().size());
        for (const c10::IValue& element : value.toListRef()) {
          list.push_back(replace_sharded(element.toTensor(), i));
        }
        value = std::move(list);
      }
    }
    const at::AutoDispatchBelowADInplaceOrView below;
    run();
    return replaced;
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
    call_.visit([&](const at::Tensor& tensor, size_t argument, size_t index) {
      if (tensor.defined() && shard_of(tensor) == nullptr) {
        check_plain(tensor, argument, index);
      }
    });
    if (facts_.memory_format) check_memory_format();
  }

  // As check(), without plain arguments.
  void check_sharded() {
    for (const ShardedArgument& each : call_.sharded()) {
      if (each.index >= references_.size()) references_.resize(each.index + 1);
      at::Tensor& reference = references_[each.index];
      if (!reference.defined()) {
        reference = *each.tensor;
      } else if (!are_cut_identically(reference, *each.tensor)) {
        refuse_mismatch(reference, *each.tensor);
      }
    }
  }

  void run() {
    replaced_ = call_.run_on([this](const at::Tensor& tensor, size_t argument) {
      return local_of(tensor, argument);
    });
    for (c10::IValue& value : call_.results()) {
      if (value.isTensor()) {
        value = wrap(value.toTensor(), references_[0]);
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
      const at::Tensor& whole = references_[k];
      if (!whole.defined() || (is_in_list && k != index)) continue;
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
    const at::Tensor& whole = references_[0];
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

  at::Tensor local_of(const at::Tensor& tensor, size_t argument) {
    const at::Tensor& piece = shard_of(tensor)->local;
    if (facts_.writes[argument] != 0) note_written(tensor);
    // Type promotion treats 0-dimensional tensors differently.
    const bool is_scalar = tensor.dim() == 0 && piece.numel() == 1;
    return is_scalar ? piece.view(at::IntArrayRef()) : piece;
  }

  at::Tensor wrap(const at::Tensor& result, const at::Tensor& whole) {
    if (const auto* original = original_of(result, replaced_)) return *original;
    const at::Tensor local =
        whole.dim() == 0 && result.dim() == 0 ? result.reshape({1}) : result;
    if (local.sizes() != shard_of(whole)->local.sizes()) {
      call_.refuse(c10::str("expected a local result of sizes ",
                            shard_of(whole)->local.sizes(), ", found ",
                            result.sizes(), "."));
    }
    return make_sharded_like(whole, local);
  }

  std::vector<at::Tensor> wrap(std::vector<at::Tensor> results) {
    for (size_t k = 0; k < results.size() && k < references_.size(); ++k) {
      if (references_[k].defined()) {
        results[k] = wrap(results[k], references_[k]);
      }
    }
    return results;
  }

  Call& call_;
  const OperatorFacts& facts_;
  // By index in a list, or 0: the first sharded argument; perhaps undefined.
  c10::SmallVector<at::Tensor, 1> references_;
  Replaced replaced_;
};

// ---- Random fills.

void draw(Call& call) {
  const at::Tensor sharded = call.argument(0).toTensor();
  const Shard& shard = *shard_of(sharded);
  const at::NoGradGuard no_grad;
  const at::Tensor whole = at::empty_strided(sharded.sizes(), sharded.strides(),
                                             shard.local.options());
  call.argument(0) = whole;
  call.run();
  shard.local.copy_(whole.as_strided({whole.numel()}, {1})
                        .narrow(0, shard.offset, shard.local.numel()));
  call.results()[0] = sharded;
  note_written(sharded);
}

// ---- Operators on unsharded tensors.

// Runs on local tensors that hold all elements, and gathers the others
// (collective). Results are plain.
void run_on_wholes(Call& call) {
  const auto& arguments = call.op().schema().arguments();
  const Replaced replaced =
      call.run_on([&](const at::Tensor& tensor, size_t argument) {
        const Shard& shard = *shard_of(tensor);
        if (!shard.is_whole) return gather_whole(tensor);
        // Results may be views, through which the caller writes later.
        note_written(tensor, writes(arguments[argument]));
        return shard.local.as_strided(tensor.sizes(), tensor.strides(),
                                      shard.local.storage_offset());
      });
  for (c10::IValue& result : call.results()) {
    if (!result.isTensor()) continue;
    if (const auto* original = original_of(result.toTensor(), replaced)) {
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
    is_total = is_total && covers_all_dims(dims, each.tensor->dim());
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

void check_grad_mode(Call& call, const OperatorFacts& facts) {
  if (!at::GradMode::is_enabled() || !facts.is_recorded || facts.is_cast) {
    return;
  }
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
  return c10::impl::tls_is_dispatch_key_included(
             c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         at::tracer::impl::is_dispatch_enabled() ||
         c10::impl::TorchDispatchModeTLS::get_mode(
             c10::impl::TorchDispatchModeKey::PROXY) ||
         c10::impl::TorchDispatchModeTLS::get_mode(
             c10::impl::TorchDispatchModeKey::FUNCTIONAL);
}

void refuse_views(Call& call) {
  for (const ShardedArgument& each : call.sharded()) {
    const at::Tensor& tensor = *each.tensor;
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
bool run_after_forward(Call& call, const OperatorFacts& facts) {
  if (!at::GradMode::is_enabled() || !facts.is_recorded) return false;
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
  for (const auto& [tensor, shard, argument, index] : call.sharded()) {
    if (shard->owner == nullptr) {
      call.refuse(name_of(*tensor) +
                  " in a forward, backward or unsharded(): it belongs to no "
                  "unit. Use a copy of its full tensor instead; call an "
                  "optimizer's step() outside.");
    }
    if (state == ParameterState::kUnsharded && writes(arguments[argument])) {
      call.refuse("writes to " + name_of(*tensor) +
                  " in a forward or backward, where it would be lost. Write "
                  "outside of them.");
    }
  }
}

[[noreturn]] void refuse_sharded(Call& call) {
  at::Tensor named;  // a parameter, if there is one
  for (const ShardedArgument& each : call.sharded()) {
    if (!named.defined() || !each.shard->name.empty()) named = *each.tensor;
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
  if (run_after_forward(call, facts)) return;
  refuse_views(call);
  if (facts.rule == Rule::kRefused && !call.are_whole()) {
    refuse_sharded(call);
  }
  check_grad_mode(call, facts);
  switch (facts.rule) {
    case Rule::kLocal: {
      LocalCall local(call, facts);
      try {
        local.check();
      } catch (const c10::NotImplementedError&) {
        if (!call.are_whole()) throw;
        return run_on_wholes(call);
      }
      const bool is_cast = facts.is_cast && at::GradMode::is_enabled() &&
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
