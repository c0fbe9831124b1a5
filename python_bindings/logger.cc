#include "brigade/python_bindings/logger.h"

#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/debug.h>

#include <chrono>
#include <cstdlib>
#include <optional>
#include <set>
#include <type_traits>

#include "absl/strings/ascii.h"
#include "absl/strings/str_join.h"
#include "brigade/observing/timeline.h"
#include "brigade/observing/timeline_recorder.h"

namespace brigade {
namespace {

// Leaves out the last argument where this torch's constructor has no such one.
template <typename Reducer, typename Last, typename... Arguments>
std::shared_ptr<Reducer> make_reducer_of_torch(Last last, Arguments... others) {
  if constexpr (std::is_constructible_v<Reducer, Arguments..., Last>) {
    return std::make_shared<Reducer>(std::move(others)..., std::move(last));
  } else {
    return std::make_shared<Reducer>(std::move(others)...);
  }
}

// torch's Logger holds a torch Reducer. This one reduces nothing.
std::shared_ptr<c10d::Reducer> idle_reducer(c10d::ProcessGroup& group) {
  at::Tensor parameter = at::zeros({1}).requires_grad_();
  return make_reducer_of_torch<c10d::Reducer>(
      /*bucket_bytes_cap_list, torch 2.11: */ std::vector<int64_t>{},
      std::vector<at::Tensor>{std::move(parameter)},
      std::vector<std::vector<size_t>>{{0}},
      c10::intrusive_ptr<c10d::ProcessGroup>::unsafe_reclaim_from_nonowning(
          &group),
      std::vector<bool>{false}, int64_t{c10d::kDefaultBucketBytesCap},
      /*find_unused_parameters=*/false, /*gradient_as_bucket_view=*/false,
      std::unordered_map<size_t, std::string>{},
      int64_t{c10d::kDefaultFirstBucketBytes},
      /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false);
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "N/A" : value;
}

// The difference of the system clock and the steady clock.
int64_t system_minus_steady_ns() {
  const auto ns = [](auto time) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               time.time_since_epoch())
        .count();
  };
  return ns(std::chrono::system_clock::now()) -
         ns(std::chrono::steady_clock::now());
}

}  // namespace

Logger::Logger(const TorchReducer& reducer)
    : c10d::Logger(idle_reducer(reducer.group())), reducer_(reducer) {}

void Logger::set_construction_data(const std::string& module_name,
                                   const std::vector<int>& device_ids,
                                   int output_device, bool broadcast_buffers,
                                   bool has_sync_bn, bool static_graph) {
  const ReducerOptions& options = reducer_.options();
  data_.strs_map["module_name"] = module_name;
  data_.strs_map["device_ids"] = absl::StrJoin(device_ids, ", ");
  data_.ints_map["output_device"] = output_device;
  data_.ints_map["broadcast_buffers"] = broadcast_buffers;
  data_.ints_map["has_sync_bn"] = has_sync_bn;
  data_.ints_map["static_graph"] = static_graph;
  data_.ints_map["world_size"] = reducer_.group().getSize();
  data_.ints_map["rank"] = reducer_.group().getRank();
  data_.strs_map["backend_name"] = reducer_.group().getBackendName();
  data_.ints_map["bucket_cap_bytes"] = options.bucket_caps_bytes.back();
  data_.ints_map["find_unused_parameters"] = options.find_unused_parameters;
  data_.ints_map["gradient_as_bucket_view"] = options.gradient_as_bucket_view;
  data_.ints_map["iteration"] = 0;
  describe_parameters();
  describe_environment();
}

void Logger::describe_parameters() {
  std::set<std::string> dtypes;
  const at::Device device = reducer_.parameters().front().device();
  bool several_devices = false;
  int64_t size_bytes = 0;
  std::optional<caffe2::TypeMeta> last_dtype;
  for (const at::Tensor& parameter : reducer_.parameters()) {
    if (last_dtype != parameter.dtype()) {
      last_dtype = parameter.dtype();
      dtypes.emplace(parameter.dtype().name());
    }
    several_devices |= parameter.device() != device;
    size_bytes += static_cast<int64_t>(parameter.nbytes());
  }
  data_.strs_map["dtypes"] = absl::StrJoin(dtypes, ", ");
  data_.ints_map["total_parameter_size_bytes"] = size_bytes;
  data_.ints_map["num_parameter_tensors"] =
      static_cast<int64_t>(reducer_.parameters().size());
  data_.strs_map["bucket_sizes"] =
      absl::StrJoin(reducer_.bucket_sizes_bytes(), ", ");
  data_.ints_map["is_multi_device_module"] = several_devices;
}

