#include "brigade/comm/ordered/ordered_collectives.h"

#include <ATen/core/List.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "brigade/comm/backends/gloo_backend.h"
#include "brigade/comm/backends/sigpipe_block.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/control_store.h"
#include "brigade/comm/group/group_timeout.h"
#include "brigade/comm/ordered/host_messages.h"
#include "brigade/comm/ordered/ordered_reduction.h"
#include "brigade/comm/ordered/ordered_sum.h"

namespace brigade {
namespace {

using c10::ivalue::Future;
using std::chrono::milliseconds;

constexpr int kNumWorkers = 2;

// Longer than anybody waits: what ends it is a message, a failure or an abort.
constexpr milliseconds kForEver = std::chrono::hours(24 * 365);

c10::intrusive_ptr<Future> make_future() {
  return c10::make_intrusive<Future>(
      c10::ListType::create(c10::TensorType::get()));
}

// Whether `output` shares memory with `input` elsewhere than from its element
// `offset` on.  REQUIRES: both contiguous and of one dtype.
bool overlaps_elsewhere(const at::Tensor& input, int64_t offset,
                        const at::Tensor& output) {
  const auto begin_of = [](const at::Tensor& tensor) {
    return static_cast<const char*>(tensor.const_data_ptr());
  };
  const char* const input_begin = begin_of(input);
  const char* const output_begin = begin_of(output);
  const std::less<> before;
  return output.numel() > 0 &&
         before(input_begin, output_begin + output.nbytes()) &&
         before(output_begin, input_begin + input.nbytes()) &&
         output_begin != input_begin + offset * input.element_size();
}

void complete(Future& future, const at::Tensor& result) {
  future.markCompleted(c10::IValue(std::vector<at::Tensor>{result}));
}

void check_layout(std::string_view name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(
      tensor.defined() && tensor.layout() == at::kStrided && tensor.is_cpu() &&
          tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(),
      "ordered collectives: expected ", name,
      " to be a dense contiguous CPU tensor with values of its "
      "own, found ",
      tensor.defined() ? tensor.toString() : "an undefined one",
      tensor.defined() && tensor.layout() == at::kStrided
          ? c10::str(" of sizes ", tensor.sizes(), " and strides ",
                     tensor.strides(), " on ", tensor.device())
          : "",
      ".\nGive its contiguous() or resolve_conj() copy.");
}

void check_tensor(std::string_view name, const at::Tensor& tensor) {
  check_layout(name, tensor);
  TORCH_CHECK_TYPE(can_add(tensor.scalar_type()),
                   "ordered collectives: can't add ", tensor.scalar_type(),
                   ".\nReduce a copy in a dtype that can be added.");
}

void check_scale(std::optional<double> scale, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(!scale || !at::isIntegralType(dtype, /*includeBool=*/true),
                    "ordered collectives: expected no scale for ", dtype,
                    ", found ", scale.value_or(1),
                    ".\nScale a floating-point copy.");
}

}  // namespace

OrderedCollectives::OrderedCollectives(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, OrderedOptions options,
    std::optional<ChannelIdentity> identity)
    : rank_(group->getRank()),
      size_(group->getSize()),
      names_(RankNames::of(*group)),
      group_size_(options.group_size.value_or(size_)),
      part_bytes_(options.part_bytes),
      timeout_(group_timeout(*group)),
      process_(getpid()) {
  TORCH_CHECK_VALUE(group_size_ > 0 && size_ % group_size_ == 0,
                    "ordered collectives: expected a group size that divides "
                    "the number of ranks, ",
                    size_, ", found ", group_size_,
                    ".\nGive the size of a row of the mesh.");
  TORCH_CHECK_VALUE(part_bytes_ > 0,
                    "ordered collectives: expected parts of at least 1 byte, "
                    "found ",
                    part_bytes_, ".\nGive the size of a message.");
  TORCH_CHECK_VALUE(options.shared_bytes >= 0,
                    "ordered collectives: expected memory of at least 0 bytes "
                    "to share, found ",
                    options.shared_bytes, ".\nGive 0 to share none.");
  if (size_ == 1) return;
  const auto store = control_store(*group);
  TORCH_CHECK_VALUE(store, "ordered collectives: the group of ", size_,
                    " ranks has no store to connect them by.\nUse a group made "
                    "by init_process_group().");
  if (!identity) identity = ChannelIdentity::made_together(group);
  const SigpipeBlock inherited_by_its_threads;
  // What a profiler would see begin here may end when it is gone.
  const at::DisableRecordFunctionGuard not_profiled;
  try {
    backend_ = make_gloo_backend_beside(
        *group,
        c10::make_intrusive<c10d::PrefixStore>(
            c10::str("brigade/ordered/", identity->number()), store),
        timeout_);
    // Gloo takes connections for broken that end while others are made.
    backend_->barrier()->wait();
    host_ = std::make_unique<HostMessages>(
        *backend_, static_cast<size_t>(options.shared_bytes), options.host,
        names_);
    std::vector<at::Tensor> goodbye = {at::empty({1}, at::kByte)};
    departure_ = backend_->recv(goodbye, (rank_ + 1) % size_,
                                OrderedReduction::kGoodbyeTag);
  } catch (...) {
    throw_peer_error(
        c10::str("ordered collectives: ", names_.describe(rank_, size_),
                 " could not connect to the others"),
        std::current_exception());
  }
  for (int i = 0; i < kNumWorkers; ++i)
    threads_.emplace_back([this] { work(); });
  threads_.emplace_back([this] { watch(); });
}

OrderedCollectives::~OrderedCollectives() {
  if (!backend_) return;
  if (getpid() != process_) {
    // Connections and threads are the parent's.  The latter seem to wait here
    // too, and the end of what they wait for would wait for them.
    new auto(std::move(backend_));
    new auto(std::move(departure_));
    new auto(std::move(in_flight_));
    new auto(std::move(abandoned_));
    new auto(std::move(host_));
    new auto(std::move(threads_));
    new auto(std::move(changed_));
    return;
  }
  bool is_idle = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_idle = in_flight_.empty() && !failure_;
    is_ending_ = true;
    // Of what callbacks launch that still run.
    if (is_idle) failure_ = failure_of("it has ended", nullptr);
  }
  if (is_idle) {
    say_goodbye();
  } else {
    fail("it ended with reductions in flight", nullptr);
  }
  changed_->notify_all();
  departure_->abort();
  for (std::thread& thread : threads_) thread.join();
  backend_.reset();
}

