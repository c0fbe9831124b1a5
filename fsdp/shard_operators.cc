#include "brigade/fsdp/shard_operators.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "brigade/fsdp/sharded_tensor.h"

namespace brigade {

namespace {

using Names = std::unordered_set<std::string_view>;

// ---- Rules.

// Tagged pointwise, and not elementwise: random, or with a result that is no
// tensor of the arguments' shape.
const Names kNotElementwise = {"rrelu", "rrelu_", "native_dropout_backward"};

const Names kCopies = {"clone",      "copy_",      "_to_copy",  "fill_",
                       "zero_",      "zeros_like", "ones_like", "full_like",
                       "empty_like", "zero",       "fill"};

const Names kDraws = {"normal_", "uniform_",    "random_",   "exponential_",
                      "cauchy_", "log_normal_", "geometric_"};

// Those over all elements, by their overloads.
const std::unordered_map<std::string_view, Names> kReductions = {
    {"linalg_vector_norm", {""}},
    {"norm",
     {"Scalar", "ScalarOpt_dtype", "ScalarOpt_dim", "ScalarOpt_dim_dtype"}},
    {"sum", {"", "dim_IntList"}},
    {"mean", {"", "dim"}},
    {"max", {""}},
    {"min", {""}},
    {"amax", {""}},
    {"amin", {""}},
    {"any", {""}},
    {"all", {""}},
    {"dot", {""}},
    {"equal", {""}},
    {"_foreach_norm", {"Scalar"}},
    {"_foreach_max", {""}},
    {"_amp_foreach_non_finite_check_and_unscale_", {""}},
};

// With results that have no gradient.
const Names kComparisons = {"eq", "ne",    "lt",    "le",    "gt",
                            "ge", "equal", "isnan", "isinf", "isfinite"};

const Names kHandles = {"detach", "detach_", "alias"};

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

bool returns_tensors_only(const c10::FunctionSchema& schema) {
  return std::ranges::all_of(schema.returns(), [](const c10::Argument& result) {
    return is_tensor(result) || is_list(result);
  });
}

bool is_elementwise(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  if (kNotElementwise.contains(base_name(schema)) ||
      !returns_tensors_only(schema)) {
    return false;
  }
  if (op.hasTag(at::Tag::pointwise)) return true;
  // Some in-place operators lack the tag that theirs out of place have.
  if (!schema.name().ends_with('_')) return false;
  const auto functional = c10::Dispatcher::singleton().findSchema(
      {schema.name().substr(0, schema.name().size() - 1),
       schema.overload_name()});
  return functional && functional->hasTag(at::Tag::pointwise);
}

// Whether _foreach_<base> does for each tensor what an elementwise operator or
// a copy does. Overloads have other names than the base operator's.
bool is_foreach_of_elementwise(std::string_view name) {
  name.remove_prefix(std::string_view("_foreach_").size());
  const std::string in_place(name);
  if (name.ends_with('_')) name.remove_suffix(1);
  if (kCopies.contains(name) || kCopies.contains(in_place)) return true;
  const std::string base = "aten::" + std::string(name);
  for (const char* overload :
       {"", "Tensor", "Scalar", "Tensor_Tensor", "Tensor_Scalar"}) {
    const auto op = c10::Dispatcher::singleton().findSchema({base, overload});
    if (op && is_elementwise(*op)) return true;
  }
  return false;
}

// What calls of an operator need of its schema.
struct OperatorFacts {
  OperatorRule rule;
  std::vector<char> writes;  // by argument
  std::optional<size_t> memory_format;
};

OperatorRule find_rule(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  const auto decompose_or_refuse = [&] {
    return op.hasKernelForDispatchKey(
               c10::DispatchKey::CompositeImplicitAutograd)
               ? OperatorRule::kDecompose
               : OperatorRule::kRefused;
  };
  if (schema.getNamespace() != "aten") return decompose_or_refuse();
  const std::string_view name = base_name(schema);
  const auto& arguments = schema.arguments();
  if (kHandles.contains(name)) return OperatorRule::kHandle;
  const auto reduction = kReductions.find(name);
  if (reduction != kReductions.end() &&
      reduction->second.contains(schema.overload_name())) {
    return OperatorRule::kReduce;
  }
  if (is_elementwise(op) || kCopies.contains(name)) return OperatorRule::kLocal;
  if (name.starts_with("_foreach_")) {
    return is_foreach_of_elementwise(name) ? OperatorRule::kLocal
                                           : OperatorRule::kRefused;
  }
  // Optimizers: their first argument is the list of parameters, written.
  if (name.starts_with("_fused_") && !arguments.empty() &&
      is_list(arguments[0]) && writes(arguments[0])) {
    return OperatorRule::kLocal;
  }
  if (kDraws.contains(name) ||
      (name == "bernoulli_" && schema.overload_name() == "float")) {
    return OperatorRule::kDraw;
  }
  return decompose_or_refuse();
}

const OperatorFacts& facts_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<c10::OperatorHandle, OperatorFacts> known;
  const auto found = known.find(op);
  if (found != known.end()) return found->second;
  OperatorFacts facts{.rule = find_rule(op), .writes = {}, .memory_format = {}};
  for (const c10::Argument& argument : op.schema().arguments()) {
    facts.writes.push_back(writes(argument) ? 1 : 0);
  }
  if (const auto place = op.schema().argumentIndexWithName("memory_format")) {
    facts.memory_format = static_cast<size_t>(*place);
  }
  return known.emplace(op, std::move(facts)).first->second;
}

// ---- Arguments.

// All tensors of the arguments of a call, on top of the stack.
template <typename Visit>  // (const at::Tensor&, size_t argument, size_t index)
void visit_tensors(const torch::jit::Stack& stack, size_t num_arguments,
                   const Visit& visit) {
  const size_t begin = stack.size() - num_arguments;
  for (size_t i = 0; i < num_arguments; ++i) {
    const c10::IValue& value = stack[begin + i];
    if (value.isTensor()) {
      visit(value.toTensor(), i, size_t{0});
    } else if (value.isList()) {
      const auto list = value.toListRef();
      for (size_t k = 0; k < list.size() && list[k].isTensor(); ++k) {
        visit(list[k].toTensor(), i, k);
      }
    }
  }
}

// Those that are sharded.
template <typename Visit>  // (const at::Tensor&, Shard&, size_t argument)
void visit_sharded(const torch::jit::Stack& stack, size_t num_arguments,
                   const Visit& visit) {
  visit_tensors(stack, num_arguments,
                [&](const at::Tensor& tensor, size_t argument, size_t) {
                  Shard* const shard = shard_of(tensor);
                  if (shard != nullptr) visit(tensor, *shard, argument);
                });
}

// Puts `replace(tensor, argument)` in the place of each of them.
template <typename Replace>
void replace_tensors(torch::jit::Stack& stack, size_t num_arguments,
                     const Replace& replace) {
  const size_t begin = stack.size() - num_arguments;
  for (size_t i = 0; i < num_arguments; ++i) {
    c10::IValue& value = stack[begin + i];
    if (value.isTensor()) {
      value = c10::IValue(replace(value.toTensor(), i));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> replaced;
      const auto list = value.toListRef();
      replaced.reserve(list.size());
      for (const c10::IValue& element : list) {
        replaced.push_back(replace(element.toTensor(), i));
      }
      value = std::move(replaced);
    }
  }
}

std::string name_of(const at::Tensor& sharded) {
  const Shard* const shard = shard_of(sharded);
  return shard == nullptr || shard->name.empty()
             ? "a sharded tensor of sizes " + c10::str(sharded.sizes())
             : "parameter '" + shard->name + "'";
}

[[noreturn]] void refuse(const c10::OperatorHandle& op,
                         const std::string& why) {
  C10_THROW_ERROR(NotImplementedError,
                  toString(op.operator_name()) + ": " + why);
}

// Also of two models that are sharded alike.
bool hold_one_piece(const at::Tensor& a, const at::Tensor& b) {
  const Shard& of_a = *shard_of(a);
  const Shard& of_b = *shard_of(b);
  return of_a.offset == of_b.offset && of_a.flat_offset == of_b.flat_offset &&
         of_a.flat_per_rank == of_b.flat_per_rank &&
         of_a.local.numel() == of_b.local.numel() && a.sizes() == b.sizes() &&
         a.strides() == b.strides();
}

// A call in which local pieces take the place of sharded arguments.
class LocalCall {
 public:
  LocalCall(const c10::OperatorHandle& op, const OperatorFacts& facts,
            torch::jit::Stack& stack)
      : op_(op),
        facts_(facts),
        stack_(stack),
        num_arguments_(facts.writes.size()) {}

