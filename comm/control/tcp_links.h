// Links over TCP sockets, which the process's SocketLoop reads.  Internal to
// comm/.

#ifndef BRIGADE_COMM_CONTROL_TCP_LINKS_H_
#define BRIGADE_COMM_CONTROL_TCP_LINKS_H_

#include <map>
#include <memory>

#include "brigade/comm/control/owned_socket.h"
#include "brigade/comm/control/peer_links.h"
#include "brigade/comm/control/socket_loop.h"

namespace brigade {

class TcpLinks final : public PeerLinks {
 public:
  // `sockets`: connected, by peer.
  explicit TcpLinks(std::map<int, OwnedSocket> sockets);

  // Closes the connections.  Waits for the listener if it is being called, so
  // it must not be called by that.
  ~TcpLinks() override;

  void start(LinkListener& listener) override;
  void send(int peer, Bytes message) override;
  int num_connections() const override;

 private:
  class Connection;

  const std::shared_ptr<SocketLoop> loop_;
  std::map<int, std::shared_ptr<Connection>> connections_;  // by peer
};

}  // namespace brigade

#endif  // BRIGADE_COMM_CONTROL_TCP_LINKS_H_
