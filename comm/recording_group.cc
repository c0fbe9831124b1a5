#include "brigade/comm/recording_group.h"

#include <ATen/ThreadLocalState.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "brigade/comm/backends/identical_ranks_backend.h"
#include "brigade/comm/status/status_channel.h"
#include "brigade/comm/group/subgroup_answers.h"
#include "brigade/comm/streams/communication_streams.h"
#include "brigade/comm/streams/device_types.h"

namespace brigade {
namespace {

using Clock = std::chrono::steady_clock;

RecordedCollective describe(const CollectiveCall& collective, size_t sequence) {
  RecordedCollective record;
  record.sequence = sequence;
  record.type = collective.type;
  record.root = collective.root;
  for (const at::Tensor& t : collective.inputs) {
    const at::Tensor dense = t.is_sparse() ? t._values() : t;
    record.numel += dense.numel();
    record.bytes += static_cast<int64_t>(dense.nbytes());
  }
  if (!collective.inputs.empty()) {
    record.dtype = collective.inputs.front().scalar_type();
    record.device = collective.inputs.front().device();
  }
  return record;
}

}  // namespace

class RecordingBackend final : public IdenticalRanksBackend,
                               public AnswersStatuses,
                               public AnswersSubgroups {
 public:
  RecordingBackend(int rank, int world_size)
      : IdenticalRanksBackend(rank, world_size) {}

  ~RecordingBackend() override { stop(); }

  const std::string getBackendName() const override { return "recording"; }

  std::vector<RecordedCollective> log() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return log_;
  }

  bool wait_for_launches(size_t count,
                         std::chrono::milliseconds patience) const {
    std::unique_lock<std::mutex> lock(mutex_);
    return launched_.wait_for(lock, patience,
                              [&] { return log_.size() >= count; });
  }

  void hold() {
    std::lock_guard<std::mutex> lock(mutex_);
    holding_ = true;
  }

