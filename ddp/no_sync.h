// A scope in which gradients accumulate without being reduced.
//
// Thread safety: as the module it belongs to.

#ifndef BRIGADE_DDP_NO_SYNC_H_
#define BRIGADE_DDP_NO_SYNC_H_

#include "brigade/ddp/replicated_module.h"

namespace brigade {

// Scopes may nest; each restores what it found. Must not outlive the module.
class NoSync {
 public:
  explicit NoSync(ReplicatedModule& module)
      : module_(module), was_on_(module.synchronizes()) {
    module_.set_synchronizes(false);
  }
  ~NoSync() { module_.set_synchronizes(was_on_); }

  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  ReplicatedModule& module_;
  const bool was_on_;
};

}  // namespace brigade

#endif  // BRIGADE_DDP_NO_SYNC_H_
