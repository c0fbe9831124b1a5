#include "brigade/comm/ordered/ordered_collectives.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/core/List.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <c10/util/complex.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <set>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <type_traits>
#include <utility>
#include <vector>

#include "brigade/comm/backends/gloo_backend.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/group_collectives.h"
#include "brigade/comm/streams/streams.h"

namespace brigade {
namespace {

using c10::ivalue::Future;

// ---- Sums.

constexpr int64_t kBlock = 1024;  // elements that fit into the cache

// The type in which T is summed: unsigned for integers, because signed overflow
// is undefined; wider for float16, so that it is rounded once.
template <typename T, typename = void>
struct Accumulated {
  using Type = at::opmath_type<T>;
};
template <typename T>
struct Accumulated<T, std::enable_if_t<std::is_integral_v<T>>> {
  using Type = std::make_unsigned_t<T>;
};

template <typename T>
void add_blocks(const std::vector<const T*>& terms, std::optional<double> scale,
                int64_t numel, T* out) {
  using Sum = typename Accumulated<T>::Type;
  using Real = typename c10::scalar_value_type<Sum>::type;
  std::array<Sum, kBlock> total;
  for (int64_t begin = 0; begin < numel; begin += kBlock) {
    const int64_t length = std::min(kBlock, numel - begin);
    for (int64_t i = 0; i < length; ++i) {
      total[i] = static_cast<Sum>(terms.front()[begin + i]);
    }
    for (size_t t = 1; t < terms.size(); ++t) {
      const T* const term = terms[t] + begin;
      for (int64_t i = 0; i < length; ++i) {
        total[i] = static_cast<Sum>(total[i] + static_cast<Sum>(term[i]));
      }
    }
    if constexpr (!std::is_integral_v<T>) {
      if (scale) {
        const Real factor = static_cast<Real>(*scale);
        for (int64_t i = 0; i < length; ++i) total[i] *= factor;
      }
    }
    for (int64_t i = 0; i < length; ++i) {
      out[begin + i] = static_cast<T>(total[i]);
    }
  }
}

// ---- Collectives.

constexpr int kNumThreads = 2;

// Smallest region per rank, for pieces of 4 elements of each rank.
constexpr int64_t kLeastBytesPerRank = 256;

c10::intrusive_ptr<Future> make_future() {
  return c10::make_intrusive<Future>(
      c10::ListType::create(c10::TensorType::get()));
}

// For a world of 1.
void finish_alone(const OrderedCall& call) {
  if (call.kind == OrderedKind::kAllGather) return;
  ordered_sum({{call.input}}, call.scale, call.output);
}

// By OrderedKind.
constexpr std::array kNames = {"all-reduce", "reduce-scatter", "all-gather"};

c10::intrusive_ptr<c10d::Backend> make_backend(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  const int64_t number = channel_number(group);
  return make_second_gloo_backend(
      *group,
      c10::make_intrusive<c10d::PrefixStore>(
          c10::str("brigade/ordered/", number), control_store(*group)),
      group_timeout(*group));
}

void check_layout(std::string_view name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(
      tensor.defined() && tensor.layout() == at::kStrided && tensor.is_cpu() &&
          tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(),
      "ordered collectives: expected ", name,
      " to be a dense contiguous CPU tensor without lazy "
      "conjugation or negation, found ",
      tensor.defined() ? tensor.toString() : "an undefined one",
      tensor.defined() && tensor.layout() == at::kStrided
          ? c10::str(" of sizes ", tensor.sizes(), " and strides ",
                     tensor.strides(), " on ", tensor.device())
          : "",
      ".\nPass its contiguous(), resolve_conj() or resolve_neg() copy.");
}

void check_tensor(std::string_view name, const at::Tensor& tensor) {
  check_layout(name, tensor);
  TORCH_CHECK_TYPE(can_add(tensor.scalar_type()),
                   "ordered collectives: expected ", name,
                   " in an integer, floating-point or complex dtype, found ",
                   tensor.scalar_type(), ".\nReduce a copy in such a dtype.");
}

}  // namespace

void ordered_sum(std::span<const at::Tensor> terms, std::optional<double> scale,
                 const at::Tensor& out) {
  TORCH_INTERNAL_ASSERT(!terms.empty());
  AT_DISPATCH_ALL_TYPES_AND_COMPLEX_AND2(
      at::kHalf, at::kBFloat16, out.scalar_type(), "ordered_sum", [&] {
        std::vector<const scalar_t*> pointers;
        for (const at::Tensor& term : terms) {
          TORCH_INTERNAL_ASSERT(term.numel() == out.numel());
          pointers.push_back(term.const_data_ptr<scalar_t>());
        }
        add_blocks(pointers, scale, out.numel(), out.data_ptr<scalar_t>());
      });
}

at::Tensor empty_sum(int64_t numel, const at::Tensor& like) {
  const at::ScalarType dtype = like.scalar_type();
  const bool is_short = dtype == at::kHalf || dtype == at::kBFloat16;
  return at::empty({numel},
                   like.options().dtype(is_short ? at::kFloat : dtype));
}

void sum_in_order(const at::Tensor& terms, int count, const at::Tensor& sum) {
  const int64_t numel = sum.numel();
  sum.copy_(terms.narrow(0, 0, numel));
  for (int i = 1; i < count; ++i) sum.add_(terms.narrow(0, i * numel, numel));
}

// All instances for one group in this process.
struct OrderedCollectives::OfGroup {
  std::mutex mutex;
  std::set<OrderedCollectives*> all;  // guarded by mutex
};

OrderedCollectives::OrderedCollectives(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, int64_t shared_bytes,
    int64_t host)
    : ranks_({.rank = group->getRank(),
              .size = group->getSize(),
              .timeout = group_timeout(*group),
              .names = RankNames::of(*group)}),
      process_(getpid()),
      of_group_(per_group<OfGroup>(group)) {
  if (ranks_.size == 1) return;
  TORCH_CHECK_VALUE(
      group->getStore(), "ordered collectives: the group of ", ranks_.size,
      " ranks has no store.\nUse a group of init_process_group().");
  // A profiler that sees an event begin here may be gone when it ends.
  const at::DisableRecordFunctionGuard not_profiled;
  try {
    const auto room = static_cast<size_t>(
        std::max(shared_bytes, ranks_.size * kLeastBytesPerRank));
    auto segment = SharedSegment::make(
        group, shared_bytes_per_rank(room),
        shared_bytes == 0 ? 0 : SharedSegment::host() + host);
    is_on_one_host_ = segment != nullptr;
    if (segment) {
      transport_ = make_shared_transport(std::move(segment), room, ranks_);
    } else {
      ranks_.ranks_per_host = std::max(
          1,
          ranks_per_host(all_gather_ints(group, {SharedSegment::host() + host},
                                         "could not exchange host ids")));
      transport_ = make_group_transport(make_backend(group), ranks_);
    }
  } catch (...) {
    throw_peer_error(c10::str("ordered collectives: ",
                              ranks_.names.describe(ranks_.rank, ranks_.size),
                              " could not connect to the other ranks"),
                     std::current_exception());
  }
  for (int i = 0; i < kNumThreads; ++i) {
    threads_.emplace_back([this] { work(); });
  }
  const std::lock_guard<std::mutex> lock(of_group_->mutex);
  of_group_->all.insert(this);
}

OrderedCollectives::~OrderedCollectives() {
  if (!transport_) return;
  if (getpid() != process_) {
    // The parent owns connections and threads: leaks them, since waiting for
    // them would never end.
    new auto(std::move(transport_));
    new auto(std::move(queue_));
    new auto(std::move(threads_));
    new auto(std::move(changed_));
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(of_group_->mutex);
    of_group_->all.erase(this);
  }
  bool is_idle = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_ending_ = true;
    is_idle = num_in_flight_ == 0 && !failure_;
    // For calls that running callbacks still make.
    if (is_idle) failure_ = failure_of("it has ended", nullptr);
  }
  if (!is_idle) fail("it ended with collectives in flight", nullptr);
  changed_->notify_all();
  for (std::thread& thread : threads_) thread.join();
}

