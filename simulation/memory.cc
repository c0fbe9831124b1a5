#include "brigade/simulation/memory.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

namespace brigade {
namespace {

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

int64_t shard_elements(const ModelLayer& layer, int ranks, bool by_tensor) {
  if (!by_tensor) return divide_up(layer.elements(), ranks);
  int64_t sum = 0;
  for (const int64_t tensor : layer.tensors) sum += divide_up(tensor, ranks);
  return sum;
}

double largest_sum(std::vector<double> bytes, size_t count) {
  std::ranges::sort(bytes, std::greater<>());
  bytes.resize(std::min(count, bytes.size()));
  return std::accumulate(bytes.begin(), bytes.end(), 0.0);
}

double peak_activation_bytes(const ModelShape& model, double batch,
                             std::span<const char> checkpointed) {
  double kept = 0;  // by this layer and earlier ones
  double peak = 0;
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const ModelLayer& layer = model.layers[i];
    kept +=
        checkpointed[i] != 0 ? layer.checkpoint_bytes : layer.activation_bytes;
    const double recomputed = checkpointed[i] != 0 ? layer.activation_bytes : 0;
    peak = std::max(peak, kept + recomputed);
  }
  return batch * peak;
}

std::optional<std::vector<char>> checkpoints_to_fit(
    const ModelShape& model, double batch, std::span<const double> recompute_s,
    double budget, double* least_bytes) {
  const auto& layers = model.layers;
  const auto saved = [&](size_t i) {
    return layers[i].activation_bytes - layers[i].checkpoint_bytes;
  };
  std::vector<size_t> order;
  for (size_t i = 0; i < layers.size(); ++i) {
    if (saved(i) > 0) order.push_back(i);
  }
  std::ranges::stable_sort(order, [&](size_t a, size_t b) {
    return recompute_s[a] * saved(b) < recompute_s[b] * saved(a);
  });

  std::vector<char> chosen(layers.size(), 0);
  double peak = peak_activation_bytes(model, batch, chosen);
  *least_bytes = peak;
  size_t count = 0;
  while (peak > budget && count < order.size()) {
    chosen[order[count++]] = 1;
    peak = peak_activation_bytes(model, batch, chosen);
    *least_bytes = std::min(*least_bytes, peak);
  }
  if (peak > budget) return std::nullopt;
  for (size_t i = 0; i + 1 < count; ++i) {
    chosen[order[i]] = 0;
    if (peak_activation_bytes(model, batch, chosen) > budget) {
      chosen[order[i]] = 1;
    }
  }
  return chosen;
}

std::vector<char> units_to_keep(std::span<const double> unit_bytes,
                                std::span<const double> gather_s,
                                double budget) {
  std::vector<size_t> order;
  for (size_t unit = unit_bytes.size(); unit-- > 0;) {
    if (unit_bytes[unit] > 0 && gather_s[unit] > 0) order.push_back(unit);
  }
  std::ranges::stable_sort(order, [&](size_t a, size_t b) {
    return gather_s[a] * unit_bytes[b] > gather_s[b] * unit_bytes[a];
  });
  std::vector<char> kept(unit_bytes.size(), 0);
  for (const size_t unit : order) {
    if (unit_bytes[unit] > budget) continue;
    kept[unit] = 1;
    budget -= unit_bytes[unit];
  }
  return kept;
}

}  // namespace brigade
