// The two places of a forward where ranks may wait for each other.

#ifndef BRIGADE_ENGINE_SYNC_POINT_H_
#define BRIGADE_ENGINE_SYNC_POINT_H_

namespace brigade {

// Where ranks meet: in front of a forward, or behind one.
enum class SyncPoint { kBeforeForward, kAfterForward };

}  // namespace brigade

#endif  // BRIGADE_ENGINE_SYNC_POINT_H_
