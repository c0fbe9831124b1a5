#include "brigade/tests/fsdp/fuzz_model.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include "brigade/tests/fsdp/fuzz_branch.h"
#include "gtest/gtest.h"

namespace brigade::testing {
namespace {

class Model {
 public:
  Model(const Case& c, const std::vector<Record>& records)
      : case_(c),
        records_(records),
        unit_of_(FuzzNet(c.net, 0).unit_of()),
        gradients_(c.world_size, std::vector<at::Tensor>(unit_of_.size())),
        pending_(gradients_) {
    for (int rank = 0; rank < c.world_size; ++rank) {
      nets_.emplace_back(c.net, rank);
      parameters_.push_back(nets_.back().parameters());
    }
  }

  void check() {
    size_t index = 0;
    for (const Action& action : actions_of(case_)) {
      for (const Operation& operation : action.operations) {
        SCOPED_TRACE("operation " + std::to_string(index) + ": " +
                     describe(operation));
        run(operation, index);
        for (int rank = 0; rank < case_.world_size; ++rank) {
          if (::testing::Test::HasFailure()) return;
          expect_shards(rank, index);
        }
        if (::testing::Test::HasFailure()) return;
        ++index;
      }
    }
  }

 private:
  const Sight& sight(int rank, size_t operation) const {
    return records_[rank].sights[operation];
  }

  Live run_forward(size_t forward, int rank) const {
    const Branch& branch = case_.forwards[forward][rank];
    Live live{.input = input_of(case_.net, branch)};
    live.outputs = run_branch(
        nets_[rank], branch, live.input, {},
        [](size_t, const at::Tensor& in, const auto& run) { return run(in); });
    return live;
  }

  void run(const Operation& operation, size_t index) {
    switch (operation.kind) {
      case Kind::kForward:
      case Kind::kEvaluate: {
        const size_t forward = operation.forwards[0];
        for (int rank = 0; rank < case_.world_size; ++rank) {
          Live live = run_forward(forward, rank);
          expect_equal(sight(rank, index).outputs, live.outputs, rank,
                       "output");
          if (operation.kind == Kind::kForward) {
            live_[forward].push_back(std::move(live));
          }
        }
        break;
      }
      case Kind::kBackward:
        run_backward(operation, index);
        break;
      case Kind::kDrop:
        live_.erase(operation.forwards[0]);
        break;
      case Kind::kZero:
        for (std::vector<at::Tensor>& of_rank : gradients_) {
          for (size_t i = 0; i < of_rank.size(); ++i) {
            const bool is_meant =
                operation.index >= of_rank.size() || operation.index == i;
            if (!is_meant) continue;
            if (operation.flag && of_rank[i].defined()) {
              of_rank[i].zero_();
            } else {
              of_rank[i] = at::Tensor();
            }
          }
        }
        break;
      case Kind::kSgd: {
        const torch::NoGradGuard no_grad;
        for (int rank = 0; rank < case_.world_size; ++rank) {
          for (size_t i = 0; i < unit_of_.size(); ++i) {
            const at::Tensor& gradient = gradients_[rank][i];
            if (gradient.defined()) parameters_[rank][i].sub_(gradient, kRate);
          }
        }
        break;
      }
      case Kind::kFailingForward:
      case Kind::kFailingBackward:
        expect_errors(operation, index);
        // What has been added up on ranks is lost with it.
        for (auto& of_rank : pending_) {
          of_rank.assign(unit_of_.size(), at::Tensor());
        }
        break;
      case Kind::kReadWhole:
        for (int rank = 0; rank < case_.world_size; ++rank) {
          expect_equal(sight(rank, index).outputs, parameters_[rank], rank,
                       "parameter");
        }
        break;
      case Kind::kScale: {
        const torch::NoGradGuard no_grad;
        for (const auto& of_rank : parameters_) {
          of_rank[operation.index].mul_(0.75);
        }
        break;
      }
      case Kind::kClip:
        clip(operation, index);
        break;
      case Kind::kSetReshards:
      case Kind::kUnshard:
      case Kind::kMeet:
        break;
    }
  }

  void run_backward(const Operation& operation, size_t index) {
    for (int rank = 0; rank < case_.world_size; ++rank) {
      at::Tensor loss;
      for (const size_t i : operation.forwards) {
        const at::Tensor one =
            loss_of_branch(case_.forwards[i][rank], live_[i][rank].outputs);
        loss = loss.defined() ? loss + one : one;
      }
      loss.backward();
      std::vector<at::Tensor> of_inputs;
      for (const size_t i : operation.forwards) {
        of_inputs.push_back(live_[i][rank].input.grad());
      }
      expect_equal(sight(rank, index).outputs, of_inputs, rank,
                   "gradient of input");
      for (size_t i = 0; i < unit_of_.size(); ++i) {
        const at::Tensor& parameter = parameters_[rank][i];
        add(pending_[rank][i], parameter.grad());
        parameter.mutable_grad() = at::Tensor();
      }
    }
    for (const size_t i : operation.forwards) live_.erase(i);
    if (operation.flag) synchronize(operation.adding_up);
  }

  // What is undefined adds nothing.
  static void add(at::Tensor& sum, const at::Tensor& gradient) {
    if (!gradient.defined()) return;
    sum = sum.defined() ? sum + gradient : gradient.clone();
  }

  // The ranks that hold the same as `rank` does of a parameter.
  UnitMesh mesh_of(size_t parameter, int rank) const {
    const auto& mesh = case_.net.units[unit_of_[parameter]].mesh;
    if (mesh) return mesh->of(rank);
    const MeshPlan of_root = {.world_size = case_.world_size,
                              .size = case_.world_size,
                              .is_strided = false,
                              .num_shards = *case_.options.num_shards};
    return of_root.of(rank);
  }

