#include <map>
#include <sstream>

#include "brigade/tests/fsdp/fuzz_case.h"

namespace brigade::testing {
namespace {

std::string describe(const Branch& branch) {
  std::ostringstream out;
  out << "[";
  for (const BlockCall& call : branch.calls) {
    out << " " << call.block << ":" << call.uses;
  }
  out << " head:" << branch.uses_of_head << "; loss of";
  for (const size_t i : branch.in_loss) out << " " << i;
  if (branch.takes_input_gradient) out << "; input's gradient";
  out << "]";
  return out.str();
}

}  // namespace

std::string describe(const Operation& operation) {
  static const std::map<Kind, std::string> kNames = {
      {Kind::kForward, "forward"},
      {Kind::kBackward, "backward"},
      {Kind::kEvaluate, "evaluate"},
      {Kind::kDrop, "drop"},
      {Kind::kZero, "zero"},
      {Kind::kSgd, "sgd"},
      {Kind::kFailingForward, "failing forward"},
      {Kind::kFailingBackward, "failing backward"},
      {Kind::kReadWhole, "read whole"},
      {Kind::kUnshard, "unshard"},
      {Kind::kScale, "scale"},
      {Kind::kClip, "clip"},
      {Kind::kSetReshards, "set reshards"},
      {Kind::kMeet, "meet"},
  };
  std::ostringstream out;
  out << kNames.at(operation.kind);
  for (const size_t i : operation.forwards) out << " #" << i;
  switch (operation.kind) {
    case Kind::kBackward:
      if (!operation.flag) out << " unsynchronized";
      if (operation.adding_up != 0) {
        out << ", units of " << operation.adding_up << " add up";
      }
      break;
    case Kind::kUnshard:
      out << " unit " << operation.index
          << (operation.flag ? ", and reshard it" : "");
      break;
    case Kind::kZero:
      out << (operation.flag ? " in place" : " to undefined") << ", parameter "
          << operation.index;
      break;
    case Kind::kFailingForward:
    case Kind::kFailingBackward:
      out << " on rank " << operation.rank << " at " << operation.place;
      break;
    case Kind::kScale:
      out << " parameter " << operation.index;
      break;
    case Kind::kClip:
      out << " to " << operation.max_norm << ", p = " << operation.p;
      break;
    case Kind::kSetReshards:
      out << " of unit " << operation.index << ": " << operation.flag << " to "
          << operation.reshards_to.value_or(0);
      break;
    default:
      break;
  }
  return out.str();
}

std::string describe(const Case& c) {
  static const std::map<Role, std::string> kRoles = {
      {Role::kMatrix, "matrix"}, {Role::kTransposed, "transposed"},
      {Role::kTall, "tall"},     {Role::kShift, "shift"},
      {Role::kScale, "scale"},   {Role::kScalar, "scalar"},
      {Role::kEmpty, "empty"},
  };
  std::ostringstream out;
  out << "seed " << c.seed << (c.is_wild ? ", wild, " : ", ") << c.world_size
      << " ranks, " << *c.options.num_shards << " shards, reshards "
      << c.options.reshards_after_forward << " to "
      << c.options.reshards_to.value_or(0) << ", depth "
      << c.options.prefetch_depth << ", reducing " << c.options.max_reducing
      << "\nwidth " << c.net.width << "\n";
  for (size_t i = 0; i < c.net.blocks.size(); ++i) {
    out << (i + 1 == c.net.blocks.size() ? "head"
                                         : "block " + std::to_string(i))
        << ":";
    for (const ParameterPlan& parameter : c.net.blocks[i]) {
      out << " " << kRoles.at(parameter.role);
      if (parameter.role == Role::kTall) out << "(" << parameter.rank << ")";
      if (parameter.is_double) out << " double";
      if (parameter.is_frozen) out << " frozen";
      out << ";";
    }
    const UnitPlan& unit =
        c.net.units[i + 1 == c.net.blocks.size() ? 0 : i + 1];
    if (unit.mesh) {
      out << " over " << describe(unit.mesh->of(0)) << " and the like;";
    }
    if (unit.reshards_to) out << " reshards to " << *unit.reshards_to;
    out << "\n";
  }
  for (size_t i = 0; i < c.actions.size(); ++i) {
    out << "action " << i << "\n";
    for (const Operation& operation : c.actions[i].operations) {
      out << "  " << describe(operation) << "\n";
      if (operation.kind == Kind::kBackward || operation.kind == Kind::kDrop) {
        continue;
      }
      for (const size_t forward : operation.forwards) {
        for (size_t rank = 0; rank < c.forwards[forward].size(); ++rank) {
          out << "    rank " << rank << " "
              << describe(c.forwards[forward][rank]) << "\n";
        }
      }
    }
  }
  return out.str();
}

}  // namespace brigade::testing
