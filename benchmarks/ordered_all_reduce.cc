// Benchmark of the reproducible (rank-order) all-reduce against the process
// group's.
//
//   torchrun --standalone --nproc-per-node 2 --no-python ordered_all_reduce
//       [--rounds 40] [--shared-bytes 268435456]
//
// Each round times one float32 all-reduce of each kind, after a barrier and in
// alternating order. Prints medians and quartiles of rank 0:
//   group     the group's all-reduce
//   ordered   OrderedCollectives::all_reduce()
//   ratio     ordered / group, paired by round
// Ordered sums must equal those of one process bit for bit.

#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <vector>

#include "brigade/benchmarks/support/set_up.h"
#include "brigade/comm/ordered/ordered_collectives.h"
#include "brigade/comm/process_group.h"

namespace brigade::benchmarks {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

at::Tensor values_of(int rank, int64_t numel) {
  return at::arange(numel, at::kFloat).fmod(1000).mul(0.1).add(rank);
}

void measure(const Group& group, OrderedCollectives& collectives, int64_t bytes,
             int rounds) {
  const int64_t numel = bytes / 4;
  const at::Tensor values = values_of(group->getRank(), numel);
  at::Tensor expected = values_of(0, numel);
  for (int rank = 1; rank < group->getSize(); ++rank) {
    expected.add_(values_of(rank, numel));
  }
  std::vector<at::Tensor> tensors = {at::empty_like(values)};
  const auto time = [&](const auto& all_reduce) {
    tensors[0].copy_(values);
    group->barrier()->wait();
    return microseconds(all_reduce);
  };
  const auto time_group = [&] {
    return time([&] { group->allreduce(tensors)->wait(); });
  };
  const auto time_ordered = [&] {
    const double taken =
        time([&] { collectives.all_reduce(tensors[0])->waitAndThrow(); });
    TORCH_CHECK(at::equal(tensors[0], expected), "the ordered all-reduce of ",
                bytes, " bytes differs from the sum in one process");
    return taken;
  };
  time_group();  // warm-up
  time_ordered();
  Samples group_us, ordered_us, ratio;
  for (int round = 0; round < rounds; ++round) {
    if (round % 2 == 0) group_us.push_back(time_group());
    ordered_us.push_back(time_ordered());
    if (round % 2 != 0) group_us.push_back(time_group());
    ratio.push_back(ordered_us.back() / group_us.back());
  }
  if (group->getRank() != 0) return;
  fmt::print("{:>10}{:>26}{:>26}{:>22}\n", bytes, spread(group_us, 0),
             spread(ordered_us, 0), spread(ratio, 2));
  std::fflush(stdout);
}

int run(int argc, char** argv) {
  int rounds = 40;
  int64_t shared_bytes = OrderedCollectives::kSharedBytes;
  CLI::App app(
      "Times the reproducible all-reduce and the process group's all-reduce.");
  app.add_option("--rounds", rounds, "all-reduces of each kind and size")
      ->check(CLI::Range(2, 100000));
  app.add_option("--shared-bytes", shared_bytes,
                 "shared memory of the ranks of one host; 0: use the group's "
                 "collectives instead")
      ->check(CLI::NonNegativeNumber);
  CLI11_PARSE(app, argc, argv);
  GroupScope scope(init_process_group());
  OrderedCollectives collectives(scope.group(), shared_bytes);
  if (scope.group()->getRank() == 0) {
    print_set_up();
    fmt::print("{:>10}{:>26}{:>26}{:>22}\n", "bytes", "group us", "ordered us",
               "ratio");
  }
  for (int64_t bytes = 1 << 10; bytes <= 1 << 26; bytes *= 4) {
    measure(scope.group(), collectives, bytes, rounds);
  }
  return 0;
}

}  // namespace
}  // namespace brigade::benchmarks

int main(int argc, char** argv) { return brigade::benchmarks::run(argc, argv); }
