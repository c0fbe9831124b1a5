// Logging data of DistributedDataParallel: the dictionary of
// torch's _get_ddp_logging_data().
//
// It is a torch.distributed.Logger, so that torch's functions which report to
// one accept it; but its data comes from a TorchReducer. The keys are
// torch's; c10/util/Logging.h and Logger::set_runtime_stats_and_log give their
// meaning. Times are in ns; those of day are the system clock's.
//
// Thread safety: one call at a time.

#ifndef BRIGADE_PYTHON_BINDINGS_LOGGER_H_
#define BRIGADE_PYTHON_BINDINGS_LOGGER_H_

#include <c10/util/Logging.h>

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <vector>

#include "brigade/python_bindings/torch_reducer.h"

namespace brigade {

class Logger : public c10d::Logger {
 public:
  // REQUIRES: `reducer` outlives this object.
  explicit Logger(const TorchReducer& reducer);

  void set_construction_data(const std::string& module_name,
                             const std::vector<int>& device_ids,
                             int output_device, bool broadcast_buffers,
                             bool has_sync_bn, bool static_graph);

  // Called at the beginning of a forward: samples the iterations before it.
  void sample_runtime();

  void set_error(const std::string& text);
  void set_comm_hook_name(const std::string& name) {
    data_.strs_map["comm_hook"] = name;
  }
  void set_static_graph() { data_.ints_map["static_graph"] = 1; }
  void set_uneven_input_join() { data_.ints_map["join_uneven_inputs"] = 1; }

  // With the reducer's last error, and reports of torch's functions.
  at::DDPLoggingData data();

 private:
  void describe_parameters();
  void describe_environment();
  void describe_buckets();
  void describe_timeline(const Timeline& timeline);
  void add_to_average(const std::string& name, int64_t time_ns);

  const TorchReducer& reducer_;
  at::DDPLoggingData data_;
  int64_t num_timelines_ = 0;  // that the averages are of
  int64_t error_time_ns_ = 0;  // of the error in data_, steady clock
};

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_LOGGER_H_
