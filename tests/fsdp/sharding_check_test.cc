// What can't be sharded on one rank is the same error on all, and changes
// nothing.

#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "brigade/fsdp/sharded_root.h"
#include "brigade/tests/fsdp/message_of_call.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace sharding_check_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

struct BadParameter {
  std::string words;
  std::function<at::Tensor()> make;
};

const std::vector<BadParameter>& bad_parameters() {
  static const auto& all = *new std::vector<BadParameter>{
      {"undefined", [] { return at::Tensor(); }},
      {"on meta", [] { return torch::empty({3}, at::kMeta); }},
      {"not dense", [] { return torch::eye(3).to_sparse(); }},
      {"computed from others",
       [] { return torch::ones({3}).requires_grad_() * 2; }},
  };
  return all;
}

TEST(ShardingCheckTest, ABadParameterOnOneRankIsAnErrorOnAll) {
  run_ranks(2, [](const Group& group) {
    for (const BadParameter& bad : bad_parameters()) {
      SCOPED_TRACE(bad.words);
      const at::Tensor good = torch::ones({4}).requires_grad_();
      const at::Tensor second = group->getRank() == 1
                                    ? bad.make()
                                    : torch::ones({3}).requires_grad_();
      const std::vector<UnitSpec> units = {
          {.name = "block",
           .parameters = {{.name = "good", .tensor = good},
                          {.name = "second", .tensor = second}}}};
      EXPECT_THAT(
          message_of([&] { ShardedRoot(units, group, {}); }),
          AllOf(HasSubstr("'second' of unit 'block'"), HasSubstr(bad.words)));
      EXPECT_TRUE(at::equal(good, torch::ones({4})));
    }
  });
}

}  // namespace sharding_check_test
}  // namespace brigade
