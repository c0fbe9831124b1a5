// Connections between the ranks of a group over which signatures travel, beside
// those of the group's collectives.
//
// Decides when ranks connect: one mesh serves all channels that a process has
// on a group, and is made by the first of them.  Knows no meaning of what is
// sent.  Internal to comm/.
//
// A mesh has no thread of its own: messages are posted by the thread that
// begins an exchange and awaited by the one that wants the answers.
//
// Thread safety: any thread may use a mesh; an exchange belongs to one thread
// at a time, but for abort().

#ifndef BRIGADE_COMM_SIGNATURE_MESH_H_
#define BRIGADE_COMM_SIGNATURE_MESH_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "brigade/comm/rank_signature.h"

namespace brigade {

// One message to every rank, and one of every rank.  Owns their memory, which
// must stay until a later exchange at the same channel is over: a peer may be
// reading.
class SignatureExchange {
 public:
  virtual ~SignatureExchange() = default;

  // Posts the messages and returns at once.  `place`: meets the peers' exchange
  // at the same place; each place is used once.
  virtual void begin(uint64_t place, const RankSignature& own) = 0;

  // Waits until all messages have come.  Errors: what the transport throws when
  // a peer's connection is closed, or `timeout` is over, which closes all
  // connections of the mesh.
  virtual void wait(std::chrono::milliseconds timeout) = 0;

  // A wait for it ends with an error, on whatever thread.
  virtual void abort() = 0;

  // By rank.  REQUIRES: wait() has returned.
  virtual const std::vector<RankSignature>& received() const = 0;

  // Peers that have sent nothing and whose connections are closed.  To be asked
  // after wait() has thrown, before the mesh is closed here.
  virtual std::vector<int> lost_peers() = 0;
};

class SignatureMesh {
 public:
  // That of a group, for as long as the group lives.  Collective the first time:
  // ranks connect, within the group's timeout.  The group's store is not held
  // meanwhile.  REQUIRES: more than one rank, and a store.
  static std::shared_ptr<SignatureMesh> of(
      const c10::intrusive_ptr<c10d::ProcessGroup>& group);

  virtual ~SignatureMesh() = default;

  virtual std::shared_ptr<SignatureExchange> make_exchange() = 0;

  // Until the mesh ends: a message that nobody waits for, but peers may.
  void keep(std::shared_ptr<SignatureExchange> exchange) {
    const std::lock_guard<std::mutex> lock(mutex_);
    kept_.push_back(std::move(exchange));
  }

  // Closes all connections, which peers notice.
  virtual void close() = 0;

  // Numbers channels, from 1: ranks make theirs in the same order.
  uint64_t add_channel() { return ++num_channels_; }

  // Of keys in the group's store; equal on all ranks, and this mesh's own.
  const std::string& prefix() const { return prefix_; }

 protected:
  explicit SignatureMesh(std::string prefix) : prefix_(std::move(prefix)) {}

 private:
  const std::string prefix_;
  std::atomic<uint64_t> num_channels_ = 0;
  std::mutex mutex_;
  std::vector<std::shared_ptr<SignatureExchange>> kept_;  // guarded by mutex_
};

}  // namespace brigade

#endif  // BRIGADE_COMM_SIGNATURE_MESH_H_
