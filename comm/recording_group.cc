#include "brigade/comm/recording_group.h"

#include <c10/util/Exception.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "brigade/comm/backends/identical_ranks_backend.h"
#include "brigade/comm/group/group_info.h"
#include "brigade/comm/process_group.h"
#include "brigade/comm/status/status_transport.h"
#include "brigade/comm/streams/streams.h"

namespace brigade {
namespace {

RecordedCollective record_of(const CollectiveCall& collective) {
  RecordedCollective record = {.type = collective.type};
  for (const at::Tensor& t : collective.inputs) {
    const at::Tensor dense = t.is_sparse() ? t._values() : t;
    record.numel += dense.numel();
    record.bytes += static_cast<int64_t>(dense.nbytes());
  }
  if (!collective.inputs.empty()) {
    record.dtype = collective.inputs.front().scalar_type();
  }
  return record;
}

std::exception_ptr take(std::map<size_t, std::exception_ptr>& errors,
                        size_t sequence) {
  const auto node = errors.extract(sequence);
  return node.empty() ? nullptr : node.mapped();
}

}  // namespace

// The state of a RecordingGroup, whose methods use it with the mutex held.
class RecordingBackend final : public IdenticalRanksBackend,
                               public AnswersForAllRanks {
 public:
  struct Open {
    size_t sequence = 0;
    c10::intrusive_ptr<AnsweredWork> work = {};
    std::function<void()> compute = {};
    std::optional<c10::Event> launch = {};  // on a device with streams only
    std::vector<at::Tensor> tensors = {};   // there
    std::exception_ptr error = {};
  };

  RecordingBackend(int rank, int world_size)
      : IdenticalRanksBackend(rank, world_size) {}

  ~RecordingBackend() override { stop(); }

  const std::string getBackendName() const override { return "recording"; }

  std::unique_ptr<StatusTransport> make_status_transport() override {
    return std::make_unique<AnsweredStatuses>(
        c10::intrusive_ptr<RecordingBackend>::reclaim_copy(this));
  }

  c10::intrusive_ptr<c10d::ProcessGroup> make_subgroup(
      int rank, int world_size) override {
    return group_of(c10::make_intrusive<RecordingBackend>(rank, world_size));
  }

  // Makes the group that it serves, on all devices.
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

  // Without the mutex: callbacks of the future may launch collectives.
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

  // Completes queued collectives.
  void run_thread() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return is_stopping || !queued.empty(); });
      if (is_stopping) return;
      Open open = std::move(queued.front());
      queued.pop_front();
      lock.unlock();
      finish(open);
      open = {};
      lock.lock();
    }
  }

  // Fails what is open and joins the thread.
  void stop() {
    std::deque<Open> open;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      is_holding = false;
      is_stopping = true;
      open.swap(queued);
      for (auto& [sequence, collective] : held) {
        open.push_back(std::move(collective));
      }
      held.clear();
      changed.notify_all();
    }
    if (thread.joinable()) thread.join();
    for (const Open& collective : open) {
      collective.work->fail(std::make_exception_ptr(c10::DistBackendError(
          c10::str("the recording group ended while collective ",
                   collective.sequence, " was open."))));
    }
  }

  CommunicationStreams streams;
  std::thread thread;  // of complete_on_own_thread()

  std::mutex mutex;
  std::condition_variable changed;
  // Guarded by mutex.
  std::vector<RecordedCollective> log;
  std::map<size_t, Open> held;  // by sequence
  std::deque<Open> queued;      // for the thread
  std::map<size_t, std::exception_ptr> launch_errors;
  std::map<size_t, std::exception_ptr> completion_errors;
  bool is_holding = false;
  bool is_stopping = false;
  std::vector<std::string> statuses;  // sent
  StatusAnswers answers;
  int64_t num_status_holds = 0;
  int64_t num_released_holds = 0;

 protected:
  c10::intrusive_ptr<c10d::Work> launch(
      CollectiveCall collective, std::function<void()> compute) override {
    Open open;
    auto work =
        c10::make_intrusive<AnsweredWork>(getRank(), collective, timeout());
    open.work = work;
    open.compute = std::move(compute);
    if (const auto device = accelerator_of(collective)) {
      open.launch = CommunicationStreams::record_launch(*device);
      open.tensors = collective.inputs;
      open.tensors.insert(open.tensors.end(), collective.outputs.begin(),
                          collective.outputs.end());
    }
    {
      const std::lock_guard<std::mutex> lock(mutex);
      open.sequence = log.size();
      log.push_back(record_of(collective));
      changed.notify_all();
      if (auto error = take(launch_errors, open.sequence)) {
        std::rethrow_exception(error);
      }
      open.error = take(completion_errors, open.sequence);
      if (is_holding) {
        held.emplace(open.sequence, std::move(open));
        return work;
      }
      if (thread.joinable() && !is_stopping) {
        queued.push_back(std::move(open));
        return work;
      }
    }
    finish(open);
    return work;
  }

 private:
  // Answers what this rank sends at once; the answers can be held.
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
      TORCH_CHECK_VALUE(answer.by_rank.size() == size,
                        "answers to a rank_status must be one per rank, ", size,
                        ", got ", answer.by_rank.size(), ".");
    }

    bool is_complete(int64_t sequence) override {
      const std::lock_guard<std::mutex> lock(backend_->mutex);
      return is_released(sequence) || backend_->is_stopping;
    }

    std::optional<std::vector<RankStatus>> receive(int64_t sequence,
                                                   Deadline deadline) override {
      std::unique_lock<std::mutex> lock(backend_->mutex);
      const bool in_time = backend_->changed.wait_until(lock, deadline, [&] {
        return is_released(sequence) || backend_->is_stopping;
      });
      TORCH_CHECK(!backend_->is_stopping || is_released(sequence),
                  "the recording group ended while statuses were held.");
      if (!in_time) return std::nullopt;
      return std::move(answers_.extract(sequence).mapped().by_rank);
    }

    void leave(const RankStatus&) override {}
    void give_up(const RankStatus&) override {}

   private:
    struct Answer {
      std::vector<RankStatus> by_rank;
      int64_t hold = 0;  // the last one before it was sent
    };

    bool is_released(int64_t sequence) const {
      return answers_.at(sequence).hold <= backend_->num_released_holds;
    }

    const c10::intrusive_ptr<RecordingBackend> backend_;
    std::map<int64_t, Answer> answers_;  // by sequence
  };
};

