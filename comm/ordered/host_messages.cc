#include "brigade/comm/ordered/host_messages.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <numeric>
#include <optional>
#include <utility>

namespace brigade {
namespace {

// [W, n] of every rank's `row` [n].
at::Tensor gather_rows(c10d::Backend& backend, const at::Tensor& row) {
  const int64_t size = backend.getSize();
  std::vector<at::Tensor> input = {row};
  std::vector<std::vector<at::Tensor>> outputs(1);
  const at::Tensor rows = at::empty({size, row.numel()}, row.options());
  for (int64_t rank = 0; rank < size; ++rank) outputs[0].push_back(rows[rank]);
  backend.allgather(outputs, input)->wait();
  return rows;
}

at::Tensor to_bytes(const SharedMemory::Address& address) {
  const at::Tensor bytes =
      at::zeros({static_cast<int64_t>(sizeof(address))}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), &address, sizeof(address));
  return bytes;
}

SharedMemory::Address address_in(const at::Tensor& bytes) {
  SharedMemory::Address address;
  std::memcpy(&address, bytes.const_data_ptr(), sizeof(address));
  return address;
}

// By rank: the first one of its host, which each reaches that it has, and no
// other. Where that is not so, a rank is by itself.
std::vector<int> hosts_of(const at::Tensor& reached) {
  const auto is_reached = reached.accessor<uint8_t, 2>();
  const int size = static_cast<int>(reached.size(0));
  const auto are_together = [&](int one, int other) {
    return one == other ||
           (is_reached[one][other] != 0 && is_reached[other][one] != 0);
  };
  std::vector<int> hosts(size, 0);
  for (int rank = 0; rank < size; ++rank) {
    while (!are_together(hosts[rank], rank)) ++hosts[rank];
  }
  for (int one = 0; one < size; ++one) {
    for (int other = 0; other < size; ++other) {
      if (are_together(one, other) != (hosts[one] == hosts[other])) {
        std::iota(hosts.begin(), hosts.end(), 0);
        return hosts;
      }
    }
  }
  return hosts;
}

}  // namespace

HostMessages::HostMessages(c10d::Backend& backend, size_t bytes, int64_t host,
                           RankNames names)
    : names_(std::move(names)), peers_(backend.getSize()) {
  const int rank = backend.getRank();
  std::optional<SharedMemory> own =
      bytes > 0 ? SharedMemory::make(HostOutbox::bytes_with_room_for(bytes))
                : std::nullopt;
  const at::Tensor addresses = gather_rows(
      backend, to_bytes(own ? own->address() : SharedMemory::Address{}));
  const at::Tensor hosts = gather_rows(backend, at::full({1}, host, at::kLong));
  const at::Tensor reached = at::zeros({backend.getSize()}, at::kByte);
  for (int peer = 0; own && peer < backend.getSize(); ++peer) {
    if (peer == rank || hosts[peer][0].item<int64_t>() != host) continue;
    auto memory = SharedMemory::map(address_in(addresses[peer]));
    if (!memory) continue;
    peers_[peer] = std::make_unique<HostOutbox>(std::move(*memory));
    reached[peer] = 1;
  }
  // Those that reach each other: peers that can't read would be waited for.
  const at::Tensor all_reached = gather_rows(backend, reached);
  joins_all_ = all_reached.sum().item<int64_t>() ==
               int64_t{backend.getSize()} * (backend.getSize() - 1);
  relays_.emplace(rank, hosts_of(all_reached));
  for (int peer = 0; peer < backend.getSize(); ++peer) {
    if (all_reached[peer][rank].item<int>() == 0) peers_[peer] = nullptr;
    if (peers_[peer]) ++num_peers_;
  }
  if (!own) return;
  own->close_address();
  own_ = std::make_unique<HostOutbox>(std::move(*own));
}

template <typename Condition>
void HostMessages::wait_until(const Condition& is_true, Deadline deadline) {
  while (true) {
    const uint32_t seen = own_->signal().count();
    TORCH_CHECK(!is_aborted_, "it was aborted");
    if (is_true()) return;
    TORCH_CHECK(std::chrono::steady_clock::now() < deadline,
                "nothing came within the group's timeout");
    own_->signal().wait(seen, deadline);
  }
}

bool HostMessages::post(HostOutbox::Key key, uint64_t tag,
                        std::span<const std::span<const std::byte>> pieces,
                        Deadline deadline) {
  wait_until([&] { return own_->is_free(key); }, deadline);
  const bool had_room = own_->post(key, tag, num_peers_, pieces);
  raise_signals_of_peers();
  return had_room;
}

void HostMessages::raise_signals_of_peers() {
  for (const auto& peer : peers_) {
    if (peer) peer->signal().raise();
  }
}

HostOutbox::Post HostMessages::await(int peer, HostOutbox::Key key,
                                     Deadline deadline) {
  std::optional<HostOutbox::Post> found;
  wait_until(
      [&] {
        const HostOutbox::State state = peers_[peer]->state();
        TORCH_CHECK(state != HostOutbox::State::kFailed, "rank ", names_[peer],
                    " has failed");
        found = peers_[peer]->find(key);
        TORCH_CHECK(found || state == HostOutbox::State::kOpen, "rank ",
                    names_[peer], " has left");
        return found.has_value();
      },
      deadline);
  return *found;
}

void HostMessages::abort() {
  is_aborted_ = true;
  if (own_) own_->signal().raise();
  set_state(HostOutbox::State::kFailed);
}

void HostMessages::set_state(HostOutbox::State state) {
  if (!own_) return;
  own_->set_state(state);
  raise_signals_of_peers();
}

}  // namespace brigade
