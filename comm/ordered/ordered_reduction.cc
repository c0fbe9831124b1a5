#include "brigade/comm/ordered/ordered_reduction.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "brigade/comm/ordered/ordered_sum.h"

namespace brigade {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Bytes to send in one phase up to which saving the other one is worth the
// bytes and additions, of which there are W/2 times as many.
constexpr int64_t kOnePhaseBytes = int64_t{1} << 15;

// Two ranks send no byte more in one phase.
bool fits_one_phase(const OrderedReduction::Call& call, int size) {
  return call.kind == OrderedKind::kAllReduce &&
         (size == 2 || static_cast<int64_t>(call.input.nbytes()) * (size - 1) <=
                           kOnePhaseBytes);
}

void copy_from(const std::byte* source, const at::Tensor& to) {
  if (to.numel() > 0) std::memcpy(to.mutable_data_ptr(), source, to.nbytes());
}

// One after the other, beginning with the next rank, so that not all ranks send
// to the same one first.
template <typename Function>
void for_each_peer(int rank, int size, const Function& function) {
  for (int step = 1; step < size; ++step) function((rank + step) % size);
}

}  // namespace

OrderedReduction::OrderedReduction(c10::intrusive_ptr<c10d::Backend> backend,
                                   HostMessages& host, Call call,
                                   int group_size, int64_t part_bytes,
                                   uint64_t number)
    : backend_(std::move(backend)),
      host_(host),
      call_(std::move(call)),
      rank_(backend_->getRank()),
      size_(backend_->getSize()),
      group_size_(group_size),
      part_numel_(
          std::max<int64_t>(1, part_bytes / call_.input.element_size())),
      number_(number),
      in_one_phase_(fits_one_phase(call_, size_)),
      own_(slice_of(rank_)),
      terms_(size_) {}

int64_t OrderedReduction::scratch_bytes() const {
  if (!has_terms()) return 0;
  int64_t num_terms = 0;
  for_each_peer(rank_, size_, [&](int peer) {
    if (!host_.reaches(peer)) ++num_terms;
  });
  return num_terms * own_.numel * call_.input.element_size();
}

// 31 bits, none of them c10d's sign: 2 for the phase, 10 for the number, the
// rest for what must be equal.
OrderedReduction::Tag OrderedReduction::tag_of(Phase phase) const {
  const uint64_t agreed = c10::get_hash(
      static_cast<int>(call_.kind), call_.input.numel(),
      static_cast<int>(call_.input.scalar_type()), call_.scale.has_value(),
      call_.scale.value_or(0), group_size_, part_numel_, number_);
  const uint64_t mixed = (agreed ^ (agreed >> 32)) * 0x9e3779b97f4a7c15ULL;
  const auto of_phase = static_cast<uint64_t>(phase) + 1;
  const auto tag =
      static_cast<Tag>((mixed >> 45) << 12 | (number_ & 0x3ff) << 2 | of_phase);
  return tag == kSilentTag ? tag | 1 << 12 : tag;
}

RankSlice OrderedReduction::slice_of(int rank) const {
  const int64_t numel = call_.input.numel();
  if (in_one_phase_) return {.offset = 0, .numel = numel};
  return slice_of_rank(numel, rank, size_);
}

int64_t OrderedReduction::num_parts(const RankSlice& slice) const {
  return slice.numel / part_numel_ + (slice.numel % part_numel_ > 0 ? 1 : 0);
}

RankSlice OrderedReduction::part(const RankSlice& slice, int64_t index) const {
  const int64_t offset = index * part_numel_;
  return {.offset = offset,
          .numel = std::min(part_numel_, slice.numel - offset)};
}

// Messages end on other threads, perhaps when a profiler that has seen them
// begin is gone, whose memory they would write to.
OrderedReduction::Message OrderedReduction::send(int peer, Phase phase,
                                                 const at::Tensor& elements) {
  const at::DisableRecordFunctionGuard not_profiled;
  std::vector<at::Tensor> bytes = {elements.view(at::kByte)};
  sent_bytes_ += static_cast<int64_t>(elements.nbytes());
  return {.peer = peer,
          .work = keep(backend_->send(bytes, peer, tag_of(phase)))};
}

