#include "brigade/python_bindings/reduced_parameters.h"

#include <c10/util/Exception.h>

#include <string_view>

namespace brigade {

ParameterNames names_of(const NamesByIndex& by_index, size_t count) {
  if (by_index.empty()) return {};
  std::vector<std::string> names(count);
  for (const auto& [key, value] : by_index) {
    const auto index = py::cast<size_t>(key);
    TORCH_CHECK(index < count, "brigade.Reducer: param_to_name_mapping names ",
                "parameter ", index, ", but there are ", count,
                " parameters.\nName each parameter by its index.");
    const auto name = py::cast<std::string_view>(value);
    names[index] = name.starts_with('.') ? name.substr(1) : name;
  }
  return names;
}

}  // namespace brigade
