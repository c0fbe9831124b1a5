#include "brigade/comm/control/status_mesh.h"

#include <c10/util/Exception.h>
#include <sys/types.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/backends/gloo_connections.h"
#include "brigade/comm/control/connect_peers.h"
#include "brigade/comm/control/control_address.h"
#include "brigade/comm/control/exchange_rounds.h"
#include "brigade/comm/control/tcp_links.h"
#include "brigade/comm/group/control_store.h"
#include "brigade/comm/group/group_timeout.h"
#include "brigade/comm/group/per_group.h"

namespace brigade {
namespace {

// Ranks whose statuses are not of one size must not meet.
constexpr const char* kPrefix = "brigade/statuses_320/";

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// A group's mesh lives as long as the group. If it lived as long as the
// channels on it, ranks could differ in whether there is one: when a reducer is
// destroyed is each rank's own business.
struct MeshOfGroup {
  // In a forked child the connections are the parent's, which goes on.
  ~MeshOfGroup() {
    if (process != getpid()) new std::shared_ptr<StatusMesh>(mesh);
  }

  const pid_t process = getpid();
  std::mutex connecting;
  std::shared_ptr<StatusMesh> mesh;  // guarded by connecting
};

std::string own_address(c10d::ProcessGroup& group, const StorePtr& store) {
  std::string address = gloo_address_of(group);
  if (address.empty()) address = control_address(store);
  return address.empty() ? default_gloo_address() : address;
}

std::shared_ptr<StatusMesh> connect_mesh(c10d::ProcessGroup& group) {
  const StorePtr store = control_store(group);
  const int rank = group.getRank();
  const int size = group.getSize();
  // Every rank counts its own, since several ranks may live in one process, and
  // several groups may have one store.
  const int64_t nth = store->add(absl::StrCat(kPrefix, "meshes/", rank), 1);
  const std::string prefix = absl::StrCat(kPrefix, nth, "/");
  auto sockets =
      connect_peers(c10::make_intrusive<c10d::PrefixStore>(prefix, store),
                    {.rank = rank,
                     .peers = neighbours_of(rank, size),
                     .address = own_address(group, store)},
                    group_timeout(group));
  auto mesh = std::make_shared<StatusMesh>(
      prefix, rank, size, std::make_unique<TcpLinks>(std::move(sockets)));
  mesh->say_hello(group_timeout(group));
  return mesh;
}

}  // namespace

std::shared_ptr<StatusMesh> StatusMesh::of(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  const std::shared_ptr<MeshOfGroup> of_group = per_group<MeshOfGroup>(group);
  TORCH_CHECK(of_group->process == getpid(),
              "StatusMesh: the group's ranks were connected in process ",
              of_group->process, ", it can't be used in process ", getpid(),
              ", which was forked from that.\nMake the group and what uses it "
              "after the fork.");
  const std::lock_guard<std::mutex> lock(of_group->connecting);
  if (!of_group->mesh) of_group->mesh = connect_mesh(*group);
  return of_group->mesh;
}

StatusMesh::StatusMesh(std::string prefix, int rank, int size,
                       std::unique_ptr<PeerLinks> links)
    : prefix_(std::move(prefix)),
      protocol_(rank, size,
                [this](int peer, Bytes message) {
                  ++messages_sent_;
                  links_->send(peer, message);
                }),
      links_(std::move(links)) {
  links_->start(*this);
}

void StatusMesh::say_hello(std::chrono::milliseconds timeout) {
  begin(kHelloChannel, {.sequence = 1})->wait(timeout);
}

std::shared_ptr<StatusExchange> StatusMesh::begin(uint64_t channel,
                                                  const RankStatus& own) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return protocol_.begin(channel, own);
}

void StatusMesh::leave(uint64_t channel, const RankStatus& last) {
  const std::lock_guard<std::mutex> lock(mutex_);
  protocol_.leave(channel, last);
}

void StatusMesh::abort_exchanges(const RankStatus& last) {
  const std::lock_guard<std::mutex> lock(mutex_);
  protocol_.abort_exchanges(last);
}

std::vector<int> StatusMesh::closed_ranks() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return protocol_.closed_ranks();
}

StatusMesh::Traffic StatusMesh::traffic() const {
  return {.connections = links_->num_connections(),
          .messages_sent = messages_sent_,
          .messages_received = messages_received_};
}

void StatusMesh::on_message(int from, Bytes message) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++messages_received_;
  protocol_.on_message(from, message);
}

void StatusMesh::on_closed(int peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  protocol_.on_closed(peer);
}

}  // namespace brigade