OrderedCollectives::FuturePtr OrderedCollectives::all_reduce(
    const at::Tensor& tensor, std::optional<double> scale) {
  check_process();
  check_tensor("the input", tensor);
  check_scale(scale, tensor.scalar_type());
  return launch(OrderedKind::kAllReduce, tensor, tensor, scale);
}

OrderedCollectives::FuturePtr OrderedCollectives::reduce_scatter(
    const at::Tensor& input, const at::Tensor& output,
    std::optional<double> scale) {
  check_reduce_scatter(input, output, scale);
  return launch(OrderedKind::kReduceScatter, input, output, scale);
}

OrderedCollectives::FuturePtr OrderedCollectives::all_gather(
    const at::Tensor& whole) {
  check_process();
  check_layout("the output", whole);
  return launch(OrderedKind::kAllGather, whole, whole, std::nullopt);
}

void OrderedCollectives::check_reduce_scatter(
    const at::Tensor& input, const at::Tensor& output,
    std::optional<double> scale) const {
  check_process();
  check_tensor("the input", input);
  check_tensor("the output", output);
  const RankSlice own = slice(input.numel());
  TORCH_CHECK_VALUE(output.numel() == own.numel &&
                        output.scalar_type() == input.scalar_type(),
                    "ordered reduce-scatter: expected an output of ", own.numel,
                    ' ', input.scalar_type(), ", rank ", rank_,
                    "'s slice of the input, found ", output.numel(), ' ',
                    output.scalar_type(),
                    ".\nMake it as long as slice() says.");
  TORCH_CHECK_VALUE(
      !overlaps_elsewhere(input, own.offset, output),
      "ordered reduce-scatter: expected an output that is rank ", rank_,
      "'s slice of the input or shares no memory with it, found another part "
      "of it.\nGive memory of its own.");
  check_scale(scale, input.scalar_type());
}

OrderedCollectives::FuturePtr OrderedCollectives::launch(
    OrderedKind kind, const at::Tensor& input, const at::Tensor& output,
    std::optional<double> scale) {
  const FuturePtr future = make_future();
  if (input.numel() == 0) {
    complete(*future, output);
    return future;
  }
  const OrderedReduction::Call call = {.kind = kind,
                                       .input = input.detach().view(-1),
                                       .output = output.detach().view(-1),
                                       .scale = scale,
                                       .result = output};
  Launched launched = {.reduction = nullptr, .future = future};
  std::exception_ptr failure;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++num_launches_;
    failure = failure_;
    if (backend_ && !failure) {
      launched.reduction = std::make_shared<OrderedReduction>(
          backend_, *host_, call, group_size_, part_bytes_, num_launches_);
      in_flight_.push_back(launched.reduction);
    }
  }
  if (failure) {
    future->setError(failure);
  } else if (backend_) {
    post(launched);
  } else {
    if (kind != OrderedKind::kAllGather) {
      ordered_sum({{call.input}}, 1, scale, call.output);
    }
    complete(*future, output);
  }
  return future;
}

