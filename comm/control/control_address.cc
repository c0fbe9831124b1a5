#include "brigade/comm/control/control_address.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "brigade/comm/group/tcp_store_of.h"

namespace brigade {
namespace {

constexpr const char* kAnyPort = "9";  // nothing is sent there

std::optional<std::string> source_address(const addrinfo& destination) {
  const int connection =
      socket(destination.ai_family, destination.ai_socktype, 0);
  if (connection < 0) return std::nullopt;
  const absl::Cleanup close_it = [connection] { close(connection); };
  if (connect(connection, destination.ai_addr, destination.ai_addrlen) != 0) {
    return std::nullopt;
  }
  sockaddr_storage own = {};
  socklen_t length = sizeof(own);
  char text[NI_MAXHOST] = {};
  auto* const address = reinterpret_cast<sockaddr*>(&own);
  if (getsockname(connection, address, &length) != 0 ||
      getnameinfo(address, length, text, sizeof(text), nullptr, 0,
                  NI_NUMERICHOST) != 0) {
    return std::nullopt;
  }
  return text;
}

}  // namespace

std::optional<std::string> source_address_towards(const std::string& host) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), kAnyPort, &hints, &found) != 0) {
    return std::nullopt;
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found,
                                                                 freeaddrinfo);
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    if (auto address = source_address(*each)) return address;
  }
  return std::nullopt;
}

bool is_loopback(const std::string& address) {
  return absl::StartsWith(address, "127.") || address == "::1";
}

std::string control_address(const c10::intrusive_ptr<c10d::Store>& store) {
  c10d::TCPStore* const tcp_store = tcp_store_of(store);
  if (tcp_store == nullptr) return "";
  const char* const interfaces = std::getenv("GLOO_SOCKET_IFNAME");
  if (interfaces != nullptr && *interfaces != '\0') return "";
  return source_address_towards(tcp_store->getHost()).value_or("");
}

}  // namespace brigade
