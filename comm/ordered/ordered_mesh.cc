#include "brigade/comm/ordered/ordered_mesh.h"

#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <exception>
#include <utility>
#include <vector>

namespace brigade {

using c10::ivalue::Future;

struct OrderedMesh::Reduction {
  at::Tensor output;
  at::Tensor of_row;
  std::optional<double> scale;
  FuturePtr result;
  bool is_summed_in_row = false;  // guarded by mutex_
};

OrderedMesh::OrderedMesh(const c10::intrusive_ptr<c10d::ProcessGroup>& row,
                         const c10::intrusive_ptr<c10d::ProcessGroup>& column,
                         int64_t part_bytes)
    : has_one_row_(column->getSize() == 1), process_(getpid()) {
  const OrderedOptions options = {.part_bytes = part_bytes};
  row_ = std::make_unique<OrderedCollectives>(row, options);
  column_ = std::make_unique<OrderedCollectives>(column, options);
}

OrderedMesh::~OrderedMesh() {
  if (getpid() != process_) return;  // one of its threads may hold the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  is_ending_ = true;
}

OrderedMesh::FuturePtr OrderedMesh::reduce_scatter(const at::Tensor& input,
                                                   const at::Tensor& output,
                                                   std::optional<double> scale,
                                                   const at::Tensor& of_row) {
  if (has_one_row_) return row_->reduce_scatter(input, output, scale);
  row_->check_reduce_scatter(input, output, scale);
  TORCH_CHECK_VALUE(!of_row.defined() || of_row.numel() == output.numel(),
                    "OrderedMesh: expected ", output.numel(),
                    " elements of what the row has summed, found ",
                    of_row.numel(), ".\nGive as many as the output has.");
  const auto reduction = std::make_shared<Reduction>(
      Reduction{.output = output,
                .of_row = of_row,
                .scale = scale,
                .result = c10::make_intrusive<Future>(
                    c10::ListType::create(c10::TensorType::get()))});
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    in_row_.push_back(reduction);
  }
  row_->reduce_scatter(input, output)
      ->addCallback(
          [this, reduction](Future& sum) { row_is_done(*reduction, sum); });
  return reduction->result;
}

void OrderedMesh::row_is_done(Reduction& reduction, Future& sum) {
  std::exception_ptr error = sum.hasError() ? sum.exception_ptr() : nullptr;
  if (!error && reduction.of_row.defined()) {
    try {
      const at::NoGradGuard no_grad;
      reduction.output.add_(reduction.of_row);
    } catch (...) {
      error = std::current_exception();
    }
  }
  if (error) column_->abort(error);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    reduction.is_summed_in_row = true;
  }
  launch_second_sums();
}

void OrderedMesh::launch_second_sums() {
  std::vector<std::pair<std::shared_ptr<Reduction>, FuturePtr>> launched;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    while (!in_row_.empty() && in_row_.front()->is_summed_in_row) {
      std::shared_ptr<Reduction> reduction = std::move(in_row_.front());
      in_row_.pop_front();
      FuturePtr sum = column_->all_reduce(reduction->output, reduction->scale);
      launched.emplace_back(std::move(reduction), std::move(sum));
    }
  }
  // A user's callback may run here, and call.
  for (const auto& [reduction, sum] : launched) {
    sum->addCallback([this, reduction = reduction](Future& done) {
      column_is_done(*reduction, done);
    });
  }
}

void OrderedMesh::column_is_done(Reduction& reduction, Future& sum) {
  if (sum.hasError()) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!is_ending_) row_->abort(sum.exception_ptr());
    }
    reduction.result->setError(sum.exception_ptr());
  } else {
    reduction.result->markCompleted(sum.value());
  }
}

}  // namespace brigade
