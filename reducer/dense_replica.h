// One flat buffer for the dense gradients of a bucket, and the views into it.
//
// Views in: where gradients are packed to. They have the parameters' shapes and
// strides, are made once per buffer, when they are needed, and in view mode are
// the gradients. Views out: where results are read from; the same memory unless
// a comm hook returned another tensor.

#ifndef BRIGADE_REDUCER_DENSE_REPLICA_H_
#define BRIGADE_REDUCER_DENSE_REPLICA_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "brigade/engine/packer.h"
#include "brigade/reducer/bucket_replica.h"
#include "brigade/reducer/buffer_donation.h"
#include "brigade/reducer/dims_list.h"
#include "brigade/reducer/parameter_table.h"

namespace brigade {

class DenseReplica final : public BucketReplica {
 public:
  // How results become gradients.
  enum class Delivery {
    kViews,           // gradients are views of the buffer
    kCopies,          // the buffer is copied into gradients
    kDonationOrCopy,  // gradients may get the buffer's memory, or copies
  };

  // Since when there is a buffer.
  enum class Allocation {
    kAtConstruction,
    kInPack,  // the first one, and each after release_memory()
  };

  // REQUIRES: `parameters` index into `table`, are of one dtype and device, and
  // `table` outlives this object. With kDonationOrCopy, nobody who is given
  // buffer() writes to it after the collective.
  DenseReplica(const ParameterTable& table, size_t replica,
               std::span<const size_t> parameters, at::ScalarType wire_dtype,
               Delivery delivery, Allocation allocation);

  int64_t pack(double scale, std::span<const size_t> unused_slots) override;
  const at::Tensor& buffer() const override { return wire_; }
  void record_stream(c10::Stream stream) const override;
  void add(const at::Tensor& buffer) override;
  void check_result(const at::Tensor& result) const override;
  int64_t deliver(const at::Tensor& result,
                  std::span<const size_t> globally_unused_slots) override;
  void deliver_nothing(std::span<const size_t> globally_unused_slots) override;
  void adopt_gradients() override;
  void release_memory() override;
  at::Tensor zeros() const override;
  const at::Tensor& views() const override {
    return gradients_as_views_ ? flat_ : no_views_;
  }
  bool is_view_in(size_t slot, const at::Tensor& gradient) const override;

  // Units: elements.
  std::span<const SlotRange> ranges() const { return ranges_; }

 private:
  void allocate();
  void use_buffers_here();
  void note_packing_stream();
  void record_delivery(const at::Tensor& tensor) const;
  void set_unused(std::span<const size_t> slots);
  at::Tensor make_view(size_t slot) const;
  int64_t numel() const;
  void leave_memory_to_gradients();
  void note_memory();
  void repair_buffers();
  const at::Tensor& view_in(size_t slot);
  void install_view(size_t slot);
  void put_back(std::span<const size_t> globally_unused_slots);
  const void* source_of(size_t slot, const at::Tensor& gradient);
  int64_t deliver_views(const at::Tensor& result,
                        std::span<const size_t> globally_unused_slots);
  int64_t deliver_copies(const at::Tensor& result,
                         std::span<const size_t> globally_unused_slots);
  at::Tensor view_out(size_t slot, const at::Tensor& result) const;
  const at::Tensor& parameter(size_t slot) const;
  bool is_laid_out_as_gradient(size_t slot, const at::Tensor& tensor) const;
  at::IntArrayRef shape(size_t slot) const;
  at::Tensor empty_gradient(size_t slot) const;
  bool lies_in_buffer(const void* elements) const;

  // Constant after construction, unless a hook changes its bucket.
  const ParameterTable& table_;
  const std::vector<size_t> parameters_;          // by slot
  const std::vector<const at::Tensor*> tensors_;  // by slot, of this replica
  const bool gradients_as_views_;
  const at::TensorOptions options_;  // of flat_
  const at::ScalarType wire_dtype_;
  const at::Tensor no_views_;      // undefined
  std::vector<SlotRange> ranges_;  // by slot
  // By slot: what the gradients' are. The parameters' may change at any time.
  DimsList strides_;
  at::Tensor flat_;  // 1D, [numel], parameters' dtype; undefined: released
  at::Tensor wire_;  // 1D, [numel], wire dtype; may be flat_
  BufferDonation donation_;  // of flat_'s, from the second delivery on
  bool has_delivered_ = false;
  // By slot, into flat_; undefined until one is needed. They share its memory
  // but are no views to autograd, so that optimizers may detach_() them.
  std::vector<at::Tensor> views_in_;
  std::vector<const void*> places_;      // by slot, of the views' elements
  const void* base_ = nullptr;           // of flat_'s memory, when made
  const void* end_ = nullptr;            // of flat_'s memory
  std::vector<char> follows_parameter_;  // by slot: strides are the parameter's
  std::unique_ptr<Packer> packer_;
  // On devices with streams.
  std::optional<c10::Stream> allocated_on_;  // the buffers
  std::optional<c10::Event> zeroed_;         // null: waited for
  std::optional<c10::Stream> packed_on_;     // last
  std::optional<c10::Stream> delivered_on_;  // last

  // This iteration only.
  std::vector<at::Tensor*> gradients_;  // by slot: the parameters' .grad
  std::vector<const void*> sources_;    // by slot
  std::vector<void*> destinations_;     // by slot
  std::vector<char> keeps_graph_;       // by slot: its gradient has a history
  std::vector<at::Tensor> rearranged_;  // gradients of another memory order
  std::vector<char> unused_;            // by slot: deliver() decides on .grad
  // Of an unused slot whose gradient is its view: what it held before pack().
  struct SetAside {
    size_t slot;
    at::Tensor gradient;
  };
  std::vector<SetAside> set_aside_;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_DENSE_REPLICA_H_