  // Throws if the arguments don't fit, before anything is changed.
  void check() {
    visit_tensors(stack_, num_arguments_,
                  [&](const at::Tensor& tensor, size_t, size_t index) {
                    if (shard_of(tensor) == nullptr) return;
                    if (index >= references_.size()) {
                      references_.resize(index + 1);
                    }
                    at::Tensor& reference = references_[index];
                    if (!reference.defined()) {
                      reference = tensor;
                    } else if (!hold_one_piece(reference, tensor)) {
                      refuse_pieces(reference, tensor);
                    }
                  });
    visit_tensors(stack_, num_arguments_,
                  [&](const at::Tensor& tensor, size_t argument, size_t index) {
                    if (tensor.defined() && shard_of(tensor) == nullptr) {
                      check_plain(tensor, argument, index);
                    }
                  });
    if (facts_.memory_format) check_memory_format();
  }

  void run() {
    replace_tensors(stack_, num_arguments_,
                    [this](const at::Tensor& tensor, size_t argument) {
                      return local_of(tensor, argument);
                    });
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      op_.callBoxed(stack_);
    }
    for (const at::Tensor& tensor : written_) {
      if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
      const Shard& shard = *shard_of(tensor);
      if (shard.owner != nullptr) shard.owner->written(shard.unit);
    }
    wrap_results();
  }

