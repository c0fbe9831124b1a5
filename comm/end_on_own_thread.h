// A shared value that ends on a thread made for that, whoever drops it last.
//
// A backend completes collectives on threads of its own. What a future's
// callback holds is dropped there: if a process group ended with it, the group
// would wait for the very thread that it ends on.
//
// Thread safety: as std::shared_ptr.

#ifndef BRIGADE_COMM_END_ON_OWN_THREAD_H_
#define BRIGADE_COMM_END_ON_OWN_THREAD_H_

#include <pthread.h>

#include <memory>
#include <system_error>
#include <thread>
#include <utility>

namespace brigade {

// The thread's name, as the system lists it.
inline constexpr char kEndingThread[] = "brigade_end";

template <typename T>
std::shared_ptr<T> end_on_own_thread(T value) {
  return {new T(std::move(value)), [](T* owned) {
            try {
              std::thread([owned] {
                pthread_setname_np(pthread_self(), kEndingThread);
                delete owned;
              }).detach();
            } catch (const std::system_error&) {
              // No thread to be had: better kept for good.
            }
          }};
}

}  // namespace brigade

#endif  // BRIGADE_COMM_END_ON_OWN_THREAD_H_
