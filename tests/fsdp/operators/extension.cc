// Sharded tensors for check_operators.py: ranks are threads of one process.

#include <torch/extension.h>

#include <barrier>
#include <memory>
#include <mutex>
#include <vector>

#include "brigade/fsdp/sharded_tensor.h"

namespace {

class Ranks {
 public:
  explicit Ranks(int num_ranks)
      : values_(static_cast<size_t>(num_ranks)), barrier_(num_ranks) {}

  at::Tensor all_gather(int rank, const at::Tensor& values) {
    values_[static_cast<size_t>(rank)] = values;
    barrier_.arrive_and_wait();
    at::Tensor all = at::stack(values_);
    barrier_.arrive_and_wait();
    return all;
  }
  // Removes a rank that has ended or failed, so that no other rank waits for
  // it.
  void leave() { barrier_.arrive_and_drop(); }

 private:
  std::vector<at::Tensor> values_;
  std::barrier<> barrier_;
};

class RankGroup : public brigade::ShardGroup {
 public:
  RankGroup(std::shared_ptr<Ranks> ranks, int rank)
      : ranks_(std::move(ranks)), rank_(rank) {}
  at::Tensor all_gather(const at::Tensor& values) override {
    return ranks_->all_gather(rank_, values);
  }

 private:
  std::shared_ptr<Ranks> ranks_;
  int rank_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  brigade::register_shard_operators();
  pybind11::class_<Ranks, std::shared_ptr<Ranks>>(module, "Ranks")
      .def(pybind11::init<int>())
      .def("leave", &Ranks::leave);
  pybind11::class_<RankGroup, std::shared_ptr<RankGroup>>(module, "RankGroup")
      .def(pybind11::init<std::shared_ptr<Ranks>, int>());
  module.def(
      "make_sharded",
      [](const at::Tensor& local, int64_t offset, int64_t per_rank,
         std::shared_ptr<RankGroup> group, const std::vector<int64_t>& sizes,
         const std::vector<int64_t>& strides) {
        return brigade::make_sharded({.local = local,
                                      .offset = offset,
                                      .group = group,
                                      .flat_per_rank = per_rank},
                                     sizes, strides);
      });
  module.def("local",
             [](const at::Tensor& tensor) -> std::optional<at::Tensor> {
               const brigade::Shard* const shard = brigade::shard_of(tensor);
               if (shard == nullptr) return std::nullopt;
               return shard->local;
             });
}
