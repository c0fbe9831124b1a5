#include "brigade/reducer/parameter_names.h"

namespace brigade {
namespace {

constexpr size_t kUsualNameLength = 24;

}  // namespace

ParameterNames::ParameterNames(const std::vector<std::string>& names) {
  reserve(names.size());
  for (const std::string& name : names) push_back(name);
}

ParameterNames::ParameterNames(std::initializer_list<std::string_view> names) {
  reserve(names.size());
  for (const std::string_view name : names) push_back(name);
}

void ParameterNames::reserve(size_t num_names) {
  if (num_names == 0) return;
  List& list = own();
  list.text.reserve(num_names * kUsualNameLength);
  list.places.reserve(num_names);
}

void ParameterNames::push_back(std::string_view name) {
  List& list = own();
  list.places.push_back(append(list, name));
}

void ParameterNames::set(size_t i, std::string_view name) {
  List& list = own();
  list.places[i] = append(list, name);
}

std::vector<std::string> ParameterNames::strings() const {
  std::vector<std::string> strings;
  strings.reserve(size());
  for (size_t i = 0; i < size(); ++i) strings.emplace_back((*this)[i]);
  return strings;
}

ParameterNames::List& ParameterNames::own() {
  if (!list_) {
    list_ = std::make_shared<List>();
  } else if (list_.use_count() > 1) {
    list_ = std::make_shared<List>(*list_);
  }
  return *list_;
}

ParameterNames::Place ParameterNames::append(List& list,
                                             std::string_view name) {
  const Place place = {.begin = list.text.size(), .size = name.size()};
  list.text.append(name);
  return place;
}

}  // namespace brigade
