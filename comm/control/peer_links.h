// Connections to some of a group's other ranks, over which messages of any
// length travel.  Internal to comm/.
//
// Each connection keeps the order of its messages.  What has been sent when a
// rank ends its connections still arrives, before their end does.

#ifndef BRIGADE_COMM_CONTROL_PEER_LINKS_H_
#define BRIGADE_COMM_CONTROL_PEER_LINKS_H_

#include <cstddef>
#include <span>

namespace brigade {

using Bytes = std::span<const std::byte>;

// Called on one thread at a time, and never inside of PeerLinks::send().
class LinkListener {
 public:
  virtual void on_message(int from, Bytes message) = 0;

  // Nothing more will come from `peer`; told once.
  virtual void on_closed(int peer) = 0;

 protected:
  ~LinkListener() = default;
};

// Thread safety: any thread.
class PeerLinks {
 public:
  virtual ~PeerLinks() = default;

  // `listener` outlives this object, and is called from now on.  Once.
  virtual void start(LinkListener& listener) = 0;

  // Never waits for a peer, and copies what has to wait.  A message to a rank
  // that is gone is lost: on_closed() tells.
  virtual void send(int peer, Bytes message) = 0;

  virtual int num_connections() const = 0;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_CONTROL_PEER_LINKS_H_
