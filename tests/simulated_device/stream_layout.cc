#include "brigade/tests/simulated_device/stream_layout.h"

namespace brigade::testing {
namespace {

using Forward = StreamLayout::Forward;

const char* name_of(Forward forward) {
  switch (forward) {
    case Forward::kCaller:
      return "the caller's stream";
    case Forward::kSide:
      return "a side stream";
    case Forward::kTwo:
      return "two streams";
    case Forward::kOwn:
      return "a stream per parameter";
    case Forward::kBoth:
      return "two streams per parameter";
  }
  return "";
}

// The release build, which scripts/test.sh --all runs, tries all of them.
#ifdef __SANITIZE_ADDRESS__
constexpr bool kTriesFew = true;
#else
constexpr bool kTriesFew = false;
#endif

std::vector<StreamLayout> make_layouts() {
  std::vector<StreamLayout> layouts;
  for (const Forward forward : {Forward::kCaller, Forward::kSide, Forward::kTwo,
                                Forward::kOwn, Forward::kBoth}) {
    for (const bool calls_from_side : {false, true}) {
      for (const bool is_made_on_side : {false, true}) {
        for (const bool accumulates_in_forward : {false, true}) {
          layouts.push_back({.forward = forward,
                             .calls_from_side = calls_from_side,
                             .is_made_on_side = is_made_on_side,
                             .accumulates_in_forward = accumulates_in_forward});
        }
      }
    }
  }
  return layouts;
}

// Everything else differs among these too.
std::vector<StreamLayout> one_for_each_forward() {
  const std::vector<StreamLayout> all = make_layouts();
  constexpr size_t kOfAForward = 8;
  std::vector<StreamLayout> chosen;
  for (size_t i = 0; i < all.size() / kOfAForward; ++i) {
    chosen.push_back(all[i * kOfAForward + i * 3 % kOfAForward]);
  }
  return chosen;
}

}  // namespace

std::string name_of(const StreamLayout& layout) {
  std::string name = std::string("forward on ") + name_of(layout.forward);
  if (layout.calls_from_side) name += ", called from a side stream";
  if (layout.is_made_on_side) name += ", reducer made on a side stream";
  if (layout.accumulates_in_forward) name += ", accumulates in forward's";
  return name;
}

const std::vector<StreamLayout>& all_stream_layouts() {
  static const auto* const layouts = new std::vector<StreamLayout>(
      kTriesFew ? one_for_each_forward() : make_layouts());
  return *layouts;
}

}  // namespace brigade::testing
