#include "brigade/tests/fsdp/fuzz_run.h"

#include <exception>
#include <map>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/message_of.h"
#include "brigade/tests/fsdp/fuzz_branch.h"

namespace brigade::testing {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

class RankRun {
 public:
  RankRun(const Case& c, const Group& group, Record& record)
      : case_(c),
        rank_(group->getRank()),
        record_(record),
        net_(c.net, rank_),
        root_(net_.units(), group, c.options) {}

  void run() {
    note_ranges();
    for (const Action& action : actions_of(case_)) {
      for (const Operation& operation : action.operations) {
        Sight sight;
        run(operation, sight);
        sight.values = copies_of(root_.shards());
        sight.gradients = copies_of(gradients_of(root_.shards()));
        record_.sights.push_back(std::move(sight));
      }
    }
  }

 private:
  void note_ranges() {
    for (size_t unit = 0; unit < root_.num_units(); ++unit) {
      for (size_t i = 0; i < root_.shards_of(unit).size(); ++i) {
        const std::string name = FuzzNet::name_of(unit, i);
        for (const auto& segment : root_.unit(unit).segments) {
          for (size_t k = 0; k < segment->parameters().size(); ++k) {
            if (segment->parameters()[k].name != name) continue;
            record_.ranges.push_back(
                segment->layout().range(k, segment->rank()));
          }
        }
      }
    }
  }

  const Branch& branch(size_t forward) const {
    return case_.forwards[forward][rank_];
  }

  std::vector<at::Tensor> run_forward(size_t forward, const at::Tensor& x,
                                      const Fault& fault = {}) {
    return root_.forward([&] {
      return run_branch(
          net_, branch(forward), x, fault,
          [&](size_t unit, const at::Tensor& in, const auto& run) {
            return root_.call(unit, in, run);
          });
    });
  }

  void run(const Operation& operation, Sight& sight) {
    switch (operation.kind) {
      case Kind::kForward: {
        const size_t forward = operation.forwards[0];
        Live live{.input = input_of(case_.net, branch(forward))};
        live.outputs = run_forward(forward, live.input);
        sight.outputs = copies_of(live.outputs);
        live_[forward] = std::move(live);
        break;
      }
      case Kind::kEvaluate: {
        const torch::NoGradGuard no_grad;
        const size_t forward = operation.forwards[0];
        sight.outputs = copies_of(
            run_forward(forward, input_of(case_.net, branch(forward))));
        break;
      }
      case Kind::kBackward: {
        root_.set_synchronizes(operation.flag);
        set_adding_up(operation.adding_up);
        at::Tensor loss;
        for (const size_t i : operation.forwards) {
          const at::Tensor one = loss_of_branch(branch(i), live_[i].outputs);
          loss = loss.defined() ? loss + one : one;
        }
        loss.backward();
        root_.set_synchronizes(true);
        set_adding_up(0);
        for (const size_t i : operation.forwards) {
          sight.outputs.push_back(live_[i].input.grad());
          live_.erase(i);
        }
        break;
      }
      case Kind::kDrop:
        live_.erase(operation.forwards[0]);
        break;
      case Kind::kZero: {
        const auto shards = root_.shards();
        for (size_t i = 0; i < shards.size(); ++i) {
          if (operation.index < shards.size() && i != operation.index) continue;
          if (operation.flag && shards[i].grad().defined()) {
            shards[i].grad().zero_();
          } else {
            shards[i].mutable_grad() = at::Tensor();
          }
        }
        break;
      }
      case Kind::kSgd: {
        const torch::NoGradGuard no_grad;
        for (at::Tensor shard : root_.shards()) {
          if (shard.grad().defined()) shard.sub_(shard.grad(), kRate);
        }
        break;
      }
      case Kind::kFailingForward:
      case Kind::kFailingBackward:
        run_failing(operation, sight);
        break;
      case Kind::kReadWhole:
        root_.unshard();
        sight.outputs = copies_of(net_.parameters());
        root_.reshard(/*writes=*/false);
        break;
      case Kind::kUnshard:
        root_.unshard(operation.index);
        if (operation.flag) {
          root_.await_unit(operation.index);
          root_.reshard(operation.index, /*writes=*/false);
        }
        break;
      case Kind::kScale: {
        root_.unshard();
        {
          const torch::NoGradGuard no_grad;
          net_.parameters()[operation.index].mul_(0.75);
        }
        root_.reshard(/*writes=*/true);
        break;
      }
      case Kind::kClip:
        sight.norm = root_.clip_grad_norm(operation.max_norm, operation.p);
        break;
      case Kind::kSetReshards:
        root_.settings(operation.index).reshards_after_forward = operation.flag;
        root_.settings(operation.index).reshards_to = operation.reshards_to;
        break;
      case Kind::kMeet:
        root_.sum_over_ranks(torch::zeros({1}, torch::kDouble),
                             /*takes_largest=*/false);
        break;
    }
  }

  void set_adding_up(uint32_t units) {
    for (size_t unit = 0; unit < root_.num_units(); ++unit) {
      root_.settings(unit).synchronizes = (units >> unit & 1) == 0;
    }
  }

  void run_failing(const Operation& operation, Sight& sight) {
    const size_t forward = operation.forwards[0];
    Fault fault;
    if (operation.rank == rank_) {
      (operation.kind == Kind::kFailingForward ? fault.forward
                                               : fault.backward) =
          operation.place;
    }
    try {
      const auto outputs =
          run_forward(forward, input_of(case_.net, branch(forward)), fault);
      loss_of_branch(branch(forward), outputs).backward();
    } catch (const std::exception&) {
      sight.error = message_of(std::current_exception());
    }
    if (!root_.can_continue()) sight.error += "; it cannot continue";
  }

  const Case& case_;
  const int rank_;
  Record& record_;
  FuzzNet net_;
  ShardedRoot root_;
  std::map<size_t, Live> live_;  // by forward
};

}  // namespace

void run_on_rank(const Case& c, const Group& group, Record& record) {
  try {
    RankRun(c, group, record).run();
  } catch (const std::exception&) {
    record.failure = message_of(std::current_exception());
    throw;
  }
}

}  // namespace brigade::testing
