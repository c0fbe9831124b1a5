// A random program on a sharded model, drawn from a seed: a module tree, which
// of it are units, options, and a list of operations.

#ifndef BRIGADE_TESTS_FSDP_RANDOM_SHARDED_PROGRAM_H_
#define BRIGADE_TESTS_FSDP_RANDOM_SHARDED_PROGRAM_H_

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "brigade/fsdp/fully_shard_options.h"

namespace brigade {
namespace sharded_programs_test {

struct BlockPlan {
  bool is_unit;
  bool is_inner_unit;
  bool is_tied;  // inner has the block's weight
  bool is_bias_frozen;
  at::ScalarType dtype, bias_dtype;
};

struct Call {
  size_t block;
  bool uses_norm, uses_inner;
};

// Calls in one checkpoint, or none.
struct CallGroup {
  std::vector<Call> calls;
  bool is_checkpointed;
};

struct Path {
  std::vector<CallGroup> groups;
  bool uses_rare;   // a parameter of the outermost unit
  bool keeps_view;  // of the first block's weight, to the forward's end
};

using Paths = std::vector<Path>;  // by rank

enum class Kind {
  kForward,
  kBackward,  // of the sum of some forwards' losses
  kInputGradient,
  kDropForwards,
  kEvaluate,
  kZeroGrad,
  kOptimizerStep,
  kClip,
  kSynchronize,  // or not
  kReduce,
  kUnevenStep,  // some ranks without data
  kUnshard,
  kReshard,
  kFailForward,
  kFailBackward,
  kFreeze,  // or thaw
  kChangeSettings,
};

struct Operation {
  Kind kind;
  Paths paths = {};
  std::vector<size_t> forwards = {};  // of those that are open
  size_t loss = 0;  // backward: of which of the two losses, 2: of both
  bool flag = false;
  bool is_on_thread = false;
  int rank = 0;
  size_t index = 0;
  std::vector<bool> has_data = {};
  uint64_t seed = 0;
};

struct Plan {
  uint64_t seed;
  int world_size;
  at::ScalarType dtype;
  bool is_exact;  // all in float64
  std::vector<BlockPlan> blocks;
  bool has_joint_norms;
  bool is_adamw;
  bool is_optimizer_first;
  FullyShardOptions options;
  size_t max_reducing;
  std::vector<Operation> operations;
};

Plan make_plan(uint64_t seed);

std::string describe(const Plan& plan);
std::string describe(const Operation& op);

}  // namespace sharded_programs_test
}  // namespace brigade

#endif  // BRIGADE_TESTS_FSDP_RANDOM_SHARDED_PROGRAM_H_
