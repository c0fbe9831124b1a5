#include <c10/util/Exception.h>
#include <pybind11/chrono.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/default_comm_hooks.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/observing/timeline.h"
#include "brigade/python_bindings/python_hooks.h"
#include "brigade/python_bindings/registrations.h"
#include "brigade/python_bindings/torch_reducer.h"

namespace brigade {
namespace {

using FuturePtr = std::shared_ptr<torch::jit::PythonFutureWrapper>;
using NamesByIndex = std::unordered_map<size_t, std::string>;

// Returns the names by index, without torch's leading dot for parameters of the
// root module. Errors: RuntimeError for an invalid index.
std::vector<std::string> names_of(const NamesByIndex& by_index, size_t count) {
  if (by_index.empty()) return {};
  std::vector<std::string> names(count);
  for (const auto& [index, name] : by_index) {
    TORCH_CHECK(index < count, "Reducer: param_to_name_mapping names ",
                "parameter ", index, ", but there are ", count,
                " parameters.\nName each parameter by its index.");
    names[index] = name.starts_with('.') ? name.substr(1) : name;
  }
  return names;
}

c10::intrusive_ptr<c10d::ProcessGroup> owned(c10d::ProcessGroup& group) {
  return c10::intrusive_ptr<c10d::ProcessGroup>::unsafe_reclaim_from_nonowning(
      &group);
}

FuturePtr wrapped(c10::intrusive_ptr<c10::ivalue::Future> future) {
  return std::make_shared<torch::jit::PythonFutureWrapper>(std::move(future));
}

// Takes the arguments of torch's reducer, then ours, from `rebuild_buckets` on.
std::shared_ptr<TorchReducer> make_reducer(
    std::vector<at::Tensor> params,
    std::vector<std::vector<size_t>> bucket_indices,
    const std::vector<int64_t>& per_bucket_size_limits,
    c10d::ProcessGroup& process_group,
    std::vector<bool> expect_sparse_gradients, int64_t bucket_bytes_cap,
    bool find_unused_parameters, bool gradient_as_bucket_view,
    const NamesByIndex& param_to_name_mapping, int64_t first_bucket_bytes_cap,
    bool skip_all_reduce_unused_params, bool use_python_reducer,
    std::vector<int64_t> bucket_bytes_cap_list,
    bool /*batched_grad_copy: no effect*/,
    bool /*lazy_bucket_allocation: no effect*/, bool rebuild_buckets,
    bool static_graph, bool verify_across_ranks, bool one_backward_per_forward,
    int max_unconfirmed_iterations, bool reproducible) {
  TORCH_CHECK(per_bucket_size_limits.size() == bucket_indices.size(),
              "Reducer: expected one entry of per_bucket_size_limits per "
              "bucket, found ",
              per_bucket_size_limits.size(), " for ", bucket_indices.size(),
              " buckets.");
  TORCH_CHECK(rebuild_buckets || !bucket_indices.empty(),
              "Reducer: rebuild_buckets=False requires bucket_indices, "
              "found none.\nPass the buckets to keep.");
  ReducerOptions options;
  options.find_unused_parameters = find_unused_parameters;
  options.skip_all_reduce_unused_parameters = skip_all_reduce_unused_params;
  options.static_graph = static_graph;
  options.parameter_names = names_of(param_to_name_mapping, params.size());
  if (!rebuild_buckets) options.bucket_plan = std::exchange(bucket_indices, {});
  options.expect_sparse_gradients = std::move(expect_sparse_gradients);
  options.gradient_as_bucket_view = gradient_as_bucket_view;
  options.verify_across_ranks = verify_across_ranks;
  options.one_backward_per_forward = one_backward_per_forward;
  options.max_unconfirmed_iterations = max_unconfirmed_iterations;
  options.reproducible = reproducible;
  options.bucket_cap_bytes =
      bucket_bytes_cap_list.empty()
          ? std::vector<int64_t>{first_bucket_bytes_cap, bucket_bytes_cap}
          : std::move(bucket_bytes_cap_list);
  const py::gil_scoped_release no_gil;
  auto reducer = std::make_unique<TorchReducer>(
      std::move(params), owned(process_group), std::move(options),
      std::move(bucket_indices));
  if (use_python_reducer) reducer->remove_hooks();
  return destroyed_without_gil(std::move(reducer));
}

void register_comm_hook(TorchReducer& reducer, py::object state,
                        py::object hook) {
  const std::string name =
      py::str(py::module_::import("brigade._checks").attr("hook_name")(hook));
  CommHookPtr python_hook =
      python_comm_hook(std::move(state), std::move(hook), name);
  const py::gil_scoped_release no_gil;
  reducer.register_comm_hook(std::move(python_hook), name);
}

void set_steps_in_backward(TorchReducer& reducer,
                           const std::vector<at::Tensor>& parameters,
                           py::object step) {
  ParameterStep steps =
      [step = held_object(std::move(step))](const at::Tensor& parameter) {
        const py::gil_scoped_acquire gil;
        (*step)(parameter);
      };
  const py::gil_scoped_release no_gil;
  reducer.step_in_backward(parameters, std::move(steps));
}

using Numbers = std::map<std::string, int64_t>;

Numbers statistics_of(const TorchReducer& reducer) {
  const ReducerStatistics statistics = reducer.statistics();
  return {{"iteration", statistics.prepared},
          {"rebuilds", statistics.rebuilds},
          {"buckets_reduced", reducer.buckets_reduced()}};
}

using Times = std::tuple<int64_t, Numbers, Numbers, std::vector<size_t>>;

// Returns nullopt if the last iteration was not sampled.
std::optional<Times> times_of(const TorchReducer& reducer) {
  const int64_t last = reducer.statistics().prepared;
  if (last == 0 ||
      (last > kAlwaysSampled && last % reducer.logging_sample_rate() != 0)) {
    return std::nullopt;
  }
  const Timeline timeline = reducer.timeline();
  const TimelineSummary summary = summarize(timeline);
  std::vector<size_t> order;
  for (const GradientTime& gradient : timeline.gradients) {
    order.push_back(gradient.variable.parameter);
  }
  return Times{timeline.iteration,
               {{"forward_compute_time", summary.forward_compute_ns},
                {"backward_compute_time", summary.backward_compute_ns},
                {"backward_comm_time", summary.backward_comm_ns},
                {"backward_compute_comm_overlap_time", summary.overlap_ns}},
               {{"forward_compute_time_start", timeline.forward_begin_ns},
                {"backward_compute_time_start", timeline.backward_begin_ns},
                {"backward_compute_time_end", timeline.backward_end_ns},
                {"backward_comm_time_start", summary.comm_begin_ns},
                {"backward_comm_time_end", summary.comm_end_ns}},
               std::move(order)};
}

// Calls `launch` with the value of `first` to start a second collective.
FuturePtr chain(const torch::jit::PythonFutureWrapper& first,
                py::object launch) {
  NextCollective next = [launch = held_object(std::move(launch))](
                            const c10::IValue& value) {
    const py::gil_scoped_acquire gil;
    const py::object second = (*launch)(torch::jit::toPyObject(value));
    TORCH_CHECK_TYPE(py::isinstance<torch::jit::PythonFutureWrapper>(second),
                     describe_no_future("then_collective: `launch`", second));
    return second.cast<FuturePtr>()->fut;
  };
  const py::gil_scoped_release no_gil;
  return wrapped(then_collective(first.fut, std::move(next)));
}

}  // namespace

void register_reducer(py::module_& module) {
  py::class_<TorchReducer, std::shared_ptr<TorchReducer>> reducer(
      module, "Reducer",
      "Averages gradients over a process group during backward; replaces "
      "torch.distributed.Reducer.\n\n"
      "The constructor takes the arguments of torch's, of which "
      "per_bucket_size_limits, batched_grad_copy and lazy_bucket_allocation "
      "have no effect, and by keyword:\n"
      "    rebuild_buckets: Rebuild buckets once, in the order of readiness. "
      "False: bucket_indices are the buckets.\n"
      "    static_graph, one_backward_per_forward, max_unconfirmed_iterations, "
      "reproducible: As of DistributedDataParallel.\n"
      "    verify_across_ranks: Compare parameters and options with the other "
      "ranks; the constructor is then collective.\n\n"
      "Example:\n"
      "    reducer = brigade.Reducer(params, [[0, 1]], [0], dist.group.WORLD)\n"
      "    output = forward()\n"
      "    reducer.prepare_for_backward(output)\n"
      "    output.backward()  # averages gradients\n\n"
      "Raises RuntimeError for invalid arguments or if the ranks differ, and "
      "DistBackendError if a peer fails.");
  reducer
      .def(py::init(&make_reducer), py::arg("params"),
           py::arg("bucket_indices"), py::arg("per_bucket_size_limits"),
           py::arg("process_group"),
           py::arg("expect_sparse_gradients") = std::vector<bool>(),
           py::arg("bucket_bytes_cap") = kDefaultBucketCapsBytes[1],
           py::arg("find_unused_parameters") = false,
           py::arg("gradient_as_bucket_view") = false,
           py::arg("param_to_name_mapping") = NamesByIndex(),
           py::arg("first_bucket_bytes_cap") = kDefaultBucketCapsBytes[0],
           py::arg("skip_all_reduce_unused_params") = false,
           py::arg("use_python_reducer") = false,
           py::arg("bucket_bytes_cap_list") = std::vector<int64_t>(),
           py::arg("batched_grad_copy") = false,
           py::arg("lazy_bucket_allocation") = false, py::kw_only(),
           py::arg("rebuild_buckets") = true, py::arg("static_graph") = false,
           py::arg("verify_across_ranks") = true,
           py::arg("one_backward_per_forward") = false,
           py::arg("max_unconfirmed_iterations") =
               ReducerOptions{}.max_unconfirmed_iterations,
           py::arg("reproducible") = false,
           py::keep_alive<1, 5>())  // a group may be written in Python
      .def("prepare_for_forward", &TorchReducer::prepare_for_forward, NoGil(),
           "Call it before a forward. Optional; timelines begin here.")
      .def("prepare_for_backward", &TorchReducer::prepare_for_backward,
           py::arg("outputs"), NoGil(),
           "Call it between forward and a backward from `outputs` whose "
           "gradients are to be averaged. Raises RuntimeError if the last "
           "backward left parameters without gradients.")
      .def(
          "prepare_for_backward",
          [](TorchReducer& self, const at::Tensor& output) {
            self.prepare_for_backward({output});
          },
          py::arg("output"), NoGil())
      .def("_note_local_forward", &TorchReducer::note_local_forward,
           py::arg("outputs"), NoGil())
      .def("_expect_forwards", &TorchReducer::expect_forwards)
      .def("_register_comm_hook", &register_comm_hook, py::arg("state"),
           py::arg("comm_hook"))
      .def("_register_builtin_comm_hook",
           &TorchReducer::register_builtin_comm_hook, py::arg("comm_hook_type"),
           NoGil())
      .def(
          "_run_allreduce_hook",
          [](TorchReducer& self, c10d::GradBucket& bucket) {
            return wrapped(all_reduce_hook(self.group())->runHook(bucket));
          },
          py::arg("bucket"), NoGil())
      .def("_rebuild_buckets", &TorchReducer::rebuild_buckets, NoGil())
      .def("_plan_automatically", &TorchReducer::plan_automatically, NoGil())
      .def("_remove_autograd_hooks", &TorchReducer::remove_hooks, NoGil())
      .def("_reset_state", &TorchReducer::reset, NoGil())
      .def(
          "_update_process_group",
          [](TorchReducer& self, c10d::ProcessGroup& group) {
            self.set_process_group(owned(group));
          },
          py::arg("new_process_group"), NoGil(), py::keep_alive<1, 2>())
      .def(
          "_set_forward_pass_work_handle",
          [](TorchReducer& self, c10d::Work& work, bool use_static_world_size) {
            self.set_divisor(
                c10::intrusive_ptr<c10d::Work>::unsafe_reclaim_from_nonowning(
                    &work),
                use_static_world_size);
          },
          py::arg("work"), py::arg("use_static_world_size"), NoGil())
      .def(
          "_install_post_backward_futures",
          [](const TorchReducer&, const std::vector<FuturePtr>& futures) {
            for (const FuturePtr& future : futures) {
              TORCH_CHECK_TYPE(future != nullptr,
                               "Reducer: each of the futures must be a "
                               "torch.futures.Future, one is None.");
              future->fut->waitAndThrow();
            }
          },
          py::arg("futures"), NoGil(), "Waits for the futures.")
      .def(
          "_push_all_rebuilt_params", [](TorchReducer&) {},
          "Without effect: _shadow_iteration() includes it.")
      .def("_shadow_iteration", &TorchReducer::shadow_iteration,
           py::arg("use_world_size") = true, NoGil())
      .def("_statistics", &statistics_of, NoGil())
      .def("_timeline", &times_of, NoGil(),
           "Returns None if the last iteration was not sampled, otherwise its "
           "number, durations and steady-clock times by torch's names, and the "
           "parameters in the order in which gradients became ready.")
      .def(
          "_last_error",
          [](const TorchReducer& self) {
            std::optional<std::tuple<int64_t, int64_t, std::string>> found;
            if (const auto error = self.last_error()) {
              found = {error->time_ns, error->iteration, error->text};
            }
            return found;
          },
          NoGil(), "Returns (steady-clock time, iteration, text) or None.")
      .def("parameter_names", &TorchReducer::parameter_names,
           "Returns the names by parameter, or an empty list.")
      .def("_bucket_plan", &TorchReducer::buckets, NoGil(),
           "Returns the parameter indices of each bucket, in launch order.")
      .def("can_continue", &TorchReducer::can_continue, NoGil(),
           "Returns False if the group's connections are closed "
           "(docs/guides/failures.md): then make a new group.")
      .def("_abort_group", &TorchReducer::abort_group, NoGil())
      .def("_await_statuses", &TorchReducer::await_statuses,
           py::call_guard<torch::PyWarningHandler, py::gil_scoped_release>())
      .def("_meet_peers", &TorchReducer::meet_peers, NoGil())
      .def("_send_buffers", &TorchReducer::send_buffers, py::arg("buffers"),
           NoGil())
      .def("_set_static_graph", &TorchReducer::set_static_graph, NoGil())
      .def("_ddp_graph_static", &TorchReducer::is_graph_static, NoGil())
      .def("_get_local_used_map", &TorchReducer::used_parameter_counts, NoGil())
      .def("_set_mixed_precision_param_dtype",
           &TorchReducer::set_mixed_precision_dtype, py::arg("data_type"),
           NoGil())
      .def("_autograd_hook", &TorchReducer::gradient_ready, py::arg("index"),
           NoGil())
      .def("_check_reducer_finalized", &TorchReducer::check_finalized, NoGil())
      .def("_set_ddp_runtime_logging_sample_rate",
           &TorchReducer::set_logging_sample_rate, py::arg("sample_rate"),
           NoGil())
      .def(
          "describe_timeline",
          [](const TorchReducer& self) { return describe(self.timeline()); },
          NoGil(),
          "Returns a table of the last sampled iteration: a summary, and one "
          "line per bucket, in ms since the beginning of backward.")
      .def(
          "chrome_trace",
          [](const TorchReducer& self, int rank) {
            return to_chrome_trace(self.timeline(), rank);
          },
          py::arg("rank"), NoGil(),
          "Returns the last sampled iteration as JSON for Perfetto and "
          "Holistic "
          "Trace Analysis. `rank`: dist.get_rank().")
      .def(
          "set_stall_report_after", &TorchReducer::set_stall_report_after,
          py::arg("time"), NoGil(),
          "Sets how long this rank waits for its peers before it warns and "
          "names the late ranks. Default: half of the group's timeout, at most "
          "60 s. timedelta(0): no warnings. Raises ValueError for a negative "
          "time.")
      .def(
          "_delay_all_reduce", [](TorchReducer&) {},
          "Without effect: the reducer detects the end of backward.")
      .def("_step_in_backward", &set_steps_in_backward, py::arg("parameters"),
           py::arg("step"),
           "Calls step(parameter) during backward when the parameter's bucket "
           "is complete, after any comm hook, on any thread.")
      .def("_set_manual_finalization_required",
           &TorchReducer::set_manual_finalization, py::arg("required"), NoGil())
      .def("_should_finalize_after_backward",
           &TorchReducer::must_finalize_after_backward, NoGil())
      .def("_finalize_backward_manual", &TorchReducer::finalize_backward,
           NoGil());
  module.def(
      "then_collective", &chain, py::arg("future"), py::arg("launch"),
      "Launches a second collective of a comm hook after the first one.\n\n"
      "Args:\n"
      "    future: Future of the hook's first collective.\n"
      "    launch: Function of the value of `future`; launches a collective "
      "and "
      "returns its future. Called when backward ends, in the order of the "
      "buckets on all ranks. A continuation, future.then(), must not launch "
      "collectives: its order differs between ranks.\n\n"
      "Returns:\n"
      "    A future of the second collective, for the hook to return. Outside "
      "of a comm hook, waits for `future` and calls `launch` immediately.\n\n"
      "Raises:\n"
      "    TypeError: `launch` does not return a future. Backward raises the "
      "errors of `launch` and closes the group, since the peers wait for the "
      "collective.\n\n"
      "Example:\n"
      "    def hook(state, bucket):\n"
      "        first = dist.all_reduce(bucket.buffer(), async_op=True)\n"
      "        return brigade.then_collective(first.get_future(), second)");
}

}  // namespace brigade
