// Units whose gradients are integers that are known: sums and averages are
// exact, also in float16 and bfloat16.

#ifndef BRIGADE_TESTS_FSDP_INTEGER_UNITS_H_
#define BRIGADE_TESTS_FSDP_INTEGER_UNITS_H_

#include <torch/torch.h>

#include <cstddef>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "brigade/fsdp/sharded_root.h"
#include "brigade/tests/fsdp/sharded_net.h"

namespace brigade::testing {

class IntegerUnits {
 public:
  // Each of one parameter of so many elements. Unit 0 is called around the
  // others.
  explicit IntegerUnits(const std::vector<int64_t>& numels,
                        at::ScalarType dtype = at::kFloat) {
    for (const int64_t numel : numels) {
      parameters.push_back(torch::ones({numel}, dtype).requires_grad_());
    }
  }

  std::vector<UnitSpec> units() const {
    std::vector<UnitSpec> specs;
    for (size_t unit = 0; unit < parameters.size(); ++unit) {
      const std::string name = "units." + std::to_string(unit);
      specs.push_back(
          {.name = name,
           .parameters = {{.name = name + ".w", .tensor = parameters[unit]}}});
    }
    return specs;
  }

  // From 1 to 15; another one for each rank, batch and unit.
  at::Tensor gradient(size_t unit, int rank, int batch) const {
    const at::Tensor& like = parameters[unit];
    return (torch::arange(like.numel()) % 5 + 1 + rank + 2 * batch +
            static_cast<int64_t>(unit))
        .to(like.scalar_type());
  }

  // Of all units but those that are left out. Unit 0 is called in any case.
  at::Tensor run(ShardedRoot& root, int rank, int batch,
                 const std::set<size_t>& left_out = {}) const {
    const auto term = [&](size_t unit) {
      return left_out.count(unit) > 0
                 ? torch::zeros({}, parameters[unit].scalar_type())
                 : (parameters[unit] * gradient(unit, rank, batch)).sum();
    };
    return root.forward([&] {
      return root.call(0, torch::ones({}), [&](const at::Tensor& in) {
        at::Tensor h = in + 0;
        for (size_t unit = 1; unit < parameters.size(); ++unit) {
          if (left_out.count(unit) > 0) continue;
          h = root.call(unit, h, [&](const at::Tensor& inner) {
            return inner + term(unit);
          });
        }
        return h + term(0);
      });
    });
  }

  std::vector<at::Tensor> parameters;
};

// Bytes of all whole units, with padding.
inline int64_t whole_bytes_of(const ShardedRoot& root) {
  int64_t bytes = 0;
  for (size_t unit = 0; unit < root.num_units(); ++unit) {
    for (const auto& segment : root.unit(unit).segments) {
      bytes += segment->whole_bytes();
    }
  }
  return bytes;
}

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_FSDP_INTEGER_UNITS_H_