OrderedCollectives::FuturePtr OrderedCollectives::all_reduce(
    const at::Tensor& tensor, std::optional<double> scale,
    const FuturePtr& after) {
  check_process("OrderedCollectives", process_);
  check_tensor("the input", tensor);
  const at::Tensor flat = tensor.detach().view(-1);
  return launch({.kind = OrderedKind::kAllReduce,
                 .input = flat,
                 .output = flat,
                 .scale = scale,
                 .after = after},
                tensor);
}

OrderedCollectives::FuturePtr OrderedCollectives::reduce_scatter(
    const at::Tensor& input, const at::Tensor& output,
    std::optional<double> scale) {
  check_process("OrderedCollectives", process_);
  check_tensor("the input", input);
  check_tensor("the output", output);
  TORCH_INTERNAL_ASSERT(output.numel() == slice(input.numel()).numel &&
                        output.scalar_type() == input.scalar_type());
  return launch({.kind = OrderedKind::kReduceScatter,
                 .input = input.detach().view(-1),
                 .output = output.detach().view(-1),
                 .scale = scale,
                 .after = {}},
                output);
}

OrderedCollectives::FuturePtr OrderedCollectives::all_gather(
    const at::Tensor& whole) {
  check_process("OrderedCollectives", process_);
  check_layout("the output", whole);
  const at::Tensor flat = whole.detach().view(-1);
  return launch({.kind = OrderedKind::kAllGather,
                 .input = flat,
                 .output = flat,
                 .scale = {},
                 .after = {}},
                whole);
}

