// Random programs, one case each: what is run, and on which network.

#ifndef BRIGADE_TESTS_FSDP_FUZZ_CASE_H_
#define BRIGADE_TESTS_FSDP_FUZZ_CASE_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "brigade/fsdp/sharded_root.h"
#include "brigade/tests/fsdp/fuzz_net.h"

namespace brigade::testing {

struct BlockCall {
  size_t block;
  uint32_t uses;
};

// What one rank runs. Outputs: the head's, and what each call returned.
struct Branch {
  std::vector<BlockCall> calls = {};
  uint32_t uses_of_head;
  std::vector<size_t> in_loss;  // outputs
  bool takes_input_gradient;
  int64_t rows;
  uint64_t seed;
};

// By rank.
using Forward = std::vector<Branch>;

enum class Kind {
  kForward,
  kBackward,  // of the sum of several forwards' losses
  kEvaluate,
  kDrop,  // a forward whose backward never comes
  kZero,
  kSgd,
  kFailingForward,
  kFailingBackward,
  kReadWhole,
  kUnshard,  // one unit, whose index it is
  kScale,
  kClip,
  kSetReshards,
  kMeet,  // whoever still needs a unit gets it before ranks go on
};

struct Operation {
  Kind kind;
  std::vector<size_t> forwards = {};  // by number
  bool flag = false;  // synchronizes; zeroes in place; reshards, again
  int rank = 0;       // that fails
  size_t place = 0;   // where it fails: behind the call, or in it
  size_t index = 0;   // parameter, of all; unit
  uint32_t adding_up =
      0;  // units that a backward does not reduce, one bit each
  std::optional<int> reshards_to = std::nullopt;
  double max_norm = 0;  // clips
  double p = 2;
};

struct Action {
  std::vector<Operation> operations;
};

struct Case {
  uint64_t seed;
  int world_size;

  // Calls of units in any order and number. Else ranks differ in what they
  // leave out, and a forward calls each unit once at most.
  bool is_wild;
  ShardingOptions options;
  NetPlan net;
  std::vector<Forward> forwards;
  std::vector<Action> actions;
};

// To look at one failure: the actions of its program to run, one bit each.
constexpr uint32_t kOnlyActions = ~0u;

std::vector<Action> actions_of(const Case& c);

Case draw_case(uint64_t seed, int world_size);

std::string describe(const Operation& operation);
std::string describe(const Case& c);

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_FSDP_FUZZ_CASE_H_