 private:
  void check_plain(const at::Tensor& tensor, size_t argument, size_t index) {
    // In lists beside what is at its place, otherwise beside all.
    const bool is_in_list =
        stack_[stack_.size() - num_arguments_ + argument].isList();
    for (size_t k = 0; k < references_.size(); ++k) {
      const at::Tensor& whole = references_[k];
      if (!whole.defined() || (is_in_list && k != index)) continue;
      if (tensor.dim() > 0) {
        refuse(op_,
               c10::str("a plain tensor of sizes ", tensor.sizes(), " beside ",
                        name_of(whole), ". Shard it alike: shard_like()."));
      }
      const bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
      if (whole.dim() == 0 && !is_number && makes_tensors() &&
          tensor.scalar_type() != whole.scalar_type()) {
        refuse(op_, c10::str("a plain tensor of dtype ", tensor.scalar_type(),
                             " beside ", name_of(whole),
                             ", which has no dimensions and dtype ",
                             whole.scalar_type(), ". Cast it."));
      }
    }
  }

  [[noreturn]] void refuse_pieces(const at::Tensor& a,
                                  const at::Tensor& b) const {
    if (a.sizes() != b.sizes() || a.strides() != b.strides()) {
      refuse(op_, c10::str("sharded tensors of sizes ", a.sizes(), " and ",
                           b.sizes(), ", strides ", a.strides(), " and ",
                           b.strides(), ". They must be equal."));
    }
    refuse(op_, name_of(a) + " and " + name_of(b) +
                    " are cut at different places. Shard them in units of the "
                    "same parameters, over the same ranks.");
  }

  void check_memory_format() {
    c10::IValue& value =
        stack_[stack_.size() - num_arguments_ + *facts_.memory_format];
    if (value.isNone()) return;
    const auto format = value.toMemoryFormat();
    const at::Tensor& whole = references_[0];
    if (format != at::MemoryFormat::Preserve &&
        !(format == at::MemoryFormat::Contiguous && whole.is_contiguous())) {
      refuse(op_, "another memory format than that of " + name_of(whole) + ".");
    }
    value = c10::IValue();
  }

  // The results are new tensors, whose dtype type promotion chooses.
  bool makes_tensors() const {
    return std::ranges::all_of(op_.schema().returns(),
                               [](const auto& result) {
                                 return result.alias_info() == nullptr;
                               }) &&
           !op_.schema().returns().empty();
  }

