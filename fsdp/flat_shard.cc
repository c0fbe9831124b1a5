#include "brigade/fsdp/flat_shard.h"

#include <ATen/ATen.h>
#include <ATen/ceil_div.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/errors/error_texts.h"

namespace brigade {
namespace {

// ---- Layout.

// Returns the least offset of `parameter` from `begin` on; nullopt if its
// blocks do not fit into shards of this length.
std::optional<int64_t> first_offset(const ShardSpec& parameter, int64_t begin,
                                    int64_t shard_numel) {
  if (parameter.numel == 0) return begin;
  const int64_t cut = (begin / shard_numel + 1) * shard_numel;
  // Tries the rest of this shard, then the next shard. A later start in the
  // same shard only moves more elements past the cut.
  for (const auto& [room, end] : {std::pair(cut - begin, cut),
                                  std::pair(shard_numel, cut + shard_numel)}) {
    if (parameter.numel <= room) return end - room;
    const int64_t head = room - room % parameter.block_numel;
    const bool one_cut = parameter.numel - head <= shard_numel;
    if (head > 0 && (one_cut || shard_numel % parameter.block_numel == 0)) {
      return end - head;
    }
  }
  return std::nullopt;
}

// Returns the offsets of the parameters in the unsharded buffer; nullopt if
// they do not fit. The greedy choice is optimal: the earlier a parameter ends,
// the earlier the next one may start.
std::optional<std::vector<int64_t>> place_parameters(
    std::span<const ShardSpec> parameters, int64_t num_ranks,
    int64_t shard_numel) {
  std::vector<int64_t> offsets;
  offsets.reserve(parameters.size());
  int64_t end = 0;
  for (const ShardSpec& parameter : parameters) {
    const auto offset = first_offset(parameter, end, shard_numel);
    if (!offset) return std::nullopt;
    offsets.push_back(*offset);
    end = *offset + parameter.numel;
  }
  if (at::ceil_div(end, shard_numel) > num_ranks) return std::nullopt;
  return offsets;
}

int64_t total_numel(std::span<const ShardSpec> parameters) {
  int64_t total = 0;
  for (const ShardSpec& parameter : parameters) total += parameter.numel;
  return total;
}

// Returns a shard length that fits the parameters, a multiple of `multiple`.
// Fitting is not monotonic in the length, so bisection may miss a shorter one.
int64_t least_multiple(std::span<const ShardSpec> parameters, int64_t num_ranks,
                       int64_t multiple) {
  const int64_t total = std::max<int64_t>(total_numel(parameters), 1);
  int64_t low = at::ceil_div(at::ceil_div<int64_t>(total, num_ranks), multiple);
  int64_t high = at::ceil_div(total, multiple);  // all on one rank
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (place_parameters(parameters, num_ranks, middle * multiple)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return high * multiple;
}

// Returns the shortest shard length over all k for which it is a multiple of
// the blocks of the k longest parameters. Shorter parameters are cut at most
// once, so their blocks need not divide it.
int64_t choose_shard_numel(std::span<const ShardSpec> parameters,
                           int64_t num_ranks) {
  int64_t found = least_multiple(parameters, num_ranks, 1);
  std::vector<ShardSpec> longest(parameters.begin(), parameters.end());
  std::ranges::sort(longest, std::ranges::greater(), &ShardSpec::numel);
  int64_t multiple = 1;
  for (const ShardSpec& parameter : longest) {
    const int64_t block = std::min(parameter.block_numel, parameter.numel);
    if (block == 0 || multiple % block == 0) continue;
    const int64_t factor = block / std::gcd(block, multiple);
    if (factor > found / multiple) break;
    multiple *= factor;
    found = std::min(found, least_multiple(parameters, num_ranks, multiple));
  }
  return found;
}

// ---- Memory.

// Alignment of the flat parameters in a unit's buffer, in bytes.
constexpr int64_t kAlignment = 64;
// Up to this size memcpy() is faster than a call of torch's dispatcher.
constexpr size_t kMaxMemcpyBytes = 32768;

ShardLayout layout_of(const std::vector<UnitParameter>& parameters,
                      int num_ranks) {
  std::vector<ShardSpec> specs;
  for (const UnitParameter& parameter : parameters) {
    specs.push_back({.numel = parameter.tensor.numel(),
                     .block_numel = parameter.block_numel});
  }
  return ShardLayout(std::move(specs), num_ranks);
}

// Bypasses the dispatcher for speed: each step makes one view per parameter.
at::Tensor view_of(const at::Tensor& flat, caffe2::TypeMeta dtype,
                   int64_t offset, int64_t numel) {
  const auto from = static_cast<int64_t>(flat.itemsize());
  const auto to = static_cast<int64_t>(dtype.itemsize());
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(flat.storage()),
                                                   flat.key_set(), dtype);
  impl->set_storage_offset(flat.storage_offset() * from / to + offset);
  impl->set_sizes_contiguous({numel});
  return at::Tensor(std::move(impl));
}

// REQUIRES: equal sizes.
void copy_elements(const at::Tensor& from, const at::Tensor& to) {
  if (from.device().is_cpu() && from.scalar_type() == to.scalar_type() &&
      from.layout() == at::kStrided && from.strides() == to.strides() &&
      !from.is_conj() && !from.is_neg() && from.nbytes() <= kMaxMemcpyBytes) {
    std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
  } else {
    to.copy_(from);
  }
}

at::Tensor as_elements(const at::Tensor& bytes, at::ScalarType dtype,
                       int64_t numel) {
  return view_of(bytes, c10::scalarTypeToTypeMeta(dtype), 0, numel);
}

}  // namespace

ShardLayout::ShardLayout(std::vector<ShardSpec> parameters, int64_t num_ranks)
    : parameters_(std::move(parameters)),
      num_ranks_(num_ranks),
      shard_numel_(choose_shard_numel(parameters_, num_ranks)),
      offsets_(place_parameters(parameters_, num_ranks, shard_numel_).value()) {
}

int64_t ShardLayout::padding_numel() const {
  return whole_numel() - total_numel(parameters_);
}

ShardRange ShardLayout::range(size_t parameter, int64_t rank) const {
  const int64_t offset = offsets_[parameter];
  const int64_t shard_begin = rank * shard_numel_;
  const int64_t begin = std::max(offset, shard_begin);
  const int64_t end = std::min(offset + parameters_[parameter].numel,
                               shard_begin + shard_numel_);
  if (begin >= end) return {};
  return {.in_parameter = begin - offset,
          .in_shard = begin - shard_begin,
          .numel = end - begin};
}

FlatShard::FlatShard(std::vector<UnitParameter> parameters, Context context)
    : parameters_(std::move(parameters)),
      context_(std::move(context)),
      layout_(layout_of(parameters_, context_.num_ranks)),
      shard_uses_(parameters_.front().tensor.device()),
      slots_(parameters_.size(), Slot::kEmpty),
      writers_(parameters_.front().tensor.device()) {
  register_shard_operators();
  const at::NoGradGuard no_grad;
  shard_ = at::zeros({layout_.shard_numel()},
                     parameters_.front().tensor.detach().options());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& tensor = parameters_[i].tensor;
    const ShardRange range = layout_.range(i, context_.rank);
    piece_of(shard_, i).copy_(tensor.detach()
                                  .as_strided({tensor.numel()}, {1})
                                  .narrow(0, range.in_parameter, range.numel));
    record_use(tensor.detach());
    shard_in_place(tensor, make_piece(i));
  }
}

