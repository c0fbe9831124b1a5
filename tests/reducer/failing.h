// What tests of failures have in common: an error of the user's own, and the
// text of what was thrown.

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

#include "brigade/reducer/reducer.h"
#include "brigade/tests/reducer/step.h"
#include "brigade/tests/reducer/toy_model.h"
#include "gtest/gtest.h"

namespace brigade::testing {

struct UserError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Runs `action`, expects it to throw an Error (c10::Error: no subclass of it),
// and returns its text.
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

// One step, after which every gradient is the average over all ranks.
inline void expect_trains(Reducer& reducer, const ToyModel& model, int rank,
                          int world_size, int s = 5) {
  model.zero_grad();
  step(reducer, model.loss(rank, s));
  for (size_t i = 0; i < model.parameters.size(); ++i) {
    EXPECT_TRUE(
        at::equal(model.parameters[i].grad(), model.average(i, world_size, s)))
        << "parameter " << i << " on rank " << rank;
  }
}

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_REDUCER_FAILING_H_
