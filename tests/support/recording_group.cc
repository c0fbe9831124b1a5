#include "brigade/tests/support/recording_group.h"

#include <c10/util/Exception.h>

#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "brigade/comm/group/group_info.h"
#include "brigade/comm/process_group.h"
#include "brigade/comm/status/status_channel.h"
#include "brigade/tests/support/identical_ranks_backend.h"

namespace brigade {
namespace {

RecordedCollective record_of(const CollectiveCall& collective) {
  RecordedCollective record = {.type = collective.type};
  for (const at::Tensor& t : collective.inputs) {
    const at::Tensor dense = t.is_sparse() ? t._values() : t;
    record.numel += dense.numel();
    record.bytes += static_cast<int64_t>(dense.nbytes());
    record.dtype = t.scalar_type();
  }
  return record;
}

std::exception_ptr take(std::map<size_t, std::exception_ptr>& errors,
                        size_t sequence) {
  const auto node = errors.extract(sequence);
  return node.empty() ? nullptr : node.mapped();
}

}  // namespace

// The state of a RecordingGroup.
class RecordingBackend final : public IdenticalRanksBackend,
                               public SimulatesPeers {
 public:
  struct Open {
    c10::intrusive_ptr<AnsweredWork> work = {};
    std::function<void()> compute = {};
    std::optional<c10::Event> launch = {};  // on devices with streams
    std::vector<at::Tensor> tensors = {};   // on devices with streams
    std::exception_ptr error = {};
  };

  using IdenticalRanksBackend::IdenticalRanksBackend;

  std::unique_ptr<StatusTransport> make_status_transport() override {
    return std::make_unique<AnsweredStatuses>(
        c10::intrusive_ptr<RecordingBackend>::reclaim_copy(this));
  }

  c10::intrusive_ptr<c10d::ProcessGroup> make_subgroup(
      int rank, int world_size) override {
    return group_of(c10::make_intrusive<RecordingBackend>(rank, world_size));
  }

  // Makes a group with this backend for all device types.
  static c10::intrusive_ptr<c10d::ProcessGroup> group_of(
      const c10::intrusive_ptr<RecordingBackend>& backend) {
    using c10d::ProcessGroup;
    auto group = c10::make_intrusive<ProcessGroup>(backend->getRank(),
                                                   backend->getSize());
    for (const at::DeviceType type : kDeviceTypes) {
      group->setBackend(type, ProcessGroup::BackendType::CUSTOM,
                        c10::intrusive_ptr<c10d::Backend>(backend));
    }
    group->setDefaultBackend(ProcessGroup::BackendType::CUSTOM);
    group->setGroupName("recording");
    return group;
  }

  // REQUIRES: the mutex is not held; callbacks may launch collectives.
  void finish(Open& open) {
    if (open.error) {
      open.work->fail(open.error);
    } else if (open.launch) {
      streams.run(*open.launch, std::move(open.tensors),
                  [&] { open.work->answer(open.compute); });
    } else {
      open.work->answer(open.compute);
    }
  }

  CommunicationStreams streams;

  std::mutex mutex;
  // Guarded by mutex.
  std::vector<RecordedCollective> log;
  std::map<size_t, Open> held;  // by sequence
  std::map<size_t, std::exception_ptr> launch_errors;
  std::map<size_t, std::exception_ptr> completion_errors;
  bool is_holding = false;
  std::vector<std::string> statuses;  // sent
  StatusAnswers answers;
  int64_t num_status_holds = 0;
  int64_t num_released_holds = 0;

 protected:
  WorkPtr launch(CollectiveCall collective,
                 std::function<void()> compute) override {
    auto work = c10::make_intrusive<AnsweredWork>(collective);
    Open open = {.work = work, .compute = std::move(compute)};
    if (const auto device = accelerator_of(collective)) {
      open.launch = CommunicationStreams::record_launch(*device);
      open.tensors = collective.inputs;
      open.tensors.insert(open.tensors.end(), collective.outputs.begin(),
                          collective.outputs.end());
    }
    {
      const std::lock_guard<std::mutex> lock(mutex);
      const size_t sequence = log.size();
      log.push_back(record_of(collective));
      if (auto error = take(launch_errors, sequence)) {
        std::rethrow_exception(error);
      }
      open.error = take(completion_errors, sequence);
      if (is_holding) {
        held.emplace(sequence, std::move(open));
        return work;
      }
    }
    finish(open);
    return work;
  }

 private:
  // Computes all ranks' statuses when this rank sends; a test can hold them.
  class AnsweredStatuses final : public StatusTransport {
   public:
    explicit AnsweredStatuses(c10::intrusive_ptr<RecordingBackend> backend)
        : backend_(std::move(backend)) {}

    void send(const RankStatus& own) override {
      StatusAnswers answers;
      Answer& answer = answers_[own.sequence];
      {
        const std::lock_guard<std::mutex> lock(backend_->mutex);
        backend_->statuses.push_back(describe_status(own));
        answers = backend_->answers;
        answer.hold = backend_->num_status_holds;
      }
      const auto size = static_cast<size_t>(backend_->getSize());
      answer.by_rank =
          answers ? answers(own) : std::vector<RankStatus>(size, own);
    }

    bool is_complete(int64_t sequence) override {
      const std::lock_guard<std::mutex> lock(backend_->mutex);
      return answers_.at(sequence).hold <= backend_->num_released_holds;
    }

    std::optional<std::vector<RankStatus>> receive(int64_t sequence,
                                                   Deadline deadline) override {
      while (!is_complete(sequence)) {
        if (std::chrono::steady_clock::now() >= deadline) return std::nullopt;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      return std::move(answers_.extract(sequence).mapped().by_rank);
    }

    void abort(const RankStatus&) override {}

   private:
    struct Answer {
      std::vector<RankStatus> by_rank;
      int64_t hold = 0;  // number of the last hold before the exchange
    };

    const c10::intrusive_ptr<RecordingBackend> backend_;
    std::map<int64_t, Answer> answers_;  // by sequence
  };
};

RecordingGroup::RecordingGroup(int world_size, int rank)
    : backend_(c10::make_intrusive<RecordingBackend>(rank, world_size)),
      group_(RecordingBackend::group_of(backend_)) {}

RecordingGroup::~RecordingGroup() {
  std::map<size_t, RecordingBackend::Open> open;
  {
    const std::lock_guard<std::mutex> lock(backend_->mutex);
    backend_->is_holding = false;
    open.swap(backend_->held);
  }
  for (const auto& [sequence, collective] : open) {
    collective.work->fail(std::make_exception_ptr(
        c10::DistBackendError("the recording group has ended.")));
  }
}

std::vector<RecordedCollective> RecordingGroup::log() const {
  const std::lock_guard<std::mutex> lock(backend_->mutex);
  return backend_->log;
}

void RecordingGroup::hold() {
  const std::lock_guard<std::mutex> lock(backend_->mutex);
  backend_->is_holding = true;
}

void RecordingGroup::release() {
  std::map<size_t, RecordingBackend::Open> open;
  {
    const std::lock_guard<std::mutex> lock(backend_->mutex);
    backend_->is_holding = false;
    open.swap(backend_->held);
  }
  for (auto& [sequence, collective] : open) backend_->finish(collective);
}

void RecordingGroup::complete(size_t sequence) {
  RecordingBackend::Open open;
  {
    const std::lock_guard<std::mutex> lock(backend_->mutex);
    open = std::move(backend_->held.extract(sequence).mapped());
  }
  backend_->finish(open);
}

std::vector<size_t> RecordingGroup::held() const {
  const std::lock_guard<std::mutex> lock(backend_->mutex);
  std::vector<size_t> sequences;
  for (const auto& [sequence, open] : backend_->held) {
    sequences.push_back(sequence);
  }
  return sequences;
}

void RecordingGroup::fail_at_launch(size_t sequence, std::exception_ptr error) {
  const std::lock_guard<std::mutex> lock(backend_->mutex);
  backend_->launch_errors[sequence] = std::move(error);
}

void RecordingGroup::fail_at_completion(size_t sequence,
                                        std::exception_ptr error) {
  const std::lock_guard<std::mutex> lock(backend_->mutex);
  backend_->completion_errors[sequence] = std::move(error);
}

std::vector<std::string> RecordingGroup::statuses() const {
  const std::lock_guard<std::mutex> lock(backend_->mutex);
  return backend_->statuses;
}

void RecordingGroup::answer_statuses_with(StatusAnswers answers) {
  const std::lock_guard<std::mutex> lock(backend_->mutex);
  backend_->answers = std::move(answers);
}

void RecordingGroup::hold_statuses() {
  const std::lock_guard<std::mutex> lock(backend_->mutex);
  ++backend_->num_status_holds;
}

void RecordingGroup::release_statuses() {
  const std::lock_guard<std::mutex> lock(backend_->mutex);
  backend_->num_released_holds = backend_->num_status_holds;
}

}  // namespace brigade