FlatShard::~FlatShard() {
  if (whole_.defined()) unbind();
  shard_uses_.record_on(shard_);
  for (const UnitParameter& parameter : parameters_) {
    Shard* const shard = shard_of(parameter.tensor);
    if (shard != nullptr && shard->owner == context_.owner) {
      shard->owner = nullptr;
    }
  }
}

bool FlatShard::is_trained() const {
  return std::ranges::any_of(parameters_, [](const UnitParameter& parameter) {
    return parameter.tensor.requires_grad();
  });
}

void FlatShard::rename(size_t parameter, std::string name) {
  parameters_[parameter].name = std::move(name);
  Shard* const shard = shard_of(parameters_[parameter].tensor);
  if (shard == nullptr) return;  // adopt_pieces() throws later
  shard->name = parameters_[parameter].name;
  unbind(parameters_[parameter]);
}

void FlatShard::belong_to(ParameterOwner* owner,
                          std::shared_ptr<ShardGroup> group, size_t unit,
                          size_t first_number) {
  adopt_pieces();
  context_.owner = owner;
  context_.group = std::move(group);
  context_.unit = unit;
  context_.first_number = first_number;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    *shard_of(parameters_[i].tensor) = make_piece(i);
  }
}

Shard FlatShard::make_piece(size_t parameter) const {
  return {.local = piece_of(shard_, parameter),
          .offset = layout_.range(parameter, context_.rank).in_parameter,
          .group = context_.group,
          .flat_offset = layout_.offset(parameter),
          .flat_per_rank = layout_.shard_numel(),
          .is_whole = context_.num_ranks == 1,
          .owner = context_.owner,
          .unit = context_.unit,
          .number = context_.first_number + parameter,
          .name = parameters_[parameter].name};
}