OrderedReduction::Message OrderedReduction::receive(
    int peer, Phase phase, const at::Tensor& elements) {
  const at::DisableRecordFunctionGuard not_profiled;
  std::vector<at::Tensor> bytes = {elements.view(at::kByte)};
  return {.peer = peer,
          .work = keep(backend_->recv(bytes, peer, tag_of(phase)))};
}

OrderedReduction::WorkPtr OrderedReduction::keep(WorkPtr work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  works_.push_back(work);
  return work;
}

template <typename Function>
void OrderedReduction::for_each_peer_here(const Function& function) const {
  for_each_peer(rank_, size_, [&](int peer) {
    if (host_.reaches(peer)) function(peer);
  });
}

// ---- What ranks of this host post.

HostOutbox::Key OrderedReduction::key_of(Phase phase) const {
  return {.lane = static_cast<size_t>(phase), .number = number_};
}

// Whether all peers here can read it. To others, and if not, it is to be sent.
bool OrderedReduction::post(Phase phase, std::span<const at::Tensor> pieces) {
  if (!host_.has_peers()) return false;
  std::vector<std::span<const std::byte>> bytes;
  for (const at::Tensor& piece : pieces) {
    bytes.emplace_back(static_cast<const std::byte*>(piece.const_data_ptr()),
                       piece.nbytes());
  }
  return host_.post(key_of(phase), static_cast<uint64_t>(tag_of(phase)), bytes,
                    deadline_);
}

// Each peer reads a part of what was posted.
void OrderedReduction::count_read(const RankSlice& slice) {
  sent_bytes_ += slice.numel * call_.input.element_size();
}

// What a peer here has posted; null if it is sent instead.
const std::byte* OrderedReduction::await(int peer, Phase phase) {
  awaited_ = peer;
  const HostOutbox::Post posted = host_.await(peer, key_of(phase), deadline_);
  TORCH_CHECK(posted.tag == static_cast<uint64_t>(tag_of(phase)), "rank ",
              host_.name_of(peer), " has launched something else");
  return posted.data;
}

// ---- Terms.

// A post has no slice of its own rank, unless it has all.
int64_t OrderedReduction::offset_in_post_of(int peer) const {
  if (in_one_phase_ || rank_ < peer) return own_.offset;
  return own_.offset - slice_of(peer).numel;
}

template <typename Function>
void OrderedReduction::for_each_part_of_others(const Function& function) const {
  // Slices differ by one element: no other has more parts than the first.
  const int64_t most_parts = num_parts(slice_of(0));
  for (int64_t i = 0; i < most_parts; ++i) {
    for_each_peer(rank_, size_, [&](int peer) {
      const RankSlice slice = slice_of(peer);
      if (i >= num_parts(slice)) return;
      const RankSlice relative = part(slice, i);
      function(peer, i, slice.offset + relative.offset, relative.numel);
    });
  }
}

// A peer sends only what it knows to be awaited. Told of that behind the terms,
// on the one connection that both take, it would begin when all of them have
// come, and one direction would be idle at a time. What comes while the caller
// still writes keeps Gloo's thread busy until it may read: that is processor
// time, which between hosts there is enough of.
void OrderedReduction::launch(at::Tensor scratch, milliseconds timeout) {
  deadline_ = steady_clock::now() + timeout;
  scratch_ = std::move(scratch);
  if (has_terms()) receive_terms();
  if (has_sums()) receive_sums();
  if (has_terms()) {
    send_terms();
  } else {
    send_own_slice();
  }
  deadline_ = steady_clock::time_point::max();  // begins with finish()
}

void OrderedReduction::send_terms() {
  const int64_t behind_own = own_.offset + own_.numel;
  std::vector<at::Tensor> pieces = {call_.input};
  if (!in_one_phase_) {
    pieces = {
        call_.input.narrow(0, 0, own_.offset),
        call_.input.narrow(0, behind_own, call_.input.numel() - behind_own)};
  }
  const bool is_posted = post(Phase::kTerms, pieces);
  if (is_posted) {
    for_each_peer_here([&](int peer) { count_read(slice_of(peer)); });
  }
  outgoing_.resize(num_parts(slice_of(0)));
  for_each_part_of_others(
      [&](int peer, int64_t index, int64_t offset, int64_t numel) {
        if (is_posted && host_.reaches(peer)) return;
        outgoing_[index].push_back(
            send(peer, Phase::kTerms, call_.input.narrow(0, offset, numel)));
      });
}

