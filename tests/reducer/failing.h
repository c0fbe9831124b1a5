// Helpers of failure tests: a user's error, and the text of a thrown error.

#ifndef BRIGADE_TESTS_REDUCER_FAILING_H_
#define BRIGADE_TESTS_REDUCER_FAILING_H_

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <typeinfo>

#include "absl/cleanup/cleanup.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/reducer/toy_model.h"
#include "gtest/gtest.h"

namespace brigade::testing {

struct UserError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Runs a step whose backward throws UserError at the gradient of parameter
// `throws_at`; 3: before the first gradient; -1: after the last.
inline void throw_in_backward(Reducer& reducer, const ToyModel& model, int rank,
                              int throws_at) {
  const auto thrower = [](const at::Tensor&) { throw UserError("no disk"); };
  const at::Tensor input = at::ones({1}).requires_grad_();
  const at::Tensor last = input * 0;  // its gradient is the last
  const at::Tensor first = model.loss(rank);
  const at::Tensor at = throws_at == -1  ? last
                        : throws_at == 3 ? first
                                         : model.parameters[throws_at];
  const unsigned hook = at.register_hook(thrower);
  const absl::Cleanup removing = [&] { at.remove_hook(hook); };
  const at::Tensor loss = last.sum() + first;
  reducer.prepare_for_backward(loss);
  loss.backward();
}

// Expects `action` to throw an Error (c10::Error itself, not a subclass) and
// returns its text.
template <typename Error>
std::string text_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(typeid(error) == typeid(c10::Error),
              (std::is_same_v<Error, c10::Error>))
        << "a subclass: " << error.what();
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another type: " << typeid(error).name() << ": "
                  << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

// Runs one step and expects every gradient to be the average over all ranks.
inline void expect_trains(Reducer& reducer, const ToyModel& model, int rank,
                          int world_size, int s = 5) {
  model.zero_grad();
  step(reducer, model.loss(rank, s));
  expect_averaged(model, world_size, s);
}

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_REDUCER_FAILING_H_
