// Reduce-scatters over meshes of ranks.

#include "brigade/comm/ordered/ordered_mesh.h"

#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/process_group.h"
#include "brigade/tests/support/local_ranks.h"
#include "gtest/gtest.h"

namespace brigade {
namespace ordered_mesh_test {

using testing::make_subgroup;
using testing::run_ranks;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using FuturePtr = OrderedMesh::FuturePtr;

struct Shape {
  int num_rows;
  int num_columns;

  int size() const { return num_rows * num_columns; }
};

at::Tensor values_of(int rank, int64_t numel, at::ScalarType dtype,
                     uint64_t seed = 1) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(
      seed * 1000 + static_cast<uint64_t>(rank));
  return (at::randn({numel}, generator, at::kDouble) *
          at::pow(10, at::randint(-2, 3, {numel}, generator, at::kDouble)))
      .to(dtype);
}

// The row and the column of a rank, in the order of the mesh.
struct Lines {
  Lines(const Group& group, Shape shape)
      : row(make_subgroup(group, "row", ranks_of_row(group, shape))),
        column(make_subgroup(group, "column", ranks_of_column(group, shape))) {}

  static std::vector<int> ranks_of_row(const Group& group, Shape shape) {
    const int first = group->getRank() / shape.num_columns * shape.num_columns;
    std::vector<int> ranks;
    for (int c = 0; c < shape.num_columns; ++c) ranks.push_back(first + c);
    return ranks;
  }
  static std::vector<int> ranks_of_column(const Group& group, Shape shape) {
    std::vector<int> ranks;
    for (int r = 0; r < shape.num_rows; ++r) {
      ranks.push_back(r * shape.num_columns +
                      group->getRank() % shape.num_columns);
    }
    return ranks;
  }