  at::Tensor local_of(const at::Tensor& tensor, size_t argument) {
    const Shard* const shard = shard_of(tensor);
    if (shard == nullptr) return tensor;
    if (facts_.writes[argument] != 0) written_.push_back(tensor);
    // Type promotion treats tensors without dimensions in a way of their own.
    const bool is_scalar = tensor.dim() == 0 && shard->local.numel() == 1;
    at::Tensor local =
        is_scalar ? shard->local.view(at::IntArrayRef()) : shard->local;
    originals_.push_back({local, tensor});
    return local;
  }

  at::Tensor wrap(const at::Tensor& result, const at::Tensor& whole) {
    for (const auto& [local, original] : originals_) {
      if (result.is_same(local)) return original;
    }
    const Shard& shard = *shard_of(whole);
    const bool is_scalar = whole.dim() == 0 && result.dim() == 0;
    const at::Tensor local = is_scalar ? result.reshape({1}) : result;
    if (local.sizes() != shard.local.sizes()) {
      refuse(op_, "its result is not of its arguments' sizes: " +
                      c10::str(result.sizes()) + ".");
    }
    return make_sharded({.local = local,
                         .offset = shard.offset,
                         .group = shard.group,
                         .flat_offset = shard.flat_offset,
                         .flat_per_rank = shard.flat_per_rank,
                         .is_whole = shard.is_whole},
                        whole.sizes(), whole.strides());
  }

  void wrap_results() {
    const size_t num_results = op_.schema().returns().size();
    for (size_t i = stack_.size() - num_results; i < stack_.size(); ++i) {
      c10::IValue& value = stack_[i];
      if (value.isTensor()) {
        value = wrap(value.toTensor(), references_[0]);
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> wholes;
        const auto results = value.toListRef();
        wholes.reserve(results.size());
        for (size_t k = 0; k < results.size(); ++k) {
          const bool is_sharded =
              k < references_.size() && references_[k].defined();
          wholes.push_back(is_sharded
                               ? wrap(results[k].toTensor(), references_[k])
                               : results[k].toTensor());
        }
        value = std::move(wholes);
      }
    }
  }

  const c10::OperatorHandle& op_;
  const OperatorFacts& facts_;
  torch::jit::Stack& stack_;
  const size_t num_arguments_;
  // By place in a list, 0 for single tensors: the first sharded argument, if
  // there is one.
  c10::SmallVector<at::Tensor, 1> references_;
  // Pairs: a local tensor, and the sharded argument that it replaces.
  c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 4> originals_;
  c10::SmallVector<at::Tensor, 2> written_;
};

// ---- Random fills.

void draw(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const size_t num_arguments = op.schema().arguments().size();
  c10::IValue& value = stack[stack.size() - num_arguments];
  const at::Tensor sharded = value.toTensor();
  const Shard& shard = *shard_of(sharded);
  const at::NoGradGuard no_grad;
  const at::Tensor whole = at::empty_strided(sharded.sizes(), sharded.strides(),
                                             shard.local.options());
  value = whole;
  op.callBoxed(stack);
  shard.local.copy_(whole.as_strided({whole.numel()}, {1})
                        .narrow(0, shard.offset, shard.local.numel()));
  stack.back() = sharded;
  sharded.unsafeGetTensorImpl()->bump_version();
  if (shard.owner != nullptr) shard.owner->written(shard.unit);
}

// ---- Reductions.

using ReduceOp = ShardGroup::Op;

// One tensor's reduction over all of its elements.
struct Reduction {
  std::string_view name;
  double order = 2;  // of a norm
  std::optional<at::ScalarType> dtype = std::nullopt;
};

struct LocalValue {
  ReduceOp op;
  at::Tensor value;  // 0-dimensional, float64 or int64
  at::ScalarType dtype;
};

bool is_norm(std::string_view name) {
  return name == "norm" || name == "linalg_vector_norm" ||
         name == "_foreach_norm";
}

bool is_max(std::string_view name) {
  return name == "max" || name == "amax" || name == "_foreach_max";
}