at::Tensor FlatShard::piece_of(const at::Tensor& flat, size_t parameter) const {
  const ShardRange range = layout_.range(parameter, context_.rank);
  return view_of(flat, flat.dtype(), range.in_shard, range.numel);
}

at::Tensor FlatShard::slot_of(const at::Tensor& whole, size_t parameter) const {
  const at::Tensor& tensor = parameters_[parameter].tensor;
  at::Tensor slot =
      view_of(whole, whole.dtype(), layout_.offset(parameter), tensor.numel());
  slot.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(),
                                                    tensor.strides());
  return slot;
}

void FlatShard::show_compute_dtype(bool value) {
  if (context_.compute_dtype == dtype()) return;
  shows_compute_dtype_ = value;
  for (const UnitParameter& parameter : parameters_) unbind(parameter);
}

void FlatShard::unbind(const UnitParameter& parameter) const {
  if (whole_.defined() || shard_of(parameter.tensor) == nullptr) return;
  unbind_memory(parameter.tensor,
                shows_compute_dtype_
                    ? c10::scalarTypeToTypeMeta(context_.compute_dtype)
                    : shard_.dtype());
}

bool FlatShard::is_own(const Shard& shard) const {
  return shard.owner == context_.owner &&
         shard.local.storage().unsafeGetStorageImpl() ==
             shard_.storage().unsafeGetStorageImpl();
}

// Throws if parameters swapped data, after restoring their own.
void FlatShard::refuse_exchanged() {
  std::vector<std::string> names;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& tensor = parameters_[i].tensor;
    const Shard* const shard = shard_of(tensor);
    if (shard == nullptr || context_.owner == nullptr ||
        shard->owner != context_.owner ||
        shard->number == context_.first_number + i) {
      continue;
    }
    names.push_back(absl::StrCat("'", parameters_[i].name, "'"));
    replace_shard(tensor, make_piece(i));
    if (whole_.defined()) bind_parameter(i);
    unbind(parameters_[i]);
  }
  TORCH_CHECK(names.empty(), "fully_shard: ", absl::StrJoin(names, ", "),
              " got another parameter's memory, for example through `.data =`; "
              "the assignment was undone.\nCopy the values: a.copy_(b).");
}

bool FlatShard::adopt_pieces() {
  note_use();
  refuse_exchanged();
  bool is_other = false;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& tensor = parameters_[i].tensor;
    const Shard* const shard = shard_of(tensor);
    if (shard == nullptr) {
      if (fits(i)) shard_in_place(tensor, make_piece(i));
      TORCH_CHECK(false, "fully_shard: parameter '", parameters_[i].name,
                  "' was given a plain tensor; its values were ignored.\n"
                  "Assign inside unsharded() (Python: "
                  "whole_parameters(writes=True)), or use load_state_dict().");
    }
    is_other |= !is_own(*shard);
  }
  if (!is_other) return false;
  const at::NoGradGuard no_grad;
  const at::Tensor first = shard_of(parameters_.front().tensor)->local;
  const bool is_converted = first.scalar_type() != shard_.scalar_type() ||
                            first.device() != shard_.device();
  for (const UnitParameter& parameter : parameters_) {
    const at::Tensor& local = shard_of(parameter.tensor)->local;
    TORCH_CHECK(local.scalar_type() == first.scalar_type() &&
                    local.device() == first.device(),
                "fully_shard: parameter '", parameter.name, "' is ",
                local.scalar_type(), " on ", local.device(),
                " now, others of its unit are ", first.scalar_type(), " on ",
                first.device(), ".\nConvert the whole module at once.");
  }
  if (is_converted) {
    TORCH_CHECK(!has_gradients() && !has_sum() && !has_partial_sum(),
                "fully_shard: parameter '", parameters_.front().name,
                "' was converted to another dtype or device, but holds "
                "gradients of backwards without synchronization.\nReduce them "
                "first, by a backward with synchronization.");
    if (context_.compute_dtype == shard_.scalar_type()) {
      context_.compute_dtype = first.scalar_type();
    }
    if (context_.reduce_dtype == shard_.scalar_type()) {
      context_.reduce_dtype = first.scalar_type();
    }
    shard_uses_.record_on(shard_);
    shard_ = at::zeros({layout_.shard_numel()}, first.options());
    shard_uses_ = StreamUses(shard_.device());
    writers_ = StreamUses(shard_.device());
    delivered_ = {};
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Shard& shard = *shard_of(parameters_[i].tensor);
    const Shard own = make_piece(i);
    if (is_converted || !is_own(shard)) {
      if (!own.local.is_meta()) own.local.copy_(shard.local);
      shard = own;
      unbind(parameters_[i]);
    }
  }
  return is_converted;
}