  GroupScope row;
  GroupScope column;
};

class OrderedMeshTest : public ::testing::TestWithParam<Shape> {
 protected:
  void run(const std::function<void(OrderedMesh&, OrderedCollectives& all,
                                    int rank)>& fn) {
    run_ranks(GetParam().size(), [&](const Group& group) {
      const Lines lines(group, GetParam());
      OrderedCollectives all(group, {.group_size = GetParam().num_columns});
      OrderedMesh mesh(lines.row.group(), lines.column.group());
      fn(mesh, all, group->getRank());
    });
  }
};
std::string name_of(const ::testing::TestParamInfo<Shape>& shape) {
  return absl::StrCat(shape.param.num_rows, "x", shape.param.num_columns);
}
INSTANTIATE_TEST_SUITE_P(Shapes, OrderedMeshTest,
                         ::testing::Values(Shape{1, 1}, Shape{1, 3},
                                           Shape{3, 1}, Shape{2, 2},
                                           Shape{2, 3}, Shape{3, 2}),
                         name_of);

TEST_P(OrderedMeshTest, GivesTheBitsOfAnAllReduceRowByRow) {
  run([](OrderedMesh& mesh, OrderedCollectives& all, int rank) {
    for (const at::ScalarType dtype :
         {at::kFloat, at::kHalf, at::kBFloat16, at::kComplexDouble}) {
      for (const int64_t numel : {0, 1, 7, 1000, 40003}) {
        const at::Tensor expected = values_of(rank, numel, dtype);
        all.all_reduce(expected, 0.3)->waitAndThrow();
        const at::Tensor input = values_of(rank, numel, dtype);
        const RankSlice slice = mesh.slice(numel);
        const at::Tensor output = at::empty({slice.numel}, dtype);
        const FuturePtr future = mesh.reduce_scatter(input, output, 0.3);
        future->waitAndThrow();
        EXPECT_TRUE(
            at::equal(output, expected.narrow(0, slice.offset, slice.numel)))
            << dtype << ' ' << numel;
        EXPECT_TRUE(future->value().toTensorVector().at(0).is_same(output));
        EXPECT_TRUE(at::equal(input, values_of(rank, numel, dtype)));
      }
    }
  });
}

// What a row has summed before is added to its sum, wherever an element lies.
TEST_P(OrderedMeshTest, AddsWhatARowHasSummed) {
  const Shape shape = GetParam();
  if (shape.num_rows == 1) GTEST_SKIP() << "a row is all";
  constexpr int64_t kNumel = 40003;
  const auto of_row = [&](int row, uint64_t seed) {
    at::Tensor sum;
    for (int c = 0; c < shape.num_columns; ++c) {
      const at::Tensor own =
          values_of(row * shape.num_columns + c, kNumel, at::kFloat, seed);
      sum = sum.defined() ? sum + own : own;
    }
    return sum;
  };
  at::Tensor expected;
  for (int row = 0; row < shape.num_rows; ++row) {
    const at::Tensor both = of_row(row, 2) + of_row(row, 1);
    expected = expected.defined() ? expected + both : both;
  }
  expected = expected * 0.3;
  run([&](OrderedMesh& mesh, OrderedCollectives& /*all*/, int rank) {
    const RankSlice slice = mesh.slice(kNumel);
    const at::Tensor before = at::empty({slice.numel});
    mesh.reduce_scatter_in_row(values_of(rank, kNumel, at::kFloat, 1), before)
        ->waitAndThrow();
    const at::Tensor output = at::empty({slice.numel});
    mesh.reduce_scatter(values_of(rank, kNumel, at::kFloat, 2), output, 0.3,
                        before)
        ->waitAndThrow();
    EXPECT_TRUE(
        at::equal(output, expected.narrow(0, slice.offset, slice.numel)));
  });
}

// Large ones in a row are done behind small ones that were launched later.
TEST_P(OrderedMeshTest, ManyInFlight) {
  run([](OrderedMesh& mesh, OrderedCollectives& all, int rank) {
    std::vector<at::Tensor> inputs;
    std::vector<FuturePtr> in_flight;
    for (uint64_t seed = 0; seed < 30; ++seed) {
      const int64_t numel = seed % 3 == 0 ? 300007 : 1 + 10 * seed;
      inputs.push_back(values_of(rank, numel, at::kFloat, seed));
      const RankSlice slice = mesh.slice(numel);
      in_flight.push_back(mesh.reduce_scatter(
          inputs[seed], inputs[seed].narrow(0, slice.offset, slice.numel)));
    }
    for (uint64_t seed = 0; seed < 30; ++seed) {
      in_flight[seed]->waitAndThrow();
      const at::Tensor expected =
          values_of(rank, inputs[seed].numel(), at::kFloat, seed);
      all.all_reduce(expected)->waitAndThrow();
      const RankSlice slice = mesh.slice(expected.numel());
      EXPECT_TRUE(at::equal(inputs[seed].narrow(0, slice.offset, slice.numel),
                            expected.narrow(0, slice.offset, slice.numel)))
          << seed;
    }
  });
}

// Callbacks of the one launch the next.
TEST_P(OrderedMeshTest, CallbacksMayCall) {
  run([](OrderedMesh& mesh, OrderedCollectives&, int rank) {
    const at::Tensor ones = at::ones({50});
    const at::Tensor output = at::empty({mesh.slice(50).numel});
    const at::Tensor second = at::empty({mesh.slice(50).numel});
    const auto both = mesh.reduce_scatter(ones, output)
                          ->thenAsync(
                              [&](c10::ivalue::Future&) {
                                return mesh.reduce_scatter(ones, second);
                              },
                              c10::ListType::create(c10::TensorType::get()));
    both->waitAndThrow();
    EXPECT_TRUE(at::equal(
        second, at::full_like(second, static_cast<double>(GetParam().size()))))
        << rank;
  });
}

TEST_P(OrderedMeshTest, RefusesBeforeItLaunches) {
  run([](OrderedMesh& mesh, OrderedCollectives&, int) {
    const auto reduce = [&](const at::Tensor& input, int64_t output_numel,
                            std::optional<double> scale) {
      mesh.reduce_scatter(input, at::empty({output_numel}, input.options()),
                          scale);
    };
    const int64_t numel = mesh.slice(12).numel;
    EXPECT_THROW(reduce(at::ones({12}), numel + 1, 1), c10::ValueError);
    EXPECT_THROW(reduce(at::ones({12}, at::kInt), numel, 0.5), c10::ValueError);
    EXPECT_THROW(reduce(at::ones({12}, at::kBool), numel, {}), c10::TypeError);
    const at::Tensor output = at::empty({numel});
    mesh.reduce_scatter(at::ones({12}), output)->waitAndThrow();
  });
}

// Also in rows and columns that the last rank is not in.
TEST_P(OrderedMeshTest, ARankThatLeavesEndsAllInFlight) {
  if (GetParam().size() == 1) GTEST_SKIP() << "there is nobody to leave";
  run_ranks(
      GetParam().size(),
      [&](const Group& group) {
        const Lines lines(group, GetParam());
        std::optional<OrderedMesh> mesh(std::in_place, lines.row.group(),
                                        lines.column.group());
        const auto reduce = [&] {
          return mesh->reduce_scatter(at::ones({100000}),
                                      at::empty({mesh->slice(100000).numel}));
        };
        reduce()->waitAndThrow();
        if (group->getRank() == GetParam().size() - 1) {
          mesh.reset();
        } else {
          std::vector<FuturePtr> in_flight;
          for (int i = 0; i < 5; ++i) in_flight.push_back(reduce());
          EXPECT_THROW(in_flight.back()->waitAndThrow(), PeerError);
          EXPECT_THROW(reduce()->waitAndThrow(), PeerError);
        }
        std::vector<at::Tensor> ones = {at::ones(10)};
        group->allreduce(ones)->wait();
        EXPECT_EQ(ones[0][0].item<int>(), GetParam().size());
      },
      std::chrono::minutes(10));
}

}  // namespace ordered_mesh_test
}  // namespace brigade
