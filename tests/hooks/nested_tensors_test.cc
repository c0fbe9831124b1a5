#include "brigade/hooks/nested_tensors.h"

#include <torch/torch.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace mine {

struct Output {
  at::Tensor logits;
  std::string note;
};

void visit_tensors(Output& output, const brigade::TensorVisit& visit) {
  visit(output.logits);
}

}  // namespace mine

namespace brigade {
namespace nested_tensors_test {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Property;
using ::testing::Throws;

at::Tensor wide() { return torch::ones({2}); }

template <typename Nest>
std::vector<at::ScalarType> dtypes_of_cast(Nest nest) {
  cast_tensors(nest, at::kBFloat16);
  std::vector<at::ScalarType> dtypes;
  for (const at::Tensor& tensor : tensors_of(nest)) {
    dtypes.push_back(tensor.scalar_type());
  }
  return dtypes;
}

TEST(NestedTensorsTest, CastsEveryReturnType) {
  const auto all_are = [](size_t count) {
    return AllOf(::testing::SizeIs(count), Each(at::kBFloat16));
  };
  EXPECT_THAT(dtypes_of_cast(wide()), all_are(1));
  EXPECT_THAT(dtypes_of_cast(std::vector<at::Tensor>{wide(), wide()}),
              all_are(2));
  EXPECT_THAT(dtypes_of_cast(std::array{wide(), wide()}), all_are(2));
  EXPECT_THAT(dtypes_of_cast(std::tuple(wide(), 3, std::pair(wide(), true))),
              all_are(2));
  EXPECT_THAT(dtypes_of_cast(std::map<std::string, std::vector<at::Tensor>>{
                  {"a", {wide()}}, {"b", {wide(), wide()}}}),
              all_are(3));
  EXPECT_THAT(dtypes_of_cast(std::optional(wide())), all_are(1));
  EXPECT_THAT(dtypes_of_cast(std::optional<at::Tensor>()), all_are(0));
  EXPECT_THAT(dtypes_of_cast(c10::IValue(std::vector<at::Tensor>{wide()})),
              all_are(1));
  EXPECT_THAT(dtypes_of_cast(std::vector<c10::IValue>{wide(), 2, wide()}),
              all_are(2));
  EXPECT_THAT(dtypes_of_cast(mine::Output{wide(), "kept"}), all_are(1));
  EXPECT_THAT(dtypes_of_cast(std::vector{mine::Output{wide(), ""}}),
              all_are(1));
  EXPECT_THAT(dtypes_of_cast(std::string("text")), all_are(0));
}

TEST(NestedTensorsTest, KeepsOtherTensors) {
  const at::Tensor narrow = wide().to(at::kBFloat16);
  const at::Tensor whole_numbers = torch::ones({2}, at::kLong);
  std::tuple nest(narrow, whole_numbers, at::Tensor());
  cast_tensors(nest, at::kBFloat16);
  EXPECT_TRUE(std::get<0>(nest).is_same(narrow));
  EXPECT_TRUE(std::get<1>(nest).is_same(whole_numbers));
  EXPECT_FALSE(std::get<2>(nest).defined());
}

TEST(NestedTensorsTest, CastsArePartOfTheGraph) {
  const at::Tensor leaf = wide().requires_grad_();
  std::vector<at::Tensor> nest = {leaf * 3};
  cast_tensors(nest, at::kDouble);
  nest[0].sum().backward();
  EXPECT_TRUE(at::equal(leaf.grad(), torch::full({2}, 3.0F)));
}

TEST(NestedTensorsTest, AConstTensorOfAnotherDtypeIsAnError) {
  std::tuple<const at::Tensor> nest(wide());
  EXPECT_THAT([&] { cast_tensors(nest, at::kBFloat16); },
              Throws<c10::ValueError>(Property(
                  &c10::Error::what_without_backtrace,
                  AllOf(HasSubstr("output_dtype"), HasSubstr("BFloat16"),
                        HasSubstr("const tensor")))));
  EXPECT_NO_THROW(cast_tensors(nest, at::kFloat));
}

TEST(NestedTensorsTest, SkipsUndefinedTensorsAndText) {
  const at::Tensor a = wide();
  EXPECT_THAT(tensors_of(std::tuple(a, at::Tensor(), std::string("text"), 42)),
              ::testing::SizeIs(1));
  const mine::Output constant = {a, ""};
  EXPECT_TRUE(tensors_of(constant).at(0).is_same(a));
}

}  // namespace nested_tensors_test
}  // namespace brigade
