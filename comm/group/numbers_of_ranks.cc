#include "brigade/comm/group/numbers_of_ranks.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <exception>

#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/control_device.h"

namespace brigade {

std::vector<int64_t> numbers_of_ranks(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const std::vector<int64_t>& own, const char* doing) {
  if (group->getSize() == 1) return own;
  const c10::Device device = control_device(*group);
  std::vector<at::Tensor> inputs = {at::tensor(own).to(device)};
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (int rank = 0; rank < group->getSize(); ++rank) {
    outputs.front().push_back(at::empty_like(inputs.front()));
  }
  try {
    group->allgather(outputs, inputs)->wait();
  } catch (...) {
    throw_peer_error(c10::str("rank ", group->getRank(), " of ",
                              group->getSize(), " ", doing),
                     std::current_exception());
  }
  std::vector<int64_t> numbers;
  for (const at::Tensor& output : outputs.front()) {
    const at::Tensor here = output.cpu();
    const auto* const begin = here.const_data_ptr<int64_t>();
    numbers.insert(numbers.end(), begin, begin + own.size());
  }
  return numbers;
}

}  // namespace brigade
