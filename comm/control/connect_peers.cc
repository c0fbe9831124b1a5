#include "brigade/comm/control/connect_peers.h"

#include <c10/util/Exception.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/control/control_address.h"
#include "brigade/comm/errors/liveness_probe.h"

namespace brigade {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// What who connects sends first.
struct Greeting {
  uint64_t secret = 0;  // of the one that it connects to
  int64_t rank = 0;     // its own
};

// Where a rank listens, as it publishes it.
struct Listening {
  std::string address = {};
  std::string port = {};
  uint64_t secret = 0;
};

std::string text_of(const Listening& listening) {
  return absl::StrCat(listening.address, " ", listening.port, " ",
                      listening.secret);
}

Listening parse(const std::string& text) {
  Listening listening;
  std::istringstream(text) >> listening.address >> listening.port >>
      listening.secret;
  return listening;
}

std::string last_error() { return std::strerror(errno); }

milliseconds left_until(Clock::time_point deadline) {
  return std::max(
      std::chrono::duration_cast<milliseconds>(deadline - Clock::now()),
      milliseconds{0});
}

bool wait_for(std::vector<pollfd>& sockets, Clock::time_point deadline) {
  int ready = 0;
  do {
    ready = poll(sockets.data(), sockets.size(),
                 static_cast<int>(left_until(deadline).count()));
  } while (ready < 0 && errno == EINTR);
  return ready > 0;
}

struct AddrinfoDeleter {
  void operator()(addrinfo* info) const { freeaddrinfo(info); }
};
using AddrinfoPtr = std::unique_ptr<addrinfo, AddrinfoDeleter>;

AddrinfoPtr resolve(const std::string& address, const std::string& port) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(address.c_str(), port.c_str(), &hints, &found);
  TORCH_CHECK(error == 0, "expected a numeric address and port, got '", address,
              "' and '", port, "': ", gai_strerror(error));
  return AddrinfoPtr(found);
}

