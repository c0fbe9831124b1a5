#include "brigade/comm/signature_mesh.h"

#include <map>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/control_store.h"
#include "brigade/comm/gloo_signature_mesh.h"
#include "brigade/comm/group_timeout.h"

namespace brigade {
namespace {

// Ranks whose signatures are not of one size must not meet.
constexpr const char* kPrefix = "brigade/signatures_256/";

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// A group's mesh lives as long as the group. If it lived as long as the
// channels on it, ranks could differ in whether there is one: when a reducer is
// destroyed is each rank's own business.
struct Place {
  explicit Place(const GroupPtr& group) : group(group) {}

  const c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  std::mutex connecting;
  std::shared_ptr<SignatureMesh> mesh;  // guarded by connecting
};

std::shared_ptr<Place> place_of(const GroupPtr& group) {
  static std::mutex mutex;
  static auto& places =
      *new std::map<const c10d::ProcessGroup*, std::shared_ptr<Place>>();
  const std::lock_guard<std::mutex> lock(mutex);
  std::erase_if(places,
                [](const auto& entry) { return entry.second->group.expired(); });
  std::shared_ptr<Place>& place = places[group.get()];
  if (!place) place = std::make_shared<Place>(group);
  return place;
}

}  // namespace

std::shared_ptr<SignatureMesh> SignatureMesh::of(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  const std::shared_ptr<Place> place = place_of(group);
  const std::lock_guard<std::mutex> lock(place->connecting);
  if (place->mesh) return place->mesh;
  const c10::intrusive_ptr<c10d::Store> store = control_store(*group);
  // Every rank counts its own, since several ranks may live in one process, and
  // several groups may have one store.
  const int64_t nth =
      store->add(absl::StrCat(kPrefix, "meshes/", group->getRank()), 1);
  place->mesh = connect_gloo_mesh(*group, store,
                                  absl::StrCat(kPrefix, nth, "/"),
                                  group_timeout(*group));
  return place->mesh;
}

}  // namespace brigade
