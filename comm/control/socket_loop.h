// The one thread of a process that reads from brigade's own connections.
//
// It sleeps while nothing comes.  Signals are blocked in it.  A forked child
// has no such thread, and gets a loop of its own when it asks for one.
//
// Thread safety: any thread.

#ifndef BRIGADE_COMM_CONTROL_SOCKET_LOOP_H_
#define BRIGADE_COMM_CONTROL_SOCKET_LOOP_H_

#include <cstdint>
#include <memory>

namespace brigade {

// Called on the loop's thread, and must not wait for another socket.
class SocketHandler {
 public:
  virtual ~SocketHandler() = default;
  virtual void on_ready(bool can_read, bool can_write) = 0;
};

class SocketLoop {
 public:
  // Lives as long as somebody holds it.
  static std::shared_ptr<SocketLoop> shared();

  SocketLoop();
  ~SocketLoop();  // ends the thread, and does not wait for it
  SocketLoop(const SocketLoop&) = delete;
  SocketLoop& operator=(const SocketLoop&) = delete;

  using Watch = uint64_t;

  // Calls `handler` whenever `socket` can be read or is closed, until forget().
  // Keeps it until then, and while it runs.  Errors: RuntimeError.
  Watch watch(int socket, std::shared_ptr<SocketHandler> handler);

  // Also whenever it can be written, or not.
  void set_wants_to_write(Watch watch, bool value);

  // The handler may still be running.
  void forget(Watch watch);

 private:
  class State;

  const std::shared_ptr<State> state_;  // of the thread, too
};

}  // namespace brigade

#endif  // BRIGADE_COMM_CONTROL_SOCKET_LOOP_H_