OwnedSocket open_socket(const addrinfo& at) {
  OwnedSocket socket(
      ::socket(at.ai_family, at.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  TORCH_CHECK(socket.get() >= 0, "no socket to be had: ", last_error());
  return socket;
}

OwnedSocket listen_at(const std::string& address, size_t num_peers) {
  const AddrinfoPtr at = resolve(address, "0");
  OwnedSocket socket = open_socket(*at);
  TORCH_CHECK(bind(socket.get(), at->ai_addr, at->ai_addrlen) == 0 &&
                  listen(socket.get(), static_cast<int>(2 * num_peers)) == 0,
              "can't listen at ", address, ": ", last_error());
  return socket;
}

std::string port_of(const OwnedSocket& socket) {
  sockaddr_storage address = {};
  socklen_t length = sizeof(address);
  char port[NI_MAXSERV] = {};
  auto* const pointer = reinterpret_cast<sockaddr*>(&address);
  TORCH_CHECK(getsockname(socket.get(), pointer, &length) == 0 &&
                  getnameinfo(pointer, length, nullptr, 0, port, sizeof(port),
                              NI_NUMERICSERV) == 0,
              "a socket's port is not known: ", last_error());
  return port;
}

OwnedSocket connect_to(const Listening& peer, int peer_rank, int rank,
                       Clock::time_point deadline) {
  const AddrinfoPtr at = resolve(peer.address, peer.port);
  OwnedSocket socket = open_socket(*at);
  int error = 0;
  if (connect(socket.get(), at->ai_addr, at->ai_addrlen) != 0) error = errno;
  if (error == EINPROGRESS) {
    std::vector<pollfd> connecting = {{socket.get(), POLLOUT, 0}};
    error = ETIMEDOUT;
    if (wait_for(connecting, deadline)) {
      socklen_t length = sizeof(error);
      getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    }
  }
  const Greeting greeting = {.secret = peer.secret, .rank = rank};
  TORCH_CHECK(error == 0 && send(socket.get(), &greeting, sizeof(greeting),
                                 MSG_NOSIGNAL) == sizeof(greeting),
              "no connection to rank ", peer_rank, " at ", peer.address,
              " port ", peer.port, ": ",
              std::strerror(error != 0 ? error : errno));
  return socket;
}

// Those that have come to `listener`, and what they have said so far.
class Reception {
 public:
  Reception(const OwnedSocket& listener, uint64_t secret)
      : listener_(listener), secret_(secret) {}

  // Hands over those that have greeted. False: the deadline has come.
  template <typename Accept>
  bool receive(Clock::time_point deadline, const Accept& accept) {
    if (Clock::now() >= deadline) return false;
    std::vector<pollfd> sockets = {{listener_.get(), POLLIN, 0}};
    for (const OwnedSocket& guest : guests_) {
      sockets.push_back({guest.get(), POLLIN, 0});
    }
    if (!wait_for(sockets, deadline)) return false;
    std::vector<OwnedSocket> silent;
    for (size_t i = 0; i < guests_.size(); ++i) {
      if (sockets[i + 1].revents == 0) {
        silent.push_back(std::move(guests_[i]));
      } else if (const int rank = greeted_by(guests_[i]); rank >= 0) {
        accept(rank, std::move(guests_[i]));
      }
    }
    guests_ = std::move(silent);
    OwnedSocket guest(accept4(listener_.get(), nullptr, nullptr,
                              SOCK_NONBLOCK | SOCK_CLOEXEC));
    TORCH_CHECK(guest.get() >= 0 || (errno != EMFILE && errno != ENFILE),
                "no socket to be had for a peer: ", last_error());
    if (guest.get() >= 0) guests_.push_back(std::move(guest));
    return true;
  }

 private:
  // Who has sent the whole greeting; else less than 0.
  int greeted_by(const OwnedSocket& guest) const {
    Greeting greeting;
    const bool is_whole =
        recv(guest.get(), &greeting, sizeof(greeting), 0) == sizeof(greeting);
    return is_whole && greeting.secret == secret_
               ? static_cast<int>(greeting.rank)
               : -1;
  }

  const OwnedSocket& listener_;
  const uint64_t secret_;
  std::vector<OwnedSocket> guests_;
};

uint64_t random_number() {
  std::random_device device;
  return std::uniform_int_distribution<uint64_t>()(device);
}

}  // namespace

bool connects(int rank, const std::string& address, int peer,
              const std::string& peer_address) {
  const bool is_beside_store = is_loopback(address);
  if (is_beside_store == is_loopback(peer_address)) return rank < peer;
  return is_beside_store;
}

std::map<int, OwnedSocket> connect_peers(
    const c10::intrusive_ptr<c10d::Store>& store, const PeersToConnect& own,
    milliseconds timeout) {
  const Clock::time_point deadline = Clock::now() + timeout;
  const OwnedSocket listener = listen_at(own.address, own.peers.size());
  const Listening published = {.address = own.address,
                               .port = port_of(listener),
                               .secret = random_number()};
  const auto key = [](int rank) { return absl::StrCat("listens/", rank); };
  store->set(key(own.rank), text_of(published));

  std::vector<std::string> keys;
  for (const int peer : own.peers) keys.push_back(key(peer));
  store->wait(keys, std::max(left_until(deadline), milliseconds{1}));

  std::map<int, OwnedSocket> sockets;
  std::vector<int> awaited;
  for (const int peer : own.peers) {
    const Listening theirs = parse(store->get_to_str(key(peer)));
    if (connects(own.rank, own.address, peer, theirs.address)) {
      sockets[peer] = connect_to(theirs, peer, own.rank, deadline);
    } else {
      awaited.push_back(peer);
    }
  }
  Reception reception(listener, published.secret);
  while (!awaited.empty()) {
    const bool is_in_time =
        reception.receive(deadline, [&](int rank, OwnedSocket socket) {
          if (std::erase(awaited, rank) > 0) sockets[rank] = std::move(socket);
        });
    TORCH_CHECK(is_in_time, describe_ranks(awaited), " did not connect to ",
                own.address, " port ", published.port, " within ",
                timeout.count(), " ms");
  }
  return sockets;
}

}  // namespace brigade
