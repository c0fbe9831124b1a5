#include "brigade/tests/support/simulated_device/ordering_calls.h"

#include <c10/util/Exception.h>

#include <mutex>
#include <utility>

namespace brigade::simulated {
namespace {

struct Dropped {
  std::mutex mutex;
  // Guarded by mutex.
  std::function<bool(const OrderingCall&)> drops;
  int64_t count = 0;
};

Dropped& dropped() {
  static Dropped* const dropped = new Dropped;
  return *dropped;
}

}  // namespace

DropCalls::DropCalls(std::function<bool(const OrderingCall&)> drops) {
  const std::lock_guard<std::mutex> lock(dropped().mutex);
  TORCH_CHECK(!dropped().drops,
              "DropCalls: another instance exists.\nDestroy it first.");
  dropped().drops = std::move(drops);
  dropped().count = 0;
}

DropCalls::~DropCalls() {
  const std::lock_guard<std::mutex> lock(dropped().mutex);
  dropped().drops = nullptr;
}

int64_t DropCalls::num_dropped() const {
  const std::lock_guard<std::mutex> lock(dropped().mutex);
  return dropped().count;
}

bool is_dropped(const OrderingCall& call) {
  const std::lock_guard<std::mutex> lock(dropped().mutex);
  if (!dropped().drops || !dropped().drops(call)) return false;
  ++dropped().count;
  return true;
}

}  // namespace brigade::simulated
