// The storage of whole parameters, whose memory comes and goes.
//
// A parameter is a view of it for ever, and so are tensors that autograd has
// saved: what they read is whatever memory is bound then. While none is,
// reading them is an error that says why. Memory is written through tensors of
// its own, so that no version counter of a parameter moves.
//
// Thread safety: none; nobody may read a view while memory is bound or unbound.

#ifndef BRIGADE_FSDP_MEMORY_WHOLE_STORAGE_H_
#define BRIGADE_FSDP_MEMORY_WHOLE_STORAGE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <string>

namespace brigade {

class WholeStorage {
 public:
  // Of `numel` elements, without memory. `why_unbound`: what is told to whoever
  // reads a view then: "parameter 'w' is sharded here ...".
  WholeStorage(at::ScalarType dtype, int64_t numel, c10::Device device,
               std::string why_unbound);
  WholeStorage(const WholeStorage&) = delete;
  WholeStorage& operator=(const WholeStorage&) = delete;

  // Of elements from `offset` on.
  at::Tensor view(int64_t offset, at::IntArrayRef sizes,
                  at::IntArrayRef strides) const;
  // Whether it is a view; whoever asks reads no memory.
  bool has_view(const at::Tensor& tensor) const {
    return tensor.unsafeGetTensorImpl()
               ->unsafe_storage()
               .unsafeGetStorageImpl() == whole_.unsafeGetTensorImpl()
                                              ->unsafe_storage()
                                              .unsafeGetStorageImpl();
  }

  // `memory`: [numel] of the dtype, contiguous; kept until it is unbound, or by
  // the views if this object ends before.
  void bind(at::Tensor memory);
  void unbind();
  bool is_bound() const { return memory_.defined(); }

  // From the next time on that it is unbound; now, if it is.
  void set_why_unbound(std::string why);

  // [numel]; undefined while none is bound. No view of the storage.
  const at::Tensor& memory() const { return memory_; }

 private:
  void refuse_access();

  const c10::Device device_;
  std::string why_unbound_;
  const at::Tensor whole_;  // [numel], of which all views are made
  at::Tensor memory_;
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_MEMORY_WHOLE_STORAGE_H_
