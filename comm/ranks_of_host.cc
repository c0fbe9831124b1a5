#include "brigade/comm/ranks_of_host.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/liveness_probe.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/errors/ranks_by_value.h"
#include "brigade/comm/errors/shortened_list.h"
#include "brigade/comm/errors/status_bridge.h"
#include "brigade/comm/group/control_device.h"
#include "brigade/comm/ordered/shared_memory.h"

namespace brigade {
namespace {

absl::Status refuse(const std::string& found) {
  return absl::InvalidArgumentError(absl::StrCat(
      "ranks_of_a_host: expected hosts with equally many ranks, next to each "
      "other, found ",
      found,
      ".\nStart as many ranks on each host, numbered host by host, or give a "
      "number of shards."));
}

std::string describe(const std::vector<RanksOfValue<int64_t>>& hosts) {
  return shortened_list(hosts.size(), [&](size_t host) {
    return absl::StrCat(describe_ranks(hosts[host].ranks), " on ",
                        host == 0 ? "one host" : "another");
  });
}

std::vector<int64_t> hosts_of(c10d::ProcessGroup& group) {
  const at::TensorOptions on =
      at::TensorOptions(at::kLong).device(control_device(group));
  std::vector<at::Tensor> inputs = {
      at::full({1}, static_cast<int64_t>(SharedMemory::host()), on)};
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (int rank = 0; rank < group.getSize(); ++rank) {
    outputs.front().push_back(at::empty({1}, on));
  }
  try {
    group.allgather(outputs, inputs)->wait();
  } catch (...) {
    throw_peer_error(
        c10::str("ranks_of_a_host: rank ", group.getRank(), " of ",
                 group.getSize(), " could not tell the others its host"),
        std::current_exception());
  }
  std::vector<int64_t> hosts;
  for (const at::Tensor& output : outputs.front()) {
    hosts.push_back(output.item<int64_t>());
  }
  return hosts;
}

}  // namespace

absl::StatusOr<int> ranks_of_a_host(const std::vector<int64_t>& host_by_rank) {
  const auto unknown = std::ranges::find(host_by_rank, 0);
  if (unknown != host_by_rank.end()) {
    return refuse(absl::StrCat("that rank ", unknown - host_by_rank.begin(),
                               " does not know its host"));
  }
  const std::vector<RanksOfValue<int64_t>> hosts = ranks_by_value(host_by_rank);
  const size_t number = hosts.front().ranks.size();
  for (const RanksOfValue<int64_t>& host : hosts) {
    const auto& ranks = host.ranks;
    const bool are_neighbours =
        ranks.back() - ranks.front() + 1 == static_cast<int>(ranks.size());
    if (ranks.size() != number || !are_neighbours) {
      return refuse(describe(hosts));
    }
  }
  return static_cast<int>(number);
}

int ranks_of_a_host(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  if (group->getSize() == 1) return 1;
  return value_or_throw(ranks_of_a_host(hosts_of(*group)));
}

}  // namespace brigade