void Logger::describe_environment() {
  std::vector<std::string> names = {"MASTER_PORT", "MASTER_ADDR",
                                    "CUDA_VISIBLE_DEVICES",
                                    "TORCH_DISTRIBUTED_DEBUG"};
  const std::string& backend = data_.strs_map["backend_name"];
  if (backend == "gloo") {
    names.insert(names.end(), {"GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"});
    data_.ints_map["gloo_num_threads"] = 2;
  } else if (backend == "nccl") {
    names.insert(names.end(), {"NCCL_SOCKET_IFNAME", "NCCL_DEBUG",
                               "NCCL_NTHREADS", "NCCL_IB_TIMEOUT"});
    data_.strs_map["nccl_blocking_wait"] = variable("TORCH_NCCL_BLOCKING_WAIT");
    data_.strs_map["nccl_async_error_handling"] =
        variable("TORCH_NCCL_ASYNC_ERROR_HANDLING");
  }
  for (const std::string& name : names) {
    data_.strs_map[absl::AsciiStrToLower(name)] = variable(name.c_str());
  }
}

void Logger::sample_runtime() {
  const ReducerStatistics statistics = reducer_.statistics();
  const int64_t iteration = statistics.prepared;
  if (iteration == 0) return;
  if (iteration > TimelineRecorder::kAlwaysSampled &&
      iteration % reducer_.logging_sample_rate() != 0) {
    return;
  }
  data_.ints_map["iteration"] = iteration;
  data_.ints_map["can_set_static_graph"] = reducer_.is_graph_static();
  data_.ints_map["has_rebuilt_buckets"] = statistics.rebuilds > 0;
  if (statistics.rebuilds > 0) describe_buckets();
  const Timeline timeline = reducer_.timeline();
  if (timeline.iteration == iteration) describe_timeline(timeline);
}

void Logger::describe_buckets() {
  data_.strs_map["rebuilt_bucket_sizes"] =
      absl::StrJoin(reducer_.bucket_sizes_bytes(), ", ");
  std::vector<std::string> buckets;
  for (const std::vector<size_t>& bucket : reducer_.buckets()) {
    buckets.push_back(absl::StrJoin(bucket, " "));
  }
  data_.strs_map["rebuilt_per_bucket_param_indices"] =
      absl::StrJoin(buckets, ", ");
}

void Logger::describe_timeline(const Timeline& timeline) {
  const TimelineSummary summary = summarize(timeline);
  ++num_timelines_;
  add_to_average("forward_compute_time", summary.forward_compute_ns);
  add_to_average("backward_compute_time", summary.backward_compute_ns);
  add_to_average("backward_comm_time", summary.backward_comm_ns);
  add_to_average("backward_compute_comm_overlap_time", summary.overlap_ns);

  const int64_t offset_ns = system_minus_steady_ns();
  const auto set_time_of_day = [&](const char* name, int64_t time_ns) {
    if (time_ns > 0) data_.ints_map[name] = time_ns + offset_ns;
  };
  set_time_of_day("forward_compute_time_start", timeline.forward_begin_ns);
  set_time_of_day("backward_compute_time_start", timeline.backward_begin_ns);
  set_time_of_day("backward_compute_time_end", timeline.backward_end_ns);
  set_time_of_day("backward_comm_time_start", summary.comm_begin_ns);
  set_time_of_day("backward_comm_time_end", summary.comm_end_ns);

  std::vector<size_t> order;
  std::vector<bool> used(reducer_.parameters().size());
  for (const GradientTime& gradient : timeline.gradients) {
    order.push_back(gradient.variable.parameter);
    used[order.back()] = true;
  }
  data_.strs_map["prev_iteration_grad_ready_order_indices"] =
      absl::StrJoin(order, ", ");
  int64_t unused_bytes = 0;
  for (size_t i = 0; i < used.size(); ++i) {
    if (!used[i]) {
      unused_bytes += static_cast<int64_t>(reducer_.parameters()[i].nbytes());
    }
  }
  data_.ints_map["unused_parameter_size"] = unused_bytes;
}

void Logger::add_to_average(const std::string& name, int64_t time_ns) {
  int64_t& average_ns = data_.ints_map["avg_" + name];
  average_ns += (time_ns - average_ns) / num_timelines_;
  data_.ints_map[name] = time_ns;
}

void Logger::set_error(const std::string& text) {
  error_time_ns_ = now_ns();
  data_.ints_map["has_error"] = 1;
  data_.strs_map["error"] = text;
  data_.ints_map["iteration"] = reducer_.statistics().prepared;
}

at::DDPLoggingData Logger::data() {
  const auto error = reducer_.last_error();
  if (error && error->time_ns > error_time_ns_) {
    set_error(error->text);
    data_.ints_map["iteration"] = error->iteration;
    error_time_ns_ = error->time_ns;
  } else if (reducer_.statistics().aborted > 0 &&
             data_.ints_map.count("has_error") == 0) {
    set_error(
        "an error ended a backward; the exception that it raised says "
        "which");
  }
  data_.ints_map["num_buckets_reduced"] = reducer_.buckets_reduced();
  at::DDPLoggingData all = data_;
  // Keys that are here stay: these come from the reducer that does nothing.
  const at::DDPLoggingData from_torch = c10d::Logger::get_ddp_logging_data();
  all.strs_map.insert(from_torch.strs_map.begin(), from_torch.strs_map.end());
  all.ints_map.insert(from_torch.ints_map.begin(), from_torch.ints_map.end());
  return all;
}

}  // namespace brigade
