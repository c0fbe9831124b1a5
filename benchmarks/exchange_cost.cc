// What exchanging statuses costs: the calling thread, until all have answered,
// and beside an all-reduce.
//
//   torchrun --standalone --nproc-per-node 2 --no-python exchange_cost
//       [--exchanges 2000] [--numel 262144]
//
// A row for each of the two transports: "memory" that the ranks of one host
// share, and "group": all-gathers on a subgroup, as between hosts. Times are
// rank 0's, medians and quartiles in microseconds:
//   send     send(), which returns at once: what a backward pays
//   answer   from send() until all statuses are there, back to back
//   bucket   an all-reduce of `numel` floats and its wait
//   beside   what the same takes longer with a status sent before the wait and
//            awaited after it (paired differences)

#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <string>
#include <vector>

#include "brigade/benchmarks/support/set_up.h"
#include "brigade/comm/process_group.h"
#include "brigade/comm/status/rank_status.h"
#include "brigade/comm/status/status_transport.h"

namespace brigade::benchmarks {
namespace {

using Clock = std::chrono::steady_clock;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

void measure(const char* name, const Group& group, StatusTransport& transport,
             int exchanges, int64_t numel) {
  RankStatus own = {.kind = StatusKind::kEnd};
  const auto send = [&] {
    ++own.sequence;
    own.iteration = own.sequence;
    transport.send(own);
  };
  const auto await = [&] {
    const auto by_rank =
        transport.receive(own.sequence, Clock::now() + std::chrono::minutes(1));
    TORCH_CHECK(by_rank.has_value(), "no answer within a minute");
    const absl::Status status = check_statuses(*by_rank);
    TORCH_CHECK(status.ok(), std::string(status.message()));
  };

  Samples sent, answer, bucket, beside;
  for (int i = 0; i < exchanges; ++i) {
    answer.push_back(microseconds([&] {
      sent.push_back(microseconds(send));
      await();
    }));
  }
  std::vector<at::Tensor> tensors = {at::zeros(numel)};
  for (int i = 0; i < exchanges / 10; ++i) {
    bucket.push_back(microseconds([&] { group->allreduce(tensors)->wait(); }));
    const double together = microseconds([&] {
      auto work = group->allreduce(tensors);
      send();
      work->wait();
      await();
    });
    beside.push_back(together - bucket.back());
  }
  if (group->getRank() != 0) return;
  fmt::print("{:<8}", name);
  for (const Samples& samples : {sent, answer, bucket, beside}) {
    fmt::print("{:>26}", spread(samples, 1));
  }
  fmt::print("\n");
}

int run(int argc, char** argv) {
  int exchanges = 2000;
  int64_t numel = 1 << 18;
  CLI::App app("What exchanging statuses costs.");
  app.add_option("--exchanges", exchanges)->check(CLI::Range(10, 1000000));
  app.add_option("--numel", numel)->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  GroupScope scope(init_process_group());
  const Group& group = scope.group();
  if (group->getRank() == 0) {
    print(describe_set_up(argc, argv));
    fmt::print("{:<8}{:>26}{:>26}{:>26}{:>26}\n", "over", "send us",
               "answer us", "bucket us", "beside us");
  }
  if (const auto board = meet_at_status_board(group)) {
    measure("memory", group, *board, exchanges, numel);
  }
  const auto gather = gather_statuses_over(group);
  measure("group", group, *gather, exchanges, numel);
  group->barrier()->wait();  // one that leaves ends what its peers wait for
  return 0;
}

}  // namespace
}  // namespace brigade::benchmarks

int main(int argc, char** argv) { return brigade::benchmarks::run(argc, argv); }
