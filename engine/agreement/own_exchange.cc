#include "brigade/engine/agreement/own_exchange.h"

#include "brigade/engine/agreement/exchange.h"
#include "brigade/engine/agreement/recovery.h"

namespace brigade {

StatusComparison tell_and_compare(EngineState& state, OwnExchange& exchange) {
  exchange.is_told = true;
  return compare_and_recover(
      state, exchange.iteration,
      [&](std::optional<std::chrono::milliseconds> limit) {
        return exchange_and_give(state, exchange.iteration, exchange.own,
                                 /*tells_launches=*/true, limit);
      },
      exchange.patience);
}

}  // namespace brigade
