#include "brigade/comm/gloo_signature_mesh.h"

#include <c10/util/Exception.h>
#include <gloo/transport/unbound_buffer.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <exception>
#include <map>
#include <mutex>
#include <string_view>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>

#include "brigade/comm/control_address.h"
#include "brigade/comm/gloo_connections.h"
#include "brigade/comm/sigpipe_block.h"

namespace brigade {
namespace {

using c10d::ProcessGroupGloo;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

using ContextPtr = std::shared_ptr<::gloo::Context>;
using BufferPtr = std::unique_ptr<::gloo::transport::UnboundBuffer>;

// A connection that is closed is known to be so within this time of another.
constexpr milliseconds kLook{20};

// Gloo has one type of exception for all that may happen to a connection.
bool tells_of_closed_connection(std::string_view words) {
  return std::ranges::any_of(
      std::array<std::string_view, 3>{"Connection closed by peer",
                                      "Connection reset", "Broken pipe"},
      [&](std::string_view text) {
        return words.find(text) != std::string_view::npos;
      });
}

class GlooExchange final : public SignatureExchange {
 public:
  GlooExchange(ContextPtr context, int rank, int size)
      : context_(std::move(context)),
        rank_(rank),
        received_(size),
        peers_(size),
        send_buffer_(context_->createUnboundBuffer(&sent_, sizeof(sent_))) {
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank_) continue;
      peers_[peer].buffer = context_->createUnboundBuffer(
          &received_[peer], sizeof(RankSignature));
    }
  }

  // Gloo's buffers wait, as they end, for threads that are using them.  A
  // forked child has no such threads, but may have been forked while they did.
  ~GlooExchange() override {
    if (getpid() == process_) return;
    for (Peer& peer : peers_) static_cast<void>(peer.buffer.release());
    static_cast<void>(send_buffer_.release());
  }

  void begin(uint64_t place, const RankSignature& own) override {
    sent_ = own;
    received_[rank_] = own;
    for (Peer& peer : peers_) peer.has_sent = peer.is_lost = false;
    peers_[rank_].has_sent = true;
    failure_ = nullptr;
    const SigpipeBlock for_writes_of_this_thread;
    for_each_peer([&](int peer) {
      post([&] {
        peers_[peer].buffer->recv(peer, place, 0, sizeof(RankSignature));
      });
    });
    for_each_peer([&](int peer) {
      post([&] { send_buffer_->send(peer, place, 0, sizeof(RankSignature)); });
    });
  }

  void wait(milliseconds timeout) override {
    if (failure_) std::rethrow_exception(failure_);
    const Clock::time_point deadline = Clock::now() + timeout;
    for_each_peer([&](int peer) {
      if (!peers_[peer].has_sent) wait_for(peer, deadline);
    });
  }

  void abort() override {
    for_each_peer([&](int peer) { peers_[peer].buffer->abortWaitRecv(); });
  }

  const std::vector<RankSignature>& received() const override {
    return received_;
  }

  std::vector<int> lost_peers() override {
    std::vector<int> lost;
    for_each_peer([&](int peer) {
      if (peers_[peer].has_sent) return;
      if (!peers_[peer].is_lost) {
        try {
          wait_for(peer, Clock::now() + kLook);
          return;
        } catch (const std::exception&) {
          // wait_for() has noted what it says.
        }
      }
      if (peers_[peer].is_lost) lost.push_back(peer);
    });
    return lost;
  }

 private:
  struct Peer {
    BufferPtr buffer;  // null: this rank
    bool has_sent = false;
    bool is_lost = false;  // its connection is known to be closed
  };

  template <typename F>
  void for_each_peer(const F& visit) {
    for (size_t peer = 0; peer < peers_.size(); ++peer) {
      if (peers_[peer].buffer) visit(static_cast<int>(peer));
    }
  }

  // Told where it is waited for. The other peers get their message though one
  // is gone.
  template <typename F>
  void post(const F& message) {
    try {
      message();
    } catch (const std::exception&) {
      if (!failure_) failure_ = std::current_exception();
    }
  }

  void wait_for(int peer, Clock::time_point deadline) {
    const auto left = std::max(
        std::chrono::duration_cast<milliseconds>(deadline - Clock::now()),
        milliseconds{1});
    try {
      TORCH_CHECK(peers_[peer].buffer->waitRecv(left),
                  "the exchange was aborted");
    } catch (const std::exception& error) {
      peers_[peer].is_lost = tells_of_closed_connection(error.what());
      throw;
    }
    peers_[peer].has_sent = true;
  }

  const pid_t process_ = getpid();
  const ContextPtr context_;
  const int rank_;
  RankSignature sent_;
  std::vector<RankSignature> received_;  // by rank
  std::vector<Peer> peers_;              // by rank
  BufferPtr send_buffer_;
  std::exception_ptr failure_;
};

// Of ProcessGroupGloo only what connects its contexts is used: no thread, no
// collective.  Rank and size are not the context's: Debian's header does not
// know where LibTorch's Gloo keeps them.
class Connections final : public ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  const ContextPtr& context() const { return contexts_.front(); }
};

class GlooMesh final : public SignatureMesh {
 public:
  GlooMesh(std::string prefix, c10::intrusive_ptr<Connections> connections)
      : SignatureMesh(std::move(prefix)),
        connections_(std::move(connections)) {}

  std::shared_ptr<SignatureExchange> make_exchange() override {
    return std::make_shared<GlooExchange>(connections_->context(),
                                          connections_->getRank(),
                                          connections_->getSize());
  }

  void close() override { end_gloo_operations({connections_->context()}); }

 private:
  const c10::intrusive_ptr<Connections> connections_;
};

// Shared among the meshes of the process, since each has a thread.
GlooDevices device_at(const std::string& address) {
  static std::mutex mutex;
  static auto& devices =
      *new std::map<std::string, std::weak_ptr<::gloo::transport::Device>>();
  const std::lock_guard<std::mutex> lock(mutex);
  auto device = devices[address].lock();
  if (!device) {
    device = address.empty()
                 ? open_gloo_devices({}).front()
                 : ProcessGroupGloo::createDeviceForHostname(address);
    devices[address] = device;
  }
  return {std::move(device)};
}

}  // namespace

std::shared_ptr<SignatureMesh> connect_gloo_mesh(
    c10d::ProcessGroup& group, const c10::intrusive_ptr<c10d::Store>& store,
    std::string prefix, milliseconds timeout) {
  const SigpipeBlock inherited_by_its_threads;
  auto connections_store =
      c10::make_intrusive<c10d::PrefixStore>(prefix, store);
  auto options = ProcessGroupGloo::Options::create(timeout);
  options->devices = gloo_devices_of(group);
  if (options->devices.empty()) {
    options->devices = device_at(
        control_address(connections_store, group.getRank(), group.getSize()));
  }
  options->devices.resize(1);
  options->threads = 0;
  auto mesh = std::make_shared<GlooMesh>(
      std::move(prefix),
      c10::make_intrusive<Connections>(connections_store, group.getRank(),
                                       group.getSize(), options));
  // A rank that is done at once must not leave while others connect.
  const auto hello = mesh->make_exchange();
  hello->begin(/*place=*/0, {});
  hello->wait(timeout);
  return mesh;
}

}  // namespace brigade