void OrderedCollectives::post(const Launched& launched) {
  try {
    const SigpipeBlock writes_to_peers;
    launched.reduction->launch(
        take_scratch(launched.reduction->scratch_bytes()), timeout_);
  } catch (...) {
    fail(launched.reduction->describe(), std::current_exception());
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back(launched);
  changed_->notify_one();
}

void OrderedCollectives::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_->wait(lock, [&] { return is_ending_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Launched launched = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    finish(std::exchange(launched, {}));
    lock.lock();
  }
}

void OrderedCollectives::finish(Launched launched) {
  OrderedReduction& reduction = *launched.reduction;
  std::exception_ptr failure;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    failure = failure_;
  }
  if (!failure) {
    try {
      reduction.finish(timeout_);
    } catch (...) {
      failure = fail(reduction.describe(), std::current_exception());
    }
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase(in_flight_, launched.reduction);
    if (failure) {
      abandoned_.push_back(launched.reduction);
    } else {
      free_scratch_.push_back(reduction.take_scratch());
      sent_bytes_[static_cast<size_t>(reduction.call().kind)] +=
          reduction.sent_bytes();
    }
  }
  if (failure) {
    launched.future->setError(failure);
  } else {
    const at::Tensor result = reduction.call().result;
    // Views of it, by which others would seem to use its memory.
    launched.reduction = nullptr;
    complete(*launched.future, result);
  }
}

// The largest that is free, so that there are never more than were in use at
// once, each as large as the largest that it was used for.
at::Tensor OrderedCollectives::take_scratch(int64_t bytes) {
  at::Tensor scratch;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!free_scratch_.empty()) {
      const auto largest = std::ranges::max_element(
          free_scratch_, {},
          [](const at::Tensor& free) { return free.numel(); });
      scratch = std::move(*largest);
      free_scratch_.erase(largest);
    }
  }
  if (!scratch.defined() || scratch.numel() < bytes) {
    scratch = at::empty({bytes}, at::kByte);
  }
  return scratch;
}

void OrderedCollectives::watch() {
  try {
    departure_->wait(kForEver);  // it has left, or this rank ends
  } catch (...) {
    fail(describe_loss(), std::current_exception());
  }
}

// Gloo closes all connections when a wait times out: then the next rank is not
// the one to blame.
std::string OrderedCollectives::describe_loss() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& reduction : in_flight_) {
    if (reduction->is_overdue()) return reduction->describe();
  }
  const std::string lost = c10::str("rank ", names_[(rank_ + 1) % size_],
                                    " is lost, or has lost another one");
  if (in_flight_.empty()) return lost;
  return c10::str(lost, ", beside ", in_flight_.front()->describe());
}

// All that peers wait for has been sent before, so its watcher need not end
// what is in flight there.
//
// A watcher that leaves at the same time closes its connection, of which Gloo
// tells those that wait to receive, but no send that it has begun to write.
void OrderedCollectives::say_goodbye() {
  const int watcher = (rank_ + size_ - 1) % size_;
  std::vector<at::Tensor> byte = {at::zeros({1}, at::kByte)};
  std::vector<at::Tensor> never_sent = {at::zeros({1}, at::kByte)};
  try {
    const SigpipeBlock writes_to_peers;
    const auto end_of_watcher =
        backend_->recv(never_sent, watcher, OrderedReduction::kSilentTag);
    const auto goodbye =
        backend_->send(byte, watcher, OrderedReduction::kGoodbyeTag);
    std::thread listener([&] {
      try {
        end_of_watcher->wait(kForEver);
      } catch (const std::exception&) {
        goodbye->abort();
      }
    });
    const auto stop_listening = c10::make_scope_exit([&] {
      end_of_watcher->abort();
      listener.join();
    });
    goodbye->wait(timeout_);
  } catch (const std::exception&) {
    // The watcher has gone before.
  }
}

std::exception_ptr OrderedCollectives::failure_of(
    std::string_view context, const std::exception_ptr& cause) const noexcept {
  const std::string here =
      c10::str("ordered collectives on ", names_.describe(rank_, size_));
  try {
    if (cause) throw_peer_error(c10::str(here, ": ", context), cause);
    throw_peer_error(here, std::make_exception_ptr(
                               std::runtime_error(std::string(context))));
  } catch (...) {
    return std::current_exception();
  }
}

std::exception_ptr OrderedCollectives::fail(
    std::string_view context, const std::exception_ptr& cause) noexcept {
  std::vector<std::shared_ptr<OrderedReduction>> in_flight;
  std::exception_ptr failure;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) return failure_;
    failure = failure_ = failure_of(context, cause);
    in_flight.assign(in_flight_.begin(), in_flight_.end());
  }
  if (!backend_) return failure;
  if (host_) host_->abort();
  try {
    const SigpipeBlock writes_to_peers;
    backend_->abort();
  } catch (const std::exception&) {
    // What waits for its peers ends by what follows.
  }
  for (const auto& reduction : in_flight) reduction->abort();
  return failure;
}

void OrderedCollectives::abort(const std::exception_ptr& cause) noexcept {
  fail("it was aborted", cause);
}

bool OrderedCollectives::is_on_one_host() const {
  return !host_ || host_->joins_all();
}

bool OrderedCollectives::has_failed() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_ != nullptr;
}

int64_t OrderedCollectives::num_launches() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_launches_;
}

int64_t OrderedCollectives::sent_bytes(OrderedKind kind) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return sent_bytes_[static_cast<size_t>(kind)];
}

void OrderedCollectives::check_process() const {
  TORCH_CHECK(getpid() == process_, "OrderedCollectives: made in process ",
              process_, ", it can't be used in process ", getpid(),
              ", which was forked from that.\nMake the group and what uses it "
              "after the fork.");
}

}  // namespace brigade