  void synchronize(uint32_t adding_up) {
    for (size_t i = 0; i < unit_of_.size(); ++i) {
      if ((adding_up >> unit_of_[i] & 1) != 0) continue;
      const auto& like = parameters_[0][i];
      const bool is_used = std::any_of(
          pending_.begin(), pending_.end(),
          [&](const auto& of_rank) { return of_rank[i].defined(); });
      for (int rank = 0; rank < case_.world_size && is_used; ++rank) {
        const at::Tensor sum = sum_over(mesh_of(i, rank), i);
        // Used on another mesh only, it gets zeros.
        add(gradients_[rank][i], sum.defined() ? sum : at::zeros_like(like));
      }
      for (auto& of_rank : pending_) of_rank[i] = at::Tensor();
    }
  }

  // The average. In the order of ranks: over rows, and then over their sums.
  at::Tensor sum_over(const UnitMesh& mesh, size_t parameter) const {
    at::Tensor sum;
    for (int row = 0; row < mesh.size(); row += mesh.row_length()) {
      at::Tensor of_row;
      for (int place = row; place < row + mesh.row_length(); ++place) {
        add(of_row, pending_[mesh.ranks[place]][parameter]);
      }
      add(sum, of_row);
    }
    return sum.defined() ? sum.mul(1.0 / mesh.size()) : sum;
  }

  void clip(const Operation& operation, size_t index) {
    const double norm = sight(0, index).norm;
    for (int rank = 1; rank < case_.world_size; ++rank) {
      EXPECT_EQ(sight(rank, index).norm, norm) << "rank " << rank;
    }
    std::vector<at::Tensor> flat = {torch::zeros({1}, torch::kDouble)};
    for (int rank = 0; rank < case_.world_size; ++rank) {
      for (size_t i = 0; i < unit_of_.size(); ++i) {
        const at::Tensor& gradient = gradients_[rank][i];
        const bool is_counted = mesh_of(i, rank).ranks.front() == rank;
        if (!is_counted || !gradient.defined()) continue;
        flat.push_back(gradient.flatten().to(torch::kDouble));
      }
    }
    const double expected =
        at::linalg_vector_norm(torch::cat(flat), operation.p).item<double>();
    EXPECT_NEAR(norm, expected, 1e-5 * expected);
    const double factor = operation.max_norm / (norm + 1e-6);
    if (!(factor < 1)) return;
    for (const auto& of_rank : gradients_) {
      for (const at::Tensor& gradient : of_rank) {
        if (gradient.defined()) gradient.mul_(factor);
      }
    }
  }

  void expect_errors(const Operation& operation, size_t index) const {
    const bool in_forward = operation.kind == Kind::kFailingForward;
    for (int rank = 0; rank < case_.world_size; ++rank) {
      const std::string expected =
          in_forward ? "bad input"
          : rank == operation.rank
              ? "bad gradient"
              : "rank " + std::to_string(operation.rank) + " failed";
      const std::string& error = sight(rank, index).error;
      EXPECT_NE(error.find(expected), std::string::npos)
          << "rank " << rank << ": '" << error << "', expected '" << expected
          << "'";
      EXPECT_EQ(error.find("cannot continue"), std::string::npos)
          << "rank " << rank;
    }
  }

  static void expect_equal(const std::vector<at::Tensor>& found,
                           const std::vector<at::Tensor>& expected, int rank,
                           const std::string& what) {
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      ASSERT_EQ(found[i].defined(), expected[i].defined())
          << "rank " << rank << ", " << what << " " << i;
      if (!found[i].defined()) continue;
      ASSERT_TRUE(at::equal(found[i], expected[i]))
          << "rank " << rank << ", " << what << " " << i << ":\n"
          << found[i] << "\nexpected:\n"
          << expected[i];
    }
  }

  // In the order of the parameter's memory.
  at::Tensor part_of(const at::Tensor& whole, size_t parameter,
                     const ShardRange& range) const {
    if (!whole.defined()) return whole;
    const at::Tensor flat = parameters_[0][parameter].is_contiguous()
                                ? whole.flatten()
                                : whole.t().flatten();
    return flat.narrow(0, range.in_parameter, range.numel);
  }

  void expect_shards(int rank, size_t index) const {
    const Sight& seen = sight(rank, index);
    const auto flat_of = [](std::vector<at::Tensor> tensors) {
      for (at::Tensor& tensor : tensors) {
        if (!tensor.defined()) continue;
        tensor =
            tensor.is_contiguous() ? tensor.flatten() : tensor.t().flatten();
      }
      return tensors;
    };
    std::vector<at::Tensor> values;
    std::vector<at::Tensor> gradients;
    for (size_t i = 0; i < unit_of_.size(); ++i) {
      const ShardRange range = records_[rank].ranges[i];
      values.push_back(part_of(parameters_[rank][i].detach(), i, range));
      gradients.push_back(part_of(gradients_[rank][i], i, range));
    }
    expect_equal(flat_of(seen.values), values, rank, "shard");
    expect_equal(flat_of(seen.gradients), gradients, rank, "gradient of shard");
  }

  const Case& case_;
  const std::vector<Record>& records_;
  const std::vector<size_t> unit_of_;  // by parameter
  std::vector<FuzzNet> nets_;          // by rank
  // By rank, by parameter.
  std::vector<std::vector<at::Tensor>> parameters_;
  std::vector<std::vector<at::Tensor>> gradients_;
  std::vector<std::vector<at::Tensor>> pending_;
  std::map<size_t, std::vector<Live>> live_;  // by forward, by rank
};

}  // namespace

void expect_of_one_process(const Case& c, const std::vector<Record>& records) {
  Model(c, records).check();
}

}  // namespace brigade::testing