// NaN if there is one.
at::Tensor extreme_of(const at::Tensor& local, bool takes_max) {
  const at::Tensor wide =
      local.to(local.is_floating_point() ? at::kDouble : at::kLong);
  if (wide.numel() > 0) return takes_max ? wide.max() : wide.min();
  if (wide.is_floating_point()) {
    return at::full({}, takes_max ? -INFINITY : INFINITY, wide.options());
  }
  return at::full({},
                  takes_max ? std::numeric_limits<int64_t>::min()
                            : std::numeric_limits<int64_t>::max(),
                  wide.options());
}

LocalValue norm_of(const Reduction& reduction, const at::Tensor& local) {
  const auto dtype =
      reduction.dtype.value_or(c10::toRealValueType(local.scalar_type()));
  const at::Tensor sizes = local.abs().to(at::kDouble);
  if (reduction.order == 0) {
    return {ReduceOp::kSum, sizes.ne(0).sum().to(at::kDouble), dtype};
  }
  if (!std::isinf(reduction.order)) {
    return {ReduceOp::kSum, sizes.pow(reduction.order).sum(), dtype};
  }
  if (reduction.order < 0) {
    return {ReduceOp::kMin, extreme_of(sizes, /*takes_max=*/false), dtype};
  }
  return {ReduceOp::kMax,
          sizes.numel() == 0 ? at::zeros({}, sizes.options()) : sizes.max(),
          dtype};
}

LocalValue reduce_locally(const Reduction& reduction, const at::Tensor& local) {
  const std::string_view name = reduction.name;
  if (is_norm(name)) return norm_of(reduction, local);
  if (is_max(name) || name == "min" || name == "amin") {
    return {is_max(name) ? ReduceOp::kMax : ReduceOp::kMin,
            extreme_of(local, is_max(name)), local.scalar_type()};
  }
  if (name == "any" || name == "all") {
    const bool is_any = name == "any";
    return {is_any ? ReduceOp::kMax : ReduceOp::kMin,
            (is_any ? local.any() : local.all()).to(at::kLong),
            local.scalar_type() == at::kByte ? at::kByte : at::kBool};
  }
  // sum and mean
  const bool is_floating = reduction.dtype
                               ? at::isFloatingType(*reduction.dtype)
                               : local.is_floating_point();
  return {
      ReduceOp::kSum, local.to(is_floating ? at::kDouble : at::kLong).sum(),
      reduction.dtype.value_or(is_floating ? local.scalar_type() : at::kLong)};
}

ShardGroup& group_of(const Shard& shard) {
  TORCH_CHECK(shard.group != nullptr, "fully_shard: ",
              shard.name.empty() ? "a sharded tensor" : "parameter '",
              shard.name, shard.name.empty() ? "" : "'",
              " is to be reduced over ranks before the first forward has "
              "connected them.\nDo so after it.");
  return *shard.group;
}

// All-reduces values of one operation and type as one tensor, in their place.
void all_reduce_together(ShardGroup& group, ReduceOp op,
                         const std::vector<at::Tensor*>& values) {
  for (const auto dtype : {at::kDouble, at::kLong}) {
    std::vector<at::Tensor*> of_type;
    std::vector<at::Tensor> flat;
    for (at::Tensor* value : values) {
      if (value->scalar_type() != dtype) continue;
      of_type.push_back(value);
      flat.push_back(value->reshape({1}));
    }
    if (flat.empty()) continue;
    at::Tensor together = at::cat(flat);
    group.all_reduce(together, op);
    for (size_t i = 0; i < of_type.size(); ++i) {
      *of_type[i] = together[static_cast<int64_t>(i)];
    }
  }
}