void OrderedReduction::receive_terms() {
  incoming_.resize(num_parts(own_));
  const at::Tensor rows =
      scratch_.narrow(0, 0, scratch_bytes()).view(call_.input.scalar_type());
  int64_t begin = 0;
  for_each_peer(rank_, size_, [&](int peer) {
    if (host_.reaches(peer)) return;
    receive_terms_of(peer, rows.narrow(0, begin, own_.numel));
    begin += own_.numel;
  });
}

void OrderedReduction::receive_terms_of(int peer, const at::Tensor& memory) {
  terms_[peer] = memory;
  for (size_t i = 0; i < incoming_.size(); ++i) {
    incoming_[i].push_back(
        receive(peer, Phase::kTerms,
                term_of(peer, part(own_, static_cast<int64_t>(i)))));
  }
}

void OrderedReduction::find_terms() {
  terms_[rank_] = call_.input.narrow(0, own_.offset, own_.numel);
  for_each_peer_here([&](int peer) {
    const std::byte* const posted = await(peer, Phase::kTerms);
    if (posted == nullptr) {
      return receive_terms_of(peer,
                              at::empty({own_.numel}, call_.input.options()));
    }
    const std::byte* const begin =
        posted + offset_in_post_of(peer) * call_.input.element_size();
    terms_[peer] =
        at::from_blob(const_cast<std::byte*>(begin),  // it is read only
                      {own_.numel}, call_.input.options());
  });
}

void OrderedReduction::release_terms() {
  terms_.clear();
  for_each_peer_here(
      [&](int peer) { host_.release(peer, key_of(Phase::kTerms)); });
}

at::Tensor OrderedReduction::term_of(int rank,
                                     const RankSlice& own_part) const {
  return terms_[rank].narrow(0, own_part.offset, own_part.numel);
}

// ---- Sums.

void OrderedReduction::add_terms() {
  const at::Tensor own_output =
      call_.kind == Kind::kReduceScatter
          ? call_.output
          : call_.output.narrow(0, own_.offset, own_.numel);
  for (size_t i = 0; i < incoming_.size(); ++i) {
    const RankSlice own_part = part(own_, static_cast<int64_t>(i));
    std::vector<at::Tensor> terms;
    for (int rank = 0; rank < size_; ++rank) {
      terms.push_back(term_of(rank, own_part));
    }
    for (const Message& message : incoming_[i]) await(message);
    if (in_one_phase_) {  // the sum takes their place
      for (const Message& message : outgoing_[i]) await(message);
    }
    ordered_sum(terms, group_size_, call_.scale,
                own_output.narrow(0, own_part.offset, own_part.numel));
    if (!has_sums()) continue;
    for (const int peer : host_.relays().receivers()) send_sum(peer, own_part);
  }
}

void OrderedReduction::send_sum(int peer, const RankSlice& own_part) {
  sent_sums_.push_back(send(
      peer, Phase::kSums,
      call_.output.narrow(0, own_.offset + own_part.offset, own_part.numel)));
}

void OrderedReduction::post_sums() {
  const at::Tensor own = call_.output.narrow(0, own_.offset, own_.numel);
  if (post(Phase::kSums, {&own, 1})) {
    return for_each_peer_here([&](int /*peer*/) { count_read(own_); });
  }
  for (int64_t i = 0; i < num_parts(own_); ++i) {
    for_each_peer_here([&](int peer) { send_sum(peer, part(own_, i)); });
  }
}

void OrderedReduction::send_own_slice() {
  post_sums();
  for (int64_t i = 0; i < num_parts(own_); ++i) {
    for (const int peer : host_.relays().receivers()) {
      send_sum(peer, part(own_, i));
    }
  }
}

void OrderedReduction::receive_sums() {
  for (const int origin : host_.relays().origins_of(rank_)) {
    receive_sums_of(origin);
  }
}

at::Tensor OrderedReduction::sums_of(int rank) const {
  const RankSlice slice = slice_of(rank);
  return call_.output.narrow(0, slice.offset, slice.numel);
}

