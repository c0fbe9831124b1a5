// Who used each byte of memory last: its last write, and the reads since.
//
// Neighbouring bytes with one history are one piece, so that the cost is that
// of the accesses and not of the bytes.
//
// Thread safety: none.

#ifndef BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_MEMORY_HISTORY_H_
#define BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_MEMORY_HISTORY_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace brigade::simulated {

struct Operation {
  std::string name;
  int64_t number;     // counts the operations of all streams, from 1
  size_t stream;      // that it runs on
  uint64_t time;      // counts the operations of its stream, from 1
  std::string where;  // what enqueued it; may be empty
};
using OperationPtr = std::shared_ptr<const Operation>;

class MemoryHistory {
 public:
  using Address = uintptr_t;

  struct Piece {
    Address end = 0;
    OperationPtr write = nullptr;          // null: none is known
    std::vector<OperationPtr> reads = {};  // since the write; one per stream
  };

  // Calls visit(begin, piece) for the pieces that make up [begin, end). Pieces
  // are cut there, and made where nothing is known.
  template <typename Visit>
  void visit(Address begin, Address end, Visit visit) {
    cut(begin);
    cut(end);
    for (Address at = begin; at < end;) {
      auto piece = pieces_.lower_bound(at);
      if (piece == pieces_.end() || piece->first > at) {
        const Address gap_end =
            piece == pieces_.end() ? end : std::min(end, piece->first);
        piece = pieces_.emplace(at, Piece{.end = gap_end}).first;
      }
      visit(at, piece->second);
      at = piece->second.end;
    }
  }

  // Nothing is known of [begin, end).
  void forget(Address begin, Address end) {
    cut(begin);
    cut(end);
    pieces_.erase(pieces_.lower_bound(begin), pieces_.lower_bound(end));
  }

 private:
  void cut(Address at) {
    auto piece = pieces_.upper_bound(at);
    if (piece == pieces_.begin()) return;
    --piece;
    if (piece->first == at || piece->second.end <= at) return;
    Piece right = piece->second;
    piece->second.end = at;
    pieces_.emplace(at, std::move(right));
  }

  std::map<Address, Piece> pieces_;  // by begin; they do not overlap
};

}  // namespace brigade::simulated

#endif  // BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_MEMORY_HISTORY_H_