// The whole's value of each sharded tensor.
std::vector<at::Tensor> reduce_all(const Reduction& reduction,
                                   const std::vector<at::Tensor>& sharded) {
  std::vector<LocalValue> values;
  for (const at::Tensor& tensor : sharded) {
    values.push_back(reduce_locally(reduction, shard_of(tensor)->local));
  }
  std::vector<ShardGroup*> groups;  // in the order of their first tensor
  for (const at::Tensor& tensor : sharded) {
    ShardGroup* const group = &group_of(*shard_of(tensor));
    if (std::ranges::find(groups, group) == groups.end()) {
      groups.push_back(group);
    }
  }
  for (ShardGroup* const group : groups) {
    std::map<ReduceOp, std::vector<at::Tensor*>> by_op;
    for (size_t i = 0; i < sharded.size(); ++i) {
      if (shard_of(sharded[i])->group.get() != group) continue;
      by_op[values[i].op].push_back(&values[i].value);
    }
    for (const auto& [op, of_op] : by_op) {
      all_reduce_together(*group, op, of_op);
    }
  }
  std::vector<at::Tensor> results;
  for (size_t i = 0; i < sharded.size(); ++i) {
    at::Tensor result = values[i].value;
    if (is_norm(reduction.name) && std::isfinite(reduction.order) &&
        reduction.order != 0) {
      result = result.pow(1 / reduction.order);
    }
    if (reduction.name == "mean") {
      result = result / static_cast<double>(sharded[i].numel());
    }
    results.push_back(result.to(values[i].dtype));
  }
  return results;
}

c10::IValue argument_of(const c10::OperatorHandle& op,
                        const torch::jit::Stack& stack,
                        const std::string& name) {
  const auto place = op.schema().argumentIndexWithName(name);
  if (!place) return {};
  return stack[stack.size() - op.schema().arguments().size() + *place];
}

bool covers_all_dims(const c10::IValue& dims, int64_t num_dims) {
  if (dims.isNone()) return true;
  if (dims.isInt()) return num_dims == 1;
  const auto list = dims.toIntVector();
  return list.empty() || static_cast<int64_t>(list.size()) == num_dims;
}

void reduce(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const std::string_view name = base_name(op.schema());
  const size_t num_arguments = op.schema().arguments().size();
  const at::NoGradGuard no_grad;

  if (name.starts_with("_amp_foreach_")) {
    LocalCall call(op, facts_of(op), stack);
    call.check();
    const at::Tensor found_inf = argument_of(op, stack, "found_inf").toTensor();
    std::vector<std::shared_ptr<ShardGroup>> groups;
    visit_sharded(
        stack, num_arguments,
        [&](const at::Tensor&, const Shard& shard, size_t) {
          if (std::ranges::find(groups, shard.group) == groups.end()) {
            groups.push_back(shard.group);
          }
        });
    call.run();
    for (const auto& group : groups) {
      at::Tensor found = found_inf.reshape({1}).to(at::kDouble);
      group->all_reduce(found, ReduceOp::kMax);
      found_inf.copy_(found.reshape(found_inf.sizes()));
    }
    return;
  }

  if (name == "dot" || name == "equal") {
    const at::Tensor self = argument_of(op, stack, "self").toTensor();
    const at::Tensor other =
        argument_of(op, stack, name == "dot" ? "tensor" : "other").toTensor();
    if (shard_of(self) == nullptr || shard_of(other) == nullptr ||
        !hold_one_piece(self, other) || (name == "dot" && self.dim() != 1) ||
        self.scalar_type() != other.scalar_type()) {
      refuse(op, "both must be sharded alike.");
    }
    const Shard& shard = *shard_of(self);
    const at::Tensor& with = shard_of(other)->local;
    at::Tensor value =
        name == "dot"
            ? shard.local.to(at::kDouble).dot(with.to(at::kDouble)).reshape({1})
            : at::full({1}, shard.local.equal(with) ? 1 : 0, at::kLong);
    group_of(shard).all_reduce(value,
                               name == "dot" ? ReduceOp::kSum : ReduceOp::kMin);
    torch::jit::drop(stack, num_arguments);
    if (name == "dot") {
      stack.emplace_back(value[0].to(self.scalar_type()));
    } else {
      stack.emplace_back(value.item<int64_t>() == 1);
    }
    return;
  }

  Reduction reduction{.name = name};
  for (const char* order : {"ord", "p"}) {
    const c10::IValue value = argument_of(op, stack, order);
    if (value.isScalar()) reduction.order = value.toScalar().toDouble();
  }
  if (const auto dtype = argument_of(op, stack, "dtype"); !dtype.isNone()) {
    reduction.dtype = dtype.toScalarType();
  }
  if (name.starts_with("_foreach_")) {
    const auto tensors = argument_of(op, stack, "self").toTensorVector();
    std::vector<at::Tensor> sharded;
    for (const at::Tensor& tensor : tensors) {
      if (shard_of(tensor) != nullptr) sharded.push_back(tensor);
    }
    const auto reduced = reduce_all(reduction, sharded);
    c10::List<at::Tensor> results;
    size_t next = 0;
    for (const at::Tensor& tensor : tensors) {
      if (shard_of(tensor) != nullptr) {
        results.push_back(reduced[next++]);
      } else if (is_norm(name)) {
        results.push_back(at::linalg_vector_norm(
            tensor, reduction.order, std::nullopt, false, reduction.dtype));
      } else {
        results.push_back(tensor.max());
      }
    }
    torch::jit::drop(stack, num_arguments);
    stack.emplace_back(std::move(results));
    return;
  }

  const at::Tensor self = argument_of(op, stack, "self").toTensor();
  if (shard_of(self) == nullptr) refuse(op, "its first argument is plain.");
  if (!covers_all_dims(argument_of(op, stack, "dim"), self.dim())) {
    refuse(op, "over some dimensions of " + name_of(self) +
                   ". Call it inside of unsharded() (Python: "
                   "whole_parameters()), or on full_tensor().");
  }
  if (self.is_complex() && !is_norm(name)) {
    refuse(op, "of complex elements.");
  }
  if (self.numel() == 0 && !is_norm(name) && name != "sum") {
    refuse(op, "of no elements.");
  }
  const auto keeps = argument_of(op, stack, "keepdim");
  at::Tensor result = reduce_all(reduction, {self})[0];
  if (keeps.isBool() && keeps.toBool()) {
    result = result.reshape(
        std::vector<int64_t>(static_cast<size_t>(self.dim()), int64_t{1}));
  }
  torch::jit::drop(stack, num_arguments);
  stack.emplace_back(std::move(result));
}

