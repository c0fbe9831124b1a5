// A rank runs a program, and notes what it sees behind each operation.

#ifndef BRIGADE_TESTS_FSDP_FUZZ_RUN_H_
#define BRIGADE_TESTS_FSDP_FUZZ_RUN_H_

#include <torch/torch.h>

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/fsdp/sharded_root.h"
#include "brigade/tests/fsdp/fuzz_case.h"

namespace brigade::testing {

// What a rank sees behind an operation.
struct Sight {
  std::vector<at::Tensor> values;  // of shards
  std::vector<at::Tensor> gradients;
  std::vector<at::Tensor> outputs;  // or inputs' gradients, or parameters
  double norm = 0;
  std::string error;
};

struct Record {
  std::vector<ShardRange> ranges;  // by parameter
  std::vector<Sight> sights;
  std::string failure;  // that ended the rank
};

// Errors that a program expects are in the record; others are thrown, too.
void run_on_rank(const Case& c,
                 const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                 Record& record);

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_FSDP_FUZZ_RUN_H_
