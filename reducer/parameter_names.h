// Names of parameters, for messages: one text for all, shared by copies.
//
// Thread safety: as std::vector; copies may be on different threads.

#ifndef BRIGADE_REDUCER_PARAMETER_NAMES_H_
#define BRIGADE_REDUCER_PARAMETER_NAMES_H_

#include <cstddef>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace brigade {

class ParameterNames {
 public:
  ParameterNames() = default;
  // A list of names is one, wherever it is given.
  ParameterNames(const std::vector<std::string>& names);
  ParameterNames(std::initializer_list<std::string_view> names);

  size_t size() const { return list_ ? list_->places.size() : 0; }
  bool empty() const { return size() == 0; }

  // Valid until this or the last copy of it changes or goes.
  // REQUIRES: i < size().
  std::string_view operator[](size_t i) const {
    const Place& place = list_->places[i];
    return std::string_view(list_->text).substr(place.begin, place.size);
  }

  void reserve(size_t num_names);
  void push_back(std::string_view name);
  void set(size_t i, std::string_view name);  // REQUIRES: i < size()

  // One string each.
  std::vector<std::string> strings() const;

 private:
  struct Place {
    size_t begin = 0;  // in the text
    size_t size = 0;
  };

  struct List {
    std::string text;  // may hold names that were set anew
    std::vector<Place> places;
  };

  List& own();
  static Place append(List& list, std::string_view name);

  std::shared_ptr<List> list_;  // null: no names; const while it is shared
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_PARAMETER_NAMES_H_