void check_grad_mode(const c10::OperatorHandle& op,
                     const torch::jit::Stack& stack) {
  // Module::to() converts parameters in grad mode.
  const std::string_view name = base_name(op.schema());
  if (!at::GradMode::is_enabled() || name.ends_with("_like") ||
      name == "_to_copy" || kComparisons.contains(name)) {
    return;
  }
  visit_sharded(stack, op.schema().arguments().size(),
                [&](const at::Tensor& tensor, const Shard&, size_t) {
                  TORCH_CHECK(!tensor.requires_grad(),
                              toString(op.operator_name()), " of ",
                              name_of(tensor),
                              " outside of a forward is not recorded by "
                              "autograd. Call it under torch.no_grad(), or "
                              "inside of the model's forward.");
                });
}

// ---- Groups of one rank, whose piece is the whole.

bool are_whole(const torch::jit::Stack& stack, size_t num_arguments) {
  bool are_whole = true;
  visit_sharded(stack, num_arguments,
                [&](const at::Tensor&, const Shard& shard, size_t) {
                  are_whole &= shard.is_whole;
                });
  return are_whole;
}

// Runs the operator on the whole tensors. The results are plain.
void run_on_wholes(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  check_grad_mode(op, stack);
  const auto& arguments = op.schema().arguments();
  c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 4> originals;
  replace_tensors(
      stack, arguments.size(), [&](const at::Tensor& tensor, size_t argument) {
        const Shard* const shard = shard_of(tensor);
        if (shard == nullptr) return tensor;
        // Views of it may write to it later.
        if (shard->owner != nullptr) shard->owner->written(shard->unit);
        if (writes(arguments[argument]) && !tensor.is_inference()) {
          tensor.unsafeGetTensorImpl()->bump_version();
        }
        const at::Tensor whole = shard->local.as_strided(
            tensor.sizes(), tensor.strides(), shard->local.storage_offset());
        originals.push_back({whole, tensor});
        return whole;
      });
  const at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(stack);
  const size_t num_results = op.schema().returns().size();
  for (size_t i = stack.size() - num_results; i < stack.size(); ++i) {
    for (const auto& [whole, original] : originals) {
      if (stack[i].isTensor() && stack[i].toTensor().is_same(whole)) {
        stack[i] = original;
        break;
      }
    }
  }
}

