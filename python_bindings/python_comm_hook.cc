#include "brigade/python_bindings/python_comm_hook.h"

#include <c10/util/Exception.h>

#include <string>
#include <utility>

namespace brigade {
namespace {

[[noreturn]] void throw_as_c10_error(const py::error_already_set& error) {
  const py::gil_scoped_acquire gil;
  const std::string text = error.what();
  if (error.matches(PyExc_ValueError)) C10_THROW_ERROR(ValueError, text);
  if (error.matches(PyExc_TypeError)) C10_THROW_ERROR(TypeError, text);
  if (error.matches(PyExc_IndexError)) C10_THROW_ERROR(IndexError, text);
  if (error.matches(PyExc_NotImplementedError)) {
    C10_THROW_ERROR(NotImplementedError, text);
  }
  C10_THROW_ERROR(Error, text);
}

}  // namespace

PythonCommHook::PythonCommHook(py::object state, py::object hook)
    : hook_(std::move(state), std::move(hook)) {}

c10::intrusive_ptr<c10::ivalue::Future> PythonCommHook::runHook(
    c10d::GradBucket& bucket) {
  try {
    return hook_.runHook(bucket);
  } catch (const py::error_already_set& error) {
    throw_as_c10_error(error);
  }
}

at::Tensor PythonCommHook::parseHookResult(const c10::IValue& result) {
  try {
    return hook_.parseHookResult(result);
  } catch (const py::error_already_set& error) {
    throw_as_c10_error(error);
  }
}

}  // namespace brigade
