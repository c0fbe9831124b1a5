// Packs the dense gradients of a bucket into its memory, and delivers results
// out of it. The memory itself is bucket_memory.h's business.
//
// In view mode the memory's views are the gradients. Results are read from the
// same memory unless a comm hook returned another tensor.

#ifndef BRIGADE_REDUCER_DENSE_REPLICA_H_
#define BRIGADE_REDUCER_DENSE_REPLICA_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "brigade/reducer/bucket_memory.h"
#include "brigade/reducer/bucket_replica.h"
#include "brigade/reducer/buffer_donation.h"
#include "brigade/reducer/gradient_views.h"
#include "brigade/reducer/packing/packer.h"
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
  const at::Tensor& buffer() const override { return memory_.wire(); }
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
    return gradients_as_views_ ? memory_.flat() : no_views_;
  }
  bool is_view_in(size_t slot, const at::Tensor& gradient) const override {
    return memory_.is_view(slot, gradient);
  }

  // Units: elements.
  std::span<const SlotRange> ranges() const { return memory_.ranges(); }

 private:
  void note_packing_stream();
  void record_delivery(const at::Tensor& tensor) const;
  void leave_memory_to_gradients();
  void put_back(std::span<const size_t> globally_unused_slots);
  const void* source_of(size_t slot, const at::Tensor& gradient);
  int64_t deliver_views(const at::Tensor& result,
                        std::span<const size_t> globally_unused_slots);
  int64_t deliver_copies(const at::Tensor& result,
                         std::span<const size_t> globally_unused_slots);
  bool is_laid_out_as_gradient(size_t slot, const at::Tensor& tensor) const;
  int64_t numel(size_t slot) const { return memory_.ranges()[slot].numel; }
  size_t num_slots() const { return tensors_.size(); }
  const at::Tensor& parameter(size_t slot) const { return *tensors_[slot]; }

  // Constant after construction.
  const ParameterTable& table_;
  const std::vector<const at::Tensor*> tensors_;  // by slot, of this replica
  const bool gradients_as_views_;
  const at::Tensor no_views_;  // undefined

  BucketMemory memory_;
  GradientViews views_;  // of memory_
  std::unique_ptr<Packer> packer_;
  BufferDonation donation_;  // of memory_'s, from the second delivery on
  bool has_delivered_ = false;
  // On devices with streams.
  std::optional<c10::Stream> packed_on_;     // last
  std::optional<c10::Stream> delivered_on_;  // last

  // This iteration only.
  std::vector<at::Tensor*> gradients_;  // by slot: the parameters' .grad
  std::vector<const void*> sources_;    // by slot
  std::vector<void*> destinations_;     // by slot
  std::vector<char> keeps_graph_;       // by slot: its gradient has a history
  std::vector<at::Tensor> rearranged_;  // gradients of another memory order
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_DENSE_REPLICA_H_
