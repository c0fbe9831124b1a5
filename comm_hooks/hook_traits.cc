#include "brigade/comm_hooks/hook_traits.h"

#include "absl/strings/str_cat.h"

namespace brigade {

at::ScalarType HookTraits::wire_dtype(at::ScalarType gradient_dtype) const {
  return wire_format == nullptr
             ? gradient_dtype
             : wire_format->wire_format(gradient_dtype).dtype;
}

HookTraits traits_of(c10d::CommHookInterface& hook) {
  const auto* wire_format = dynamic_cast<const DeclaresWireFormat*>(&hook);
  const auto* stepping = dynamic_cast<const StepsParameters*>(&hook);
  const auto* named = dynamic_cast<const HasHookName*>(&hook);
  auto* host_sums = dynamic_cast<TakesHostSums*>(&hook);
  if (host_sums != nullptr && !host_sums->takes_host_sums()) {
    host_sums = nullptr;
  }
  return {
      .hook = &hook,
      .wire_format = wire_format,
      .listener = dynamic_cast<IterationListener*>(&hook),
      .host_sums = host_sums,
      .fails_by_network_only =
          wire_format != nullptr && wire_format->fails_by_network_only(),
      .lets_go_of_buffer =
          wire_format != nullptr && wire_format->lets_go_of_buffer(),
      .sums_in_order = wire_format != nullptr && wire_format->sums_in_order(),
      .throws_own_errors =
          dynamic_cast<const ThrowsOwnErrors*>(&hook) != nullptr,
      .steps_parameters = stepping != nullptr && stepping->steps_parameters(),
      .name = named == nullptr ? "" : named->hook_name()};
}

std::string describe(const HookTraits& hook) {
  return hook.name.empty() ? "the comm hook"
                           : absl::StrCat("comm hook ", hook.name);
}

}  // namespace brigade
