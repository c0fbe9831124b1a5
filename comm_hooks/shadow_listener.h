// For comm hooks with collectives of their own beside those of the buckets.
//
// A rank that has run out of data calls the hook on buckets of zeros in each
// iteration of its peers. A hook whose peers launch something else as well,
// which follows from what their user told them, hears of it here.

#ifndef BRIGADE_COMM_HOOKS_SHADOW_LISTENER_H_
#define BRIGADE_COMM_HOOKS_SHADOW_LISTENER_H_

namespace brigade {

class ShadowListener {
 public:
  // This rank begins an iteration on zeros. Called where its peers ask for the
  // wire format of the first bucket that they pack.
  virtual void shadow_begins() = 0;

 protected:
  ~ShadowListener() = default;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_SHADOW_LISTENER_H_