int64_t FlatShard::whole_bytes() const {
  if (is_whole_here()) return 0;
  return at::round_up(
      layout_.whole_numel() *
          static_cast<int64_t>(c10::elementSize(context_.compute_dtype)),
      kAlignment);
}

int64_t FlatShard::gradient_bytes() const {
  return at::round_up(
      layout_.whole_numel() *
          static_cast<int64_t>(c10::elementSize(context_.reduce_dtype)),
      kAlignment);
}

at::Tensor FlatShard::whole_in(const at::Tensor& bytes) const {
  if (is_whole_here()) return shard_;
  return as_elements(bytes, context_.compute_dtype, layout_.whole_numel());
}

void FlatShard::write_own_slice(const at::Tensor& whole) {
  if (is_whole_here()) return;
  note_use();
  const at::NoGradGuard no_grad;
  whole.narrow(0, context_.rank * shard_.numel(), shard_.numel()).copy_(shard_);
}

void FlatShard::bind(const at::Tensor& whole) {
  whole_ = whole;
  for (size_t i = 0; i < parameters_.size(); ++i) bind_parameter(i);
}

void FlatShard::bind_parameter(size_t parameter) const {
  bind_memory(
      parameters_[parameter].tensor,
      static_cast<char*>(whole_.mutable_data_ptr()) +
          layout_.offset(parameter) * static_cast<int64_t>(whole_.itemsize()),
      whole_.dtype());
}

void FlatShard::unbind() {
  whole_.reset();
  for (const UnitParameter& parameter : parameters_) unbind(parameter);
}

bool FlatShard::fits(size_t parameter) const {
  const at::Tensor& tensor = parameters_[parameter].tensor;
  return tensor.numel() == layout_.parameters()[parameter].numel &&
         tensor.scalar_type() == dtype() && tensor.device() == device() &&
         tensor.is_non_overlapping_and_dense();
}

void FlatShard::read_own_slice() {
  refuse_exchanged();
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& tensor = parameters_[i].tensor;
    if (shard_of(tensor) != nullptr) continue;
    TORCH_CHECK_VALUE(fits(i), "fully_shard: parameter '", parameters_[i].name,
                      "' was given a tensor of sizes ", tensor.sizes(), ", ",
                      tensor.scalar_type(), " on ", tensor.device(),
                      ".\nAssign a dense one of ",
                      layout_.parameters()[i].numel, " elements, ", dtype(),
                      " on ", device(), ".");
    slot_of(whole_, i).copy_(tensor.detach());
    shard_in_place(tensor, make_piece(i));
  }
  if (is_whole_here()) return;
  const at::Tensor own =
      whole_.narrow(0, context_.rank * shard_.numel(), shard_.numel());
  // Unchanged elements keep the precision of the shard.
  if (own.scalar_type() == dtype()) {
    shard_.copy_(own);
  } else {
    const at::Tensor rounded = shard_.to(own.scalar_type());
    const at::Tensor is_same =
        rounded.eq(own).logical_or(rounded.isnan().logical_and(own.isnan()));
    if (!has_warned_ && !is_same.all().item<bool>()) {
      has_warned_ = true;
      TORCH_WARN("fully_shard: writes to parameter '", parameters_[0].name,
                 "' or others of its unit were made in ",
                 describe_dtype(own.scalar_type()),
                 ", their param_dtype, and more digits are lost.\nWrite before "
                 "fully_shard() or load a "
                 "checkpoint to keep ",
                 describe_dtype(dtype()), ".");
    }
    shard_.copy_(at::where(is_same, shard_, own.to(dtype())));
  }
}

void FlatShard::set_gradients(at::Tensor bytes, StreamPoint last_use) {
  gradients_ = as_elements(bytes, context_.reduce_dtype, layout_.whole_numel());
  std::ranges::fill(slots_, Slot::kEmpty);
  last_use_ = std::move(last_use);
  writers_.forget();
}

void FlatShard::begin_write() {
  if (writers_.add_current()) last_use_.wait();
}