RecordingGroup::RecordingGroup(int world_size, int rank) {
  TORCH_CHECK_VALUE(world_size >= 1 && rank >= 0 && rank < world_size,
                    "rank must be >= 0 and below the world size, got rank ",
                    rank, " and world size ", world_size, ".");
  backend_ = c10::make_intrusive<RecordingBackend>(rank, world_size);
  group_ = RecordingBackend::group_of(backend_);
}

RecordingGroup::~RecordingGroup() { backend_->stop(); }

std::vector<RecordedCollective> RecordingGroup::log() const {
  const std::lock_guard<std::mutex> lock(backend_->mutex);
  return backend_->log;
}

bool RecordingGroup::wait_for_launches(
    size_t count, std::chrono::milliseconds patience) const {
  std::unique_lock<std::mutex> lock(backend_->mutex);
  return backend_->changed.wait_for(
      lock, patience, [&] { return backend_->log.size() >= count; });
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
    auto node = backend_->held.extract(sequence);
    TORCH_CHECK_VALUE(!node.empty(), "collective ", sequence,
                      " is not held: ", backend_->log.size(),
                      " were launched, ", backend_->held.size(), " are held.");
    open = std::move(node.mapped());
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

void RecordingGroup::complete_on_own_thread() {
  const std::lock_guard<std::mutex> lock(backend_->mutex);
  backend_->thread =
      std::thread([backend = backend_.get()] { backend->run_thread(); });
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
  backend_->changed.notify_all();
}

}  // namespace brigade