  void release() {
    std::map<size_t, Open> open;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      holding_ = false;
      open.swap(held_);
    }
    for (auto& [sequence, collective] : open) finish(collective);
  }

  void complete(size_t sequence) {
    Open open;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto it = held_.find(sequence);
      TORCH_CHECK_VALUE(it != held_.end(), "collective ", sequence,
                        " is not held: ", log_.size(), " were launched, ",
                        held_.size(), " are held.");
      open = std::move(it->second);
      held_.erase(it);
    }
    finish(open);
  }

  std::vector<size_t> held() const {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<size_t> sequences;
    for (const auto& [sequence, open] : held_) sequences.push_back(sequence);
    return sequences;
  }

  void fail_at_launch(size_t sequence, std::exception_ptr error) {
    std::lock_guard<std::mutex> lock(mutex_);
    launch_errors_[sequence] = std::move(error);
  }

  void fail_at_completion(size_t sequence, std::exception_ptr error) {
    std::lock_guard<std::mutex> lock(mutex_);
    completion_errors_[sequence] = std::move(error);
  }

  void delay_by(CollectiveCost cost) {
    std::lock_guard<std::mutex> lock(mutex_);
    cost_ = std::move(cost);
    if (cost_ && !link_.joinable()) {
      link_ = std::thread([this] { carry(); });
    }
  }

  std::vector<std::string> statuses() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return statuses_.sent;
  }

  void answer_statuses_with(StatusAnswers answers) {
    std::lock_guard<std::mutex> lock(mutex_);
    statuses_.answers = std::move(answers);
  }

  void hold_statuses() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++statuses_.num_holds;
  }

  void release_statuses() {
    std::lock_guard<std::mutex> lock(mutex_);
    statuses_.num_released = statuses_.num_holds;
    statuses_changed_.notify_all();
  }

  std::unique_ptr<StatusTransport> make_status_transport() override {
    return std::make_unique<AnsweredStatuses>(
        c10::intrusive_ptr<RecordingBackend>::reclaim_copy(this));
  }

  c10::intrusive_ptr<c10d::ProcessGroup> make_subgroup(
      int rank, int world_size) override {
    return group_of(c10::make_intrusive<RecordingBackend>(rank, world_size));
  }

  // The group that it serves, on all devices.
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

  // Fails what is open and joins the link's thread.
  void stop() {
    std::map<size_t, Open> open;
    std::thread link;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      holding_ = false;
      cost_ = nullptr;
      stopping_ = true;
      statuses_changed_.notify_all();
      open.swap(held_);
      for (Open& queued : on_link_) {
        const size_t sequence = queued.sequence;
        open.emplace(sequence, std::move(queued));
      }
      on_link_.clear();
      link.swap(link_);
      link_changed_.notify_all();
    }
    if (link.joinable()) link.join();
    for (auto& [sequence, collective] : open) {
      collective.work->fail(std::make_exception_ptr(c10::DistBackendError(
          c10::str("the recording group ended while collective ", sequence,
                   " was open."))));
    }
  }

 protected:
  c10::intrusive_ptr<c10d::Work> launch(
      CollectiveCall collective, std::function<void()> compute) override {
    Open open;
    open.work =
        c10::make_intrusive<AnsweredWork>(getRank(), collective, timeout());
    if (const auto device = accelerator_of(collective)) {
      open.launch = CommunicationStreams::record_launch(*device);
      open.tensors = collective.inputs;
      open.tensors.insert(open.tensors.end(), collective.outputs.begin(),
                          collective.outputs.end());
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      open.sequence = log_.size();
      log_.push_back(describe(collective, open.sequence));
      log_.back().rank_status = std::exchange(statuses_.latest, std::nullopt);
      launched_.notify_all();
      if (auto error = take(launch_errors_, open.sequence)) {
        std::rethrow_exception(error);
      }
      open.error = take(completion_errors_, open.sequence);
      open.compute = std::move(compute);
      auto work = open.work;
      if (holding_) {
        held_.emplace(open.sequence, std::move(open));
        return work;
      }
      if (cost_) {
        const Clock::time_point start = std::max(Clock::now(), link_free_at_);
        link_free_at_ = start + cost_(log_.back());
        open.due = link_free_at_;
        on_link_.push_back(std::move(open));
        link_changed_.notify_all();
        return work;
      }
    }
    finish(open);
    return open.work;
  }

 private:
  struct Open {
    size_t sequence = 0;
    c10::intrusive_ptr<AnsweredWork> work = {};
    std::function<void()> compute = {};
    std::optional<c10::Event> launch = {};  // on a device with streams only
    std::vector<at::Tensor> tensors = {};   // there
    std::exception_ptr error = {};
    Clock::time_point due = {};
  };

  // What this rank sends is answered at once; the answers can be held.
  class AnsweredStatuses final : public StatusTransport {
   public:
    explicit AnsweredStatuses(c10::intrusive_ptr<RecordingBackend> backend)
        : backend_(std::move(backend)) {}

    void send(const RankStatus& own) override {
      Answer& answer = answers_[own.sequence];
      answer.by_rank = backend_->answers_to(own);
      std::lock_guard<std::mutex> lock(backend_->mutex_);
      answer.hold = backend_->statuses_.num_holds;
    }

    bool is_complete(int64_t sequence) override {
      std::lock_guard<std::mutex> lock(backend_->mutex_);
      return is_released(sequence) || backend_->stopping_;
    }

    std::optional<std::vector<RankStatus>> receive(int64_t sequence,
                                                   Deadline deadline) override {
      std::unique_lock<std::mutex> lock(backend_->mutex_);
      const bool in_time =
          backend_->statuses_changed_.wait_until(lock, deadline, [&] {
            return is_released(sequence) || backend_->stopping_;
          });
      TORCH_CHECK(!backend_->stopping_ || is_released(sequence),
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
      return answers_.at(sequence).hold <= backend_->statuses_.num_released;
    }

    const c10::intrusive_ptr<RecordingBackend> backend_;
    std::map<int64_t, Answer> answers_;  // by sequence
  };

  struct Statuses {
    std::vector<std::string> sent = {};
    std::optional<std::string> latest = {};  // since the last collective
    StatusAnswers answers = {};
    int64_t num_holds = 0;  // of hold_statuses()
    int64_t num_released = 0;
  };

  std::vector<RankStatus> answers_to(const RankStatus& own) {
    StatusAnswers answers;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      statuses_.sent.push_back(describe_status(own));
      statuses_.latest = statuses_.sent.back();
      answers = statuses_.answers;
    }
    if (!answers) return std::vector<RankStatus>(getSize(), own);
    std::vector<RankStatus> by_rank = answers(own);
    TORCH_CHECK_VALUE(by_rank.size() == static_cast<size_t>(getSize()),
                      "answers to a rank_status must be one per rank, ",
                      getSize(), ", got ", by_rank.size(), ".");
    return by_rank;
  }

  static std::exception_ptr take(std::map<size_t, std::exception_ptr>& errors,
                                 size_t sequence) {
    auto it = errors.find(sequence);
    if (it == errors.end()) return nullptr;
    std::exception_ptr error = std::move(it->second);
    errors.erase(it);
    return error;
  }

  // Not under the lock: callbacks of the future may launch collectives.
  void finish(Open& open) {
    if (open.error) {
      open.work->fail(open.error);
    } else if (open.launch) {
      streams_.run(*open.launch, std::move(open.tensors),
                   [&] { open.work->answer(open.compute); });
    } else {
      open.work->answer(open.compute);
    }
  }

  // The link's thread.
  void carry() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopping_) {
      if (on_link_.empty()) {
        link_changed_.wait(lock);
        continue;
      }
      const Clock::time_point due = on_link_.front().due;
      if (Clock::now() < due) {
        link_changed_.wait_until(lock, due);
        continue;
      }
      Open open = std::move(on_link_.front());
      on_link_.pop_front();
      lock.unlock();
      finish(open);
      open = {};
      lock.lock();
    }
  }

  CommunicationStreams streams_;
  mutable std::mutex mutex_;
  mutable std::condition_variable launched_;
  std::condition_variable link_changed_;
  // Guarded by mutex_.
  std::vector<RecordedCollective> log_;
  Statuses statuses_;
  std::condition_variable statuses_changed_;
  std::map<size_t, Open> held_;
  std::deque<Open> on_link_;
  std::map<size_t, std::exception_ptr> launch_errors_;
  std::map<size_t, std::exception_ptr> completion_errors_;
  CollectiveCost cost_;
  Clock::time_point link_free_at_ = {};
  bool holding_ = false;
  bool stopping_ = false;
  std::thread link_;
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
  return backend_->log();
}

bool RecordingGroup::wait_for_launches(
    size_t count, std::chrono::milliseconds patience) const {
  return backend_->wait_for_launches(count, patience);
}

void RecordingGroup::hold() { backend_->hold(); }
void RecordingGroup::release() { backend_->release(); }
void RecordingGroup::complete(size_t sequence) { backend_->complete(sequence); }
std::vector<size_t> RecordingGroup::held() const { return backend_->held(); }

void RecordingGroup::fail_at_launch(size_t sequence, std::exception_ptr error) {
  backend_->fail_at_launch(sequence, std::move(error));
}

void RecordingGroup::fail_at_completion(size_t sequence,
                                        std::exception_ptr error) {
  backend_->fail_at_completion(sequence, std::move(error));
}

void RecordingGroup::delay_by(CollectiveCost cost) {
  backend_->delay_by(std::move(cost));
}

std::vector<std::string> RecordingGroup::statuses() const {
  return backend_->statuses();
}

void RecordingGroup::answer_statuses_with(StatusAnswers answers) {
  backend_->answer_statuses_with(std::move(answers));
}

void RecordingGroup::hold_statuses() { backend_->hold_statuses(); }
void RecordingGroup::release_statuses() { backend_->release_statuses(); }

}  // namespace brigade