void FlatShard::accumulate(size_t parameter, const at::Tensor& gradient) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      gradient.layout() == at::kStrided, "fully_shard: expected a dense ",
      "gradient of parameter '", parameters_[parameter].name,
      "', found a sparse one.\nMake the embedding with sparse=false.");
  const at::NoGradGuard no_grad;
  const at::Tensor slot = slot_of(gradients_, parameter);
  const Slot before = std::exchange(slots_[parameter], Slot::kWritten);
  const bool is_in_place = before == Slot::kLent &&
                           gradient.const_data_ptr() == slot.const_data_ptr() &&
                           gradient.strides() == slot.strides();
  begin_write();
  if (before != Slot::kEmpty) writers_.wait();
  if (before == Slot::kWritten) {
    slot.add_(gradient);
  } else if (!is_in_place) {
    copy_elements(gradient, slot);
  }
}

at::Tensor FlatShard::gradient_slot(size_t parameter) {
  if (slots_[parameter] != Slot::kEmpty) return {};
  slots_[parameter] = Slot::kLent;
  begin_write();
  return slot_of(gradients_, parameter);
}

at::Tensor FlatShard::take_gradients() {
  const at::NoGradGuard no_grad;
  writers_.wait();
  int64_t end = 0;  // all elements before it are written
  const auto zero_to = [&](int64_t begin) {
    if (begin <= end) return;
    begin_write();
    gradients_.narrow(0, end, begin - end).zero_();
  };
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (slots_[i] != Slot::kWritten) continue;
    zero_to(layout_.offset(i));
    end = layout_.offset(i) + parameters_[i].tensor.numel();
  }
  zero_to(gradients_.numel());
  return std::exchange(gradients_, {});
}

void FlatShard::drop_gradients() {
  if (!gradients_.defined()) return;
  begin_write();
  writers_.wait();
  gradients_.reset();
}

// On the CPU, reuses the last step's gradients unless someone else holds them.
at::Tensor FlatShard::make_sum() {
  const auto is_free = [](const at::Tensor& gradient) {
    return gradient.use_count() == 1 && gradient.storage().use_count() == 1;
  };
  if (delivered_.sum.defined() && !delivered_.is_lent &&
      shard_.device().is_cpu() &&
      delivered_.sum.scalar_type() == context_.reduce_dtype &&
      std::ranges::all_of(delivered_.gradients, is_free)) {
    delivered_.is_lent = true;
    return delivered_.sum;
  }
  return at::empty({layout_.shard_numel()},
                   shard_.options().dtype(context_.reduce_dtype));
}

void FlatShard::add_sum(const at::Tensor& sum) {
  const at::NoGradGuard no_grad;
  if (sum_.defined()) {
    sum_.add_(sum);
  } else {
    sum_ = sum;
  }
}

void FlatShard::drop_sum() {
  sum_.reset();
  delivered_ = {};  // a failed collective may still write to it
}

at::Tensor FlatShard::take_partial_sum() {
  std::exchange(partial_sum_made_, {}).wait();
  if (partial_sum_.defined()) record_use(partial_sum_);
  return std::exchange(partial_sum_, {});
}

void FlatShard::keep_partial_sum() {
  const at::NoGradGuard no_grad;
  delivered_ = {};
  if (partial_sum_.defined()) {
    partial_sum_made_.wait();
    partial_sum_.add_(sum_);
    record_use(partial_sum_);
  } else {
    partial_sum_ = sum_;
  }
  partial_sum_made_ = StreamPoint::now(device());
  sum_.reset();
}

void FlatShard::drop_partial_sum() {
  partial_sum_.reset();
  partial_sum_made_ = {};
}

void FlatShard::deliver(std::span<const char> used, double scale) {
  const at::NoGradGuard no_grad;
  at::Tensor sum = std::exchange(sum_, {});
  if (scale != 1) sum.mul_(scale);
  if (sum.scalar_type() != dtype()) sum = sum.to(dtype());
  if (delivered_.sum.is_same(sum)) {
    delivered_.is_lent = false;
  } else {
    delivered_ = {.sum = sum};
    for (size_t i = 0; i < parameters_.size(); ++i) {
      delivered_.gradients.push_back(
          make_sharded_like(parameters_[i].tensor, piece_of(sum, i)));
    }
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (used[i] == 0) continue;
    at::Tensor& gradient = parameters_[i].tensor.mutable_grad();
    if (!gradient.defined()) {
      gradient = delivered_.gradients[i];
      continue;
    }
    Shard* const shard = shard_of(gradient);
    TORCH_CHECK(shard != nullptr, "fully_shard: the gradient of parameter '",
                parameters_[i].name,
                "' is a plain tensor.\nSet it to None before backward.");
    shard->local.add_(shard_of(delivered_.gradients[i])->local);
    gradient.unsafeGetTensorImpl()->bump_version();
  }
  if (!shard_.device().is_cpu()) delivered_ = {};
}

}  // namespace brigade