// ---- The fallback.

// Whether all parameters among the arguments are unsharded for this call.
std::optional<ParameterState> use_parameters(const torch::jit::Stack& stack,
                                             size_t num_arguments) {
  c10::SmallVector<const Shard*, 4> left;
  visit_sharded(
      stack, num_arguments, [&](const at::Tensor&, const Shard& shard, size_t) {
        if (shard.owner != nullptr &&
            std::find(left.begin(), left.end(), &shard) == left.end()) {
          left.push_back(&shard);
        }
      });
  std::optional<ParameterState> state;
  while (!left.empty()) {
    ParameterOwner* const owner = left.front()->owner;
    const auto others = std::stable_partition(
        left.begin(), left.end(),
        [owner](const Shard* shard) { return shard->owner == owner; });
    const ParameterState of_owner =
        owner->use({left.data(), static_cast<size_t>(others - left.begin())});
    state = state ? std::min(*state, of_owner) : of_owner;
    left.erase(left.begin(), others);
  }
  return state;
}

void check_use_of_unsharded(const c10::OperatorHandle& op,
                            const torch::jit::Stack& stack,
                            ParameterState state) {
  const auto& arguments = op.schema().arguments();
  visit_sharded(
      stack, arguments.size(),
      [&](const at::Tensor& tensor, const Shard& shard, size_t argument) {
        if (shard.owner == nullptr) {
          refuse(op, name_of(tensor) +
                         " in a forward or backward: it belongs to "
                         "no unit. Use full_tensor() before.");
        }
        if (writes(arguments[argument]) &&
            state == ParameterState::kUnsharded) {
          refuse(op, "writes to " + name_of(tensor) +
                         " in a forward or backward, where it would "
                         "be lost. Write between them.");
        }
      });
}

void on_sharded(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                torch::jit::Stack* stack) {
  const size_t num_arguments = op.schema().arguments().size();
  const auto state = use_parameters(*stack, num_arguments);
  if (state && *state != ParameterState::kSharded) {
    check_use_of_unsharded(op, *stack, *state);
    const c10::impl::ExcludeDispatchKeyGuard no_key(kShardedKey);
    op.callBoxed(*stack);
    return;
  }
  switch (facts_of(op).rule) {
    case OperatorRule::kHandle: {
      const c10::impl::ExcludeDispatchKeyGuard no_key(kShardedKey);
      op.callBoxed(*stack);
      return;
    }
    case OperatorRule::kDecompose:
      op.redispatchBoxed(
          keys &
              c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kShardedKey),
          stack);
      return;
    case OperatorRule::kLocal: {
      check_grad_mode(op, *stack);
      LocalCall call(op, facts_of(op), *stack);
      try {
        call.check();
      } catch (const c10::NotImplementedError&) {
        if (!are_whole(*stack, num_arguments)) throw;
        return run_on_wholes(op, *stack);
      }
      call.run();
      return;
    }
    case OperatorRule::kDraw:
      check_grad_mode(op, *stack);
      draw(op, *stack);
      return;
    case OperatorRule::kReduce:
      // torch's own sums, for the same bits as without sharding.
      if (are_whole(*stack, num_arguments)) return run_on_wholes(op, *stack);
      check_grad_mode(op, *stack);
      reduce(op, *stack);
      return;
    case OperatorRule::kRefused:
      break;
  }
  if (are_whole(*stack, num_arguments)) return run_on_wholes(op, *stack);
  at::Tensor of;  // a parameter, if there is one
  visit_sharded(*stack, num_arguments,
                [&](const at::Tensor& tensor, const Shard& shard, size_t) {
                  if (!of.defined() || !shard.name.empty()) of = tensor;
                });
  refuse(op, "needs the whole of " + name_of(of) +
                 ", of which this rank holds a piece. Call it inside of the "
                 "model's forward or of unsharded() (Python: "
                 "whole_parameters()), or on full_tensor().");
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_sharded>());
}

}  // namespace

OperatorRule operator_rule(const c10::OperatorHandle& op) {
  return facts_of(op).rule;
}

}  // namespace brigade
