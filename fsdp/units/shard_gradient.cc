#include "brigade/fsdp/units/shard_gradient.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "brigade/comm/streams/stream_join.h"

namespace brigade {

// The owner need not be behind who has written and used it.
ShardGradient::~ShardGradient() {
  for (const Memory* memory : {&pending_, &partial_}) {
    if (!memory->flat.defined()) continue;
    for (const auto& stream : {writer_, user_}) {
      if (stream) memory->flat.record_stream(*stream);
    }
  }
}

bool ShardGradient::prepare() {
  if (pending_.flat.defined()) return false;
  const at::NoGradGuard no_grad;
  pending_ = take_free(sum_dtype_);
  return true;
}

const at::Tensor& ShardGradient::pending() {
  std::exchange(last_use_, StreamPoint()).wait();
  if (!shard_.device().is_cpu()) writer_ = current_stream(shard_.device());
  return pending_.flat;
}

at::Tensor ShardGradient::abandon_pending() {
  partial_ = {};  // may be read for ever
  has_partial_ = false;
  return std::exchange(pending_, {}).flat;
}

// Whether anybody else holds a part of it. From Python a view that has been
// seen is held by its wrapper, which may go with it.
bool ShardGradient::is_held(Memory& memory) {
  const auto is_shared = [](const at::Tensor& view) {
    return view.use_count() > 1;
  };
  const size_t num_own = 1 + memory.views.size();
  if (std::ranges::none_of(memory.views, is_shared) &&
      memory.flat.storage().use_count() == num_own) {
    return false;
  }
  memory.views.clear();
  return memory.flat.storage().use_count() > 1;
}

// A gradient that was set to None, and is not kept elsewhere, is not read any
// more. But a stream may still read it, which only an allocator is told of:
// there it is new memory.
ShardGradient::Memory ShardGradient::take_free(at::ScalarType dtype) {
  if (given_.flat.defined() && given_.flat.scalar_type() == dtype &&
      !is_held(given_)) {
    return std::exchange(given_, {});
  }
  Memory made = {.flat =
                     at::empty(shard_.sizes(), shard_.options().dtype(dtype))};
  if (!shard_.device().is_cpu()) made.owner = current_stream(shard_.device());
  return made;
}

// The current stream uses what is pending or kept.
void ShardGradient::note_use() {
  if (!shard_.device().is_cpu()) user_ = current_stream(shard_.device());
  last_use_ = StreamPoint::now(shard_.device());
}

void ShardGradient::make_views(Memory& memory, size_t count) const {
  if (!memory.views.empty()) return;
  const at::AutoDispatchBelowADInplaceOrView no_view_tracking;
  for (size_t i = 0; i < count; ++i) {
    memory.views.push_back(view_of_(memory.flat, i));
  }
}

void ShardGradient::commit(std::span<at::Tensor> shards,
                           const std::vector<char>& used, double scale) {
  const at::NoGradGuard no_grad;
  if (scale != 1) pending_.flat.mul_(scale);
  bool is_new = false;
  for (size_t i = 0; i < shards.size(); ++i) {
    if (!used[i]) continue;
    if (shards[i].grad().defined()) {
      shards[i].mutable_grad().add_(view_of_(pending_.flat, i));
    } else {
      is_new = true;
    }
  }
  if (!is_new) return note_use();
  Memory gradient;
  if (sum_dtype_ == shard_.scalar_type()) {
    gradient = std::exchange(pending_, {});
    const auto owner = gradient.owner;
    if (owner && *owner != current_stream(owner->device())) {
      gradient.flat.record_stream(current_stream(owner->device()));
    }
  } else {
    gradient = take_free(shard_.scalar_type());
    gradient.flat.copy_(pending_.flat);
    note_use();
  }
  make_views(gradient, shards.size());
  for (size_t i = 0; i < shards.size(); ++i) {
    if (used[i] && !shards[i].grad().defined()) {
      shards[i].mutable_grad() = gradient.views[i];
    }
  }
  if (shard_.device().is_cpu()) given_ = std::move(gradient);
}

void ShardGradient::keep_partial() {
  const at::NoGradGuard no_grad;
  if (has_partial_) pending_.flat.add_(partial_.flat);
  std::swap(partial_, pending_);
  has_partial_ = true;
  note_use();
}

void ShardGradient::zero_partial(size_t parameter) {
  if (!has_partial_) return;
  const at::NoGradGuard no_grad;
  std::exchange(last_use_, StreamPoint()).wait();
  view_of_(partial_.flat, parameter).zero_();
  note_use();
}

}  // namespace brigade