void OrderedReduction::receive_sums_of(int peer) {
  const RankSlice slice = slice_of(peer);
  for (int64_t i = 0; i < num_parts(slice); ++i) {
    const RankSlice relative = part(slice, i);
    sums_.push_back(
        receive(peer, Phase::kSums,
                call_.output.narrow(0, slice.offset + relative.offset,
                                    relative.numel)));
  }
}

void OrderedReduction::read_sums() {
  for_each_peer_here([&](int peer) {
    const std::byte* const posted = await(peer, Phase::kSums);
    if (posted == nullptr) {
      receive_sums_of(peer);
    } else {
      copy_from(posted, sums_of(peer));
    }
    host_.release(peer, key_of(Phase::kSums));
  });
}

// To those of this host, who wait for it if there is something.
void OrderedReduction::pass_on_sums() {
  const std::vector<int>& origins = host_.relays().origins_of(rank_);
  if (origins.empty() || !host_.has_peers()) return;
  std::vector<at::Tensor> pieces;
  for (const int origin : origins) pieces.push_back(sums_of(origin));
  const bool is_posted = post(Phase::kPassedOn, pieces);
  for (const int origin : origins) {
    const RankSlice slice = slice_of(origin);
    for_each_peer_here([&](int peer) {
      if (is_posted) return count_read(slice);
      for (int64_t i = 0; i < num_parts(slice); ++i) {
        const RankSlice relative = part(slice, i);
        sent_sums_.push_back(
            send(peer, Phase::kPassedOn,
                 sums_of(origin).narrow(0, relative.offset, relative.numel)));
      }
    });
  }
}

void OrderedReduction::read_passed_on(int peer) {
  const std::vector<int>& origins = host_.relays().origins_of(peer);
  if (origins.empty()) return;
  const std::byte* posted = await(peer, Phase::kPassedOn);
  for (const int origin : origins) {
    const at::Tensor sums = sums_of(origin);
    if (posted != nullptr) {
      copy_from(posted, sums);
      posted += sums.nbytes();
    } else {
      const RankSlice slice = slice_of(origin);
      for (int64_t i = 0; i < num_parts(slice); ++i) {
        const RankSlice relative = part(slice, i);
        passed_on_.push_back(
            receive(peer, Phase::kPassedOn,
                    sums.narrow(0, relative.offset, relative.numel)));
      }
    }
  }
  host_.release(peer, key_of(Phase::kPassedOn));
}

// ---- The end.

void OrderedReduction::finish(milliseconds timeout) {
  deadline_ = steady_clock::now() + timeout;
  if (has_terms()) {
    find_terms();
    add_terms();
    release_terms();
  }
  if (has_sums() && has_terms()) post_sums();
  if (!in_one_phase_) {  // else it has: a send awaited twice never ends
    for (const auto& messages : outgoing_) {
      for (const Message& message : messages) await(message);
    }
  }
  if (has_sums()) read_sums();  // sums take the place of terms that have left
  for (const Message& message : sums_) await(message);
  if (has_sums()) {
    pass_on_sums();
    for_each_peer_here([&](int peer) { read_passed_on(peer); });
  }
  for (const Message& message : passed_on_) await(message);
  for (const Message& message : sent_sums_) await(message);
}

void OrderedReduction::await(const Message& message) {
  awaited_ = message.peer;
  // Gloo takes 0 and less for its own default.
  const milliseconds patience = std::max(
      milliseconds(1),
      std::chrono::ceil<milliseconds>(deadline_.load() - steady_clock::now()));
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!is_aborted_, "it was aborted");
  }
  TORCH_CHECK(message.work->wait(patience), "it was aborted");
}

bool OrderedReduction::is_overdue() const {
  return steady_clock::now() >= deadline_.load();
}

void OrderedReduction::abort() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_aborted_ = true;
  for (const WorkPtr& work : works_) work->abort();
}

std::string OrderedReduction::describe() const {
  const int awaited = awaited_;
  const char* const kind = call_.kind == Kind::kAllReduce ? "all-reduce "
                           : call_.kind == Kind::kReduceScatter
                               ? "reduce-scatter "
                               : "all-gather ";
  return c10::str(
      kind, number_, " of ", call_.input.numel(), ' ',
      c10::toString(call_.input.scalar_type()),
      awaited < 0 ? ""
                  : c10::str(", waiting for rank ", host_.name_of(awaited)));
}

}  // namespace brigade
