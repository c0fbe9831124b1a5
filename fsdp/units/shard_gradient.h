// The gradient of a shard: memory that sums over ranks are written to, and what
// becomes of them when the iteration has ended well.
//
// A sum becomes the gradient as it is, where parameters have none yet and are
// of the dtype in which gradients are summed: it is copied only into another
// dtype, and added to gradients that are there.
//
// On devices with streams the memory of a sum belongs to the stream on which it
// was prepared, as a rule that of the program, on which gradients are set to
// None: an allocator may lend it again at once.
//
// Thread safety: none; one backward at a time.

#ifndef BRIGADE_FSDP_UNITS_SHARD_GRADIENT_H_
#define BRIGADE_FSDP_UNITS_SHARD_GRADIENT_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "brigade/fsdp/streams/stream_point.h"

namespace brigade {

class ShardGradient {
 public:
  // Of a flat tensor that is laid out as the shard: a parameter's elements.
  using ViewOf =
      std::function<at::Tensor(const at::Tensor& flat, size_t parameter)>;

  // `shard`: [S]. `sum_dtype`: in which gradients are summed. REQUIRES: the
  // shard outlives this object.
  ShardGradient(const at::Tensor& shard, at::ScalarType sum_dtype,
                ViewOf view_of)
      : shard_(shard), sum_dtype_(sum_dtype), view_of_(std::move(view_of)) {}
  ~ShardGradient();
  ShardGradient(const ShardGradient&) = delete;
  ShardGradient& operator=(const ShardGradient&) = delete;

  // There is memory for a sum. Returns whether it is new: it belongs to the
  // current stream then, and is free for no other yet.
  bool prepare();
  // [S] of the sums' dtype: where a sum is to be written. The current stream is
  // behind who had used it as such. REQUIRES: prepare().
  const at::Tensor& pending();
  // A sum may be written there for ever: goes on with other memory.
  at::Tensor abandon_pending();

  // The pending sum, times `scale`, becomes the gradient of the shards, or is
  // added to it; of those only that are `used`. REQUIRES: the current stream is
  // behind the sum.
  void commit(std::span<at::Tensor> shards, const std::vector<char>& used,
              double scale);

  // The pending sum, of a row of ranks only, is added to what was kept before,
  // until it is dropped. REQUIRES: as commit().
  void keep_partial();
  void drop_partial() { has_partial_ = false; }
  // What is kept of one parameter is zeros from here on.
  void zero_partial(size_t parameter);
  // [S] of the sums' dtype, on the stream of pending(); undefined: nothing is
  // kept.
  at::Tensor partial() const {
    return has_partial_ ? partial_.flat : at::Tensor();
  }
  bool has_partial() const { return has_partial_; }

 private:
  struct Memory {
    at::Tensor flat = {};                             // [S]
    std::vector<at::Tensor> views = {};               // once they are needed
    std::optional<c10::Stream> owner = std::nullopt;  // none on the CPU
  };

  static bool is_held(Memory& memory);
  Memory take_free(at::ScalarType dtype);
  void make_views(Memory& memory, size_t count) const;
  void note_use();

  const at::Tensor& shard_;
  const at::ScalarType sum_dtype_;
  const ViewOf view_of_;

  Memory pending_;
  StreamPoint last_use_;  // of it, by whoever had it before
  Memory partial_;
  bool has_partial_ = false;
  Memory given_;  // on the CPU: that gradients lie in, or have lain in
  // On devices: on which a sum was written last, and was used.
  std::optional<c10::Stream> writer_;
  std::optional<c10::Stream> user_;
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_UNITS_SHARD_GRADIENT_H_