OrderedCollectives::FuturePtr OrderedCollectives::launch(
    OrderedCall call, const at::Tensor& result) {
  if (call.input.numel() == 0) return completed_future({result});
  const FuturePtr future = make_future();
  if (!transport_) {
    if (!call.after) {
      finish_alone(call);
      return completed_future({result});
    }
    return call.after->then(
        [call, result](Future& done) {
          done.value();  // throws its error
          finish_alone(call);
          return c10::IValue(std::vector<at::Tensor>{result});
        },
        future->elementType());
  }
  InFlight launched = {.number = 0,
                       .call = std::move(call),
                       .operation = nullptr,
                       .result = result,
                       .future = future};
  std::exception_ptr error;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    launched.number = ++num_launches_;
    error = failure_;
  }
  try {
    if (!error) launched.operation = transport_->start(launched.call);
  } catch (...) {
    error = fail(describe(launched), std::current_exception());
  }
  if (error) {
    future->setError(error);
    return future;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  ++num_in_flight_;
  queue_.push_back(std::move(launched));
  changed_->notify_one();
  return future;
}

void OrderedCollectives::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_->wait(lock, [&] { return is_ending_ || !queue_.empty(); });
    if (queue_.empty()) return;
    InFlight launched = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    finish(std::move(launched));
    lock.lock();
  }
}

void OrderedCollectives::finish(InFlight launched) {
  std::exception_ptr error = failure();
  if (!error) {
    try {
      launched.operation->finish();
    } catch (...) {
      error = fail(describe(launched), std::current_exception());
    }
  }
  // When the future is complete, it holds the only reference to the result.
  launched.operation = nullptr;
  launched.call = {};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    --num_in_flight_;
  }
  const FuturePtr future = std::move(launched.future);
  if (error) {
    future->setError(error);
  } else {
    future->markCompleted(
        c10::IValue(std::vector<at::Tensor>{std::move(launched.result)}));
  }
}

std::exception_ptr OrderedCollectives::failure_of(
    std::string_view context, const std::exception_ptr& cause) const noexcept {
  const std::string here =
      c10::str("ordered collectives on ",
               ranks_.names.describe(ranks_.rank, ranks_.size));
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
  std::exception_ptr failure;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) return failure_;
    failure = failure_ = failure_of(context, cause);
  }
  if (!transport_) return failure;
  try {
    transport_->abort(c10::str(
        "rank ", ranks_.names[ranks_.rank],
        " has failed: ", cause ? message_of(cause) : std::string(context)));
  } catch (const std::exception&) {
    // Peers then wait for their timeout.
  }
  return failure;
}

void OrderedCollectives::abort(const std::exception_ptr& cause) noexcept {
  fail("it was aborted", cause);
}

void OrderedCollectives::abort_all_of(const c10d::ProcessGroup& group,
                                      const std::exception_ptr& cause) {
  const std::shared_ptr<OfGroup> found = find_per_group<OfGroup>(group);
  if (!found) return;
  const std::lock_guard<std::mutex> lock(found->mutex);
  for (OrderedCollectives* const collectives : found->all) {
    collectives->abort(cause);
  }
}

std::string OrderedCollectives::describe(const InFlight& launched) const {
  const OrderedCall& call = launched.call;
  const int awaited = launched.operation ? launched.operation->awaited() : -1;
  return c10::str(
      kNames[static_cast<size_t>(call.kind)], ' ', launched.number, " of ",
      call.input.numel(), ' ', c10::toString(call.input.scalar_type()),
      awaited < 0 ? ""
                  : c10::str(", waiting for rank ", ranks_.names[awaited]));
}

std::exception_ptr OrderedCollectives::failure() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

}  // namespace brigade
