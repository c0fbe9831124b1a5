#include "brigade/checkpoint/checkpoint.h"

#include <c10/core/Allocator.h>
#include <c10/core/impl/COW.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/nn.h>
#include <torch/optim.h>
#include <torch/types.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/checkpoint/optimizer_state.h"
#include "brigade/checkpoint/safetensors.h"
#include "brigade/tests/checkpoint/checkpoint_checks.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

namespace fs = std::filesystem;
namespace optim = torch::optim;

using ::testing::AllOf;
using testing::bytes_of_file;
using ::testing::Each;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using testing::run_ranks;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Tensors = std::vector<at::Tensor>;
using MakeOptimizer = std::function<std::unique_ptr<optim::Optimizer>(Tensors)>;

template <typename Optimizer, typename Options>
MakeOptimizer maker(Options options) {
  return [options](Tensors parameters) {
    return std::make_unique<Optimizer>(std::move(parameters), options);
  };
}

MakeOptimizer adamw() { return maker<optim::AdamW>(optim::AdamWOptions(0.01)); }

// Training of a model whose parameters are cut into `num_shards` runs of
// elements; rank r holds shard r % num_shards. Steps are elementwise, so that
// sharding changes no bit.
class ShardedTraining {
 public:
  ShardedTraining(const Group& group, int num_shards, const MakeOptimizer& make,
                  int seed = 1, bool is_transposed = false)
      : model(std::vector<CheckpointTensor>(), group) {
    const int64_t shard = group->getRank() % num_shards;
    const auto add = [&](const std::string& name, at::Tensor unsharded) {
      unsharded = unsharded + seed;
      if (is_transposed && unsharded.dim() == 2) {
        unsharded = unsharded.t().contiguous().t();
      }
      CheckpointTensor tensor = unsharded_tensor(name, unsharded);
      const int64_t end = unsharded.numel() * (shard + 1) / num_shards;
      tensor.begin = unsharded.numel() * shard / num_shards;
      tensor.strides = unsharded.strides().vec();
      tensor.held =
          unsharded.as_strided({end - tensor.begin}, {1}, tensor.begin)
              .clone()
              .requires_grad_();
      model.tensors.push_back(std::move(tensor));
    };
    add("weight", torch::arange(35.0).view({5, 7}));
    add("bias", torch::arange(3.0));
    add("scale", torch::ones({}));
    add("double", torch::arange(6.0, torch::kDouble));
    add("none", torch::empty({0, 4}));
    optimizer = make(held());
  }

  Tensors held() const {
    Tensors all;
    for (const CheckpointTensor& tensor : model.tensors) {
      all.push_back(tensor.held);
    }
    return all;
  }

  // Parameter 3, "double", is unused before step 2.
  void train(int from, int to) {
    for (int step = from; step < to; ++step) {
      optimizer->zero_grad();
      for (size_t i = 0; i < model.tensors.size(); ++i) {
        at::Tensor held = model.tensors[i].held;
        if (i == 3 && step < 2) continue;
        held.mutable_grad() = held.detach() * 0.5 + (step + 1);
      }
      optimizer->step();
    }
  }

  CheckpointModel model;
  std::unique_ptr<optim::Optimizer> optimizer;
};

class CheckpointTest : public ::testing::Test {
 protected:
  void SetUp() override {
    base_ = fs::path(::testing::TempDir()) /
            absl::StrCat("brigade_checkpoint_", ::getpid());
    fs::create_directories(base_);
  }
  void TearDown() override { fs::remove_all(base_); }

  std::string path(const std::string& name) const { return base_ / name; }
  std::string file() const { return path("one.safetensors"); }
  std::string folder() const { return path("some/checkpoint"); }

  // Trains and saves in both layouts.
  void save(int num_ranks, int num_shards, int steps,
            const MakeOptimizer& make = adamw()) {
    run_ranks(num_ranks, [&](const Group& group) {
      ShardedTraining training(group, num_shards, make);
      training.train(0, steps);
      for (const std::string& to : {file(), folder()}) {
        save_checkpoint(to, training.model, *training.optimizer,
                        {{"step", std::to_string(steps)}});
      }
    });
  }

  // Loads `from` on `num_ranks`, trains, and returns the bytes they then save.
  std::string resumed(const std::string& from, int num_ranks, int num_shards,
                      int more_steps, const MakeOptimizer& make = adamw(),
                      bool is_transposed = false) {
    run_ranks(num_ranks, [&](const Group& group) {
      ShardedTraining training(group, num_shards, make, /*seed=*/99,
                               is_transposed);
      training.train(0, 3);  // undone by loading
      const CheckpointMetadata metadata =
          load_checkpoint(from, training.model, *training.optimizer);
      const int step = std::stoi(metadata.at("step"));
      training.train(step, step + more_steps);
      save_checkpoint(path("again.safetensors"), training.model,
                      *training.optimizer,
                      {{"step", std::to_string(step + more_steps)}});
    });
    return bytes_of_file(path("again.safetensors"));
  }

  // Returns the error of loading. Expects the same error on all ranks, and
  // unchanged tensors.
  std::string error_of_loading(const std::string& from, int num_ranks = 2,
                               const MakeOptimizer& make = adamw()) {
    std::vector<std::string> errors(num_ranks);
    run_ranks(num_ranks, [&](const Group& group) {
      ShardedTraining training(group, num_ranks, make, /*seed=*/99);
      training.train(0, 3);
      const auto state = [&](const std::string& name) {
        save_checkpoint(path(name), training.model, *training.optimizer);
        return bytes_of_file(path(name));
      };
      const std::string before = state("before.safetensors");
      errors[group->getRank()] = error_of(
          [&] { load_checkpoint(from, training.model, *training.optimizer); });
      EXPECT_EQ(before, state("after.safetensors"));
    });
    EXPECT_THAT(errors, Each(errors[0]));
    return errors[0];
  }

  std::vector<fs::path> files_of_folder() const {
    std::vector<fs::path> files;
    for (const auto& entry : fs::directory_iterator(folder())) {
      files.push_back(entry.path());
    }
    std::ranges::sort(files);
    return files;
  }

 private:
  fs::path base_;
};

void write_file(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

struct OptimizerCase {
  std::string name;
  MakeOptimizer make;

  friend void PrintTo(const OptimizerCase& c, std::ostream* out) {
    *out << c.name;
  }
};

class CheckpointOfOptimizerTest
    : public CheckpointTest,
      public ::testing::WithParamInterface<OptimizerCase> {};

TEST_P(CheckpointOfOptimizerTest, AnyRanksResumeWithTheSameBits) {
  const MakeOptimizer& make = GetParam().make;
  save(1, 1, 5, make);
  const std::string expected = bytes_of_file(file());
  for (const auto& [num_ranks, num_shards] :
       {std::pair(3, 3), std::pair(4, 2), std::pair(2, 1)}) {
    save(num_ranks, num_shards, 3, make);
    for (const std::string& from : {file(), folder()}) {
      for (const auto& [num_loading, num_parts] :
           {std::pair(1, 1), std::pair(2, 2), std::pair(4, 2)}) {
        EXPECT_EQ(resumed(from, num_loading, num_parts, 2, make), expected)
            << num_ranks << "/" << num_shards << " to " << num_loading << "/"
            << num_parts << " from " << from;
      }
    }
  }
}

TEST_P(CheckpointOfOptimizerTest, AParameterThatNeverSteppedHasNoState) {
  save(2, 2, 1, GetParam().make);
  SafetensorsReader reader(file());
  const bool has_state = std::ranges::any_of(
      reader.entries(),
      [](const auto& entry) { return entry.first.starts_with("double."); });
  EXPECT_EQ(has_state, GetParam().name == "Adagrad");
  save(1, 1, 4, GetParam().make);
  const std::string expected = bytes_of_file(file());
  save(2, 2, 1, GetParam().make);
  EXPECT_EQ(resumed(file(), 2, 2, 3, GetParam().make), expected);
}

INSTANTIATE_TEST_SUITE_P(
    Optimizers, CheckpointOfOptimizerTest,
    ::testing::Values(
        OptimizerCase{"Sgd", maker<optim::SGD>(optim::SGDOptions(0.1))},
        OptimizerCase{"SgdMomentum",
                      maker<optim::SGD>(optim::SGDOptions(0.1).momentum(0.9))},
        OptimizerCase{"Adam", maker<optim::Adam>(optim::AdamOptions(0.01))},
        OptimizerCase{
            "AdamWAmsgrad",
            maker<optim::AdamW>(optim::AdamWOptions(0.01).amsgrad(true))},
        OptimizerCase{
            "RmsProp",
            maker<optim::RMSprop>(
                optim::RMSpropOptions(0.01).momentum(0.5).centered(true))},
        OptimizerCase{
            "Adagrad",
            maker<optim::Adagrad>(optim::AdagradOptions(0.1).lr_decay(0.1))}),
    [](const auto& info) { return info.param.name; });

// Shards are in memory order, files of unsharded tensors in C order.
TEST_F(CheckpointTest, LoadingReordersElementsOfOtherStrides) {
  save(1, 1, 5);
  const std::string expected = bytes_of_file(file());
  save(3, 3, 3);
  for (const std::string& from : {file(), folder()}) {
    EXPECT_EQ(resumed(from, 2, 2, 2, adamw(), /*is_transposed=*/true),
              expected);
  }
}

TEST_F(CheckpointTest, FilesHoldUnshardedTensorsUnderParameterNames) {
  save(2, 2, 3);
  SafetensorsReader reader(file());
  const auto shape_of = [&](const std::string& name) {
    return reader.entries().at(name).shape;
  };
  EXPECT_THAT(shape_of("weight"), ElementsAre(5, 7));
  EXPECT_THAT(shape_of("weight.exp_avg"), ElementsAre(5, 7));
  EXPECT_THAT(shape_of("weight.step"), IsEmpty());
  int64_t step = 0;
  reader.read("weight.step", 0, std::as_writable_bytes(std::span(&step, 1)));
  EXPECT_EQ(step, 3);
  EXPECT_EQ(reader.metadata().at("brigade.optimizer"), "AdamW");
  EXPECT_THAT(reader.metadata().at("brigade.optimizer.options"),
              AllOf(HasSubstr(R"("lr":0.01)"), HasSubstr(R"("betas":[0.9,)")));
  EXPECT_EQ(files_of_folder().size(), 3u);
}

TEST_F(CheckpointTest, SavingDoesNotCopyALazyClone) {
  const at::Tensor clone = at::_lazy_clone(torch::ones({4}));
  for (const std::string& to : {file(), folder()}) {
    save_checkpoint(to,
                    {{unsharded_tensor("w", clone)}, single_process_group()});
    EXPECT_TRUE(c10::impl::cow::is_cow_data_ptr(clone.storage().data_ptr()));
  }
}

// In data-parallel training the model is unsharded.
TEST_F(CheckpointTest, AModuleIsSavedWithItsBuffers) {
  const auto make = [](double value) {
    torch::nn::Sequential net(torch::nn::Linear(3, 4),
                              torch::nn::BatchNorm1d(4));
    const torch::NoGradGuard no_grad;
    for (at::Tensor& parameter : net->parameters()) parameter.fill_(value);
    return net;
  };
  for (const std::string& to : {file(), folder()}) {
    at::Tensor expected;
    run_ranks(2, [&](const Group& group) {
      torch::nn::Sequential net = make(1);
      optim::SGD optimizer(net->parameters(),
                           optim::SGDOptions(0.1).momentum(0.9));
      net->forward(torch::arange(6.0).view({2, 3}) + group->getRank())
          .square()
          .sum()
          .backward();
      for (at::Tensor& parameter : net->parameters()) {
        parameter.mutable_grad() = torch::ones_like(parameter);
      }
      optimizer.step();
      save_checkpoint(to, {*net, group}, optimizer, {{"step", "1"}});
      if (group->getRank() == 0) {
        expected = net->named_buffers()["1.running_mean"].clone();
      }
    });
    run_ranks(3, [&](const Group& group) {
      torch::nn::Sequential net = make(7);
      optim::SGD optimizer(net->parameters(),
                           optim::SGDOptions(0.1).momentum(0.9));
      EXPECT_EQ(load_checkpoint(to, {*net, group}, optimizer).at("step"), "1");
      EXPECT_TRUE(at::equal(net->named_buffers()["1.running_mean"], expected));
      EXPECT_TRUE(at::allclose(net->parameters()[0], torch::full({4, 3}, 0.9)));
      optimizer.step();
    });
  }
  // One process without a group; tied and transposed parameters.
  torch::nn::Linear saved(3, 2), loaded(3, 2);
  saved->weight.set_data(torch::ones({3, 2}).t());
  saved->register_parameter("tied", saved->weight);
  loaded->register_parameter("tied", loaded->weight);
  optim::Adam of_saved(saved->parameters()), of_loaded(loaded->parameters());
  saved->forward(torch::ones({1, 3})).sum().backward();
  of_saved.step();
  save_checkpoint(path("alone.safetensors"), *saved, of_saved);
  load_checkpoint(path("alone.safetensors"), *loaded, of_loaded);
  EXPECT_TRUE(at::equal(loaded->weight, saved->weight));
  const auto moment_of = [](optim::Adam& adam, const at::Tensor& parameter) {
    return static_cast<optim::AdamParamState&>(
               *adam.state().at(parameter.unsafeGetTensorImpl()))
        .exp_avg();
  };
  EXPECT_TRUE(at::equal(moment_of(of_loaded, loaded->weight),
                        moment_of(of_saved, saved->weight)));
}

TEST_F(CheckpointTest, ShardsOfAnyDtypeAreSavedInBothLayouts) {
  const std::vector<at::ScalarType> dtypes = {at::kComplexFloat, at::kBFloat16,
                                              at::kShort, at::kBool,
                                              at::kFloat8_e4m3fn};
  // Rank r of two holds elements 2r to 2r + 2 of 3.
  const auto make = [&](const Group& group, int seed) {
    CheckpointModel model(std::vector<CheckpointTensor>(), group);
    for (const at::ScalarType dtype : dtypes) {
      const at::Tensor whole = (torch::arange(3.0) + seed).to(dtype);
      CheckpointTensor tensor =
          unsharded_tensor(c10::toString(dtype), whole.clone());
      tensor.begin = 2 * group->getRank();
      tensor.held = whole.slice(0, tensor.begin, tensor.begin + 2).clone();
      model.tensors.push_back(std::move(tensor));
    }
    return model;
  };
  for (const std::string& to : {file(), folder()}) {
    run_ranks(2, [&](const Group& group) {
      save_checkpoint(to, make(group, 1));
      const CheckpointModel loaded = make(group, 7);
      const CheckpointModel expected = make(group, 1);
      load_checkpoint(to, loaded);
      for (size_t i = 0; i < dtypes.size(); ++i) {
        EXPECT_TRUE(at::equal(loaded.tensors[i].held.to(at::kComplexFloat),
                              expected.tensors[i].held.to(at::kComplexFloat)))
            << to << dtypes[i];
      }
    });
  }
}

// ---- Options.

class OptionsTest : public CheckpointTest {
 protected:
  // Saves with one optimizer and loads with another. Returns the warnings, and
  // expects the saved options and bits afterwards.
  std::vector<std::string> warnings_of(const MakeOptimizer& saved,
                                       const MakeOptimizer& loaded) {
    const auto group = single_process_group();
    ShardedTraining first(group, 1, saved);
    first.train(0, 3);
    const OptimizerState expected = state_of(*first.optimizer);
    save_checkpoint(file(), first.model, *first.optimizer);
    ShardedTraining second(group, 1, loaded, /*seed=*/2);
    OptimizerState state = state_of(*second.optimizer);
    const LoadedCheckpoint found =
        load_with_state(file(), second.model, &state);
    set_state(*second.optimizer, state);
    EXPECT_EQ(state_of(*second.optimizer).options, expected.options);
    first.train(3, 6);
    second.train(3, 6);
    for (size_t i = 0; i < first.held().size(); ++i) {
      EXPECT_TRUE(at::equal(first.held()[i], second.held()[i]));
    }
    return found.warnings;
  }
};

TEST_F(OptionsTest, LoadingUsesSavedOptionsAndNamesEachDifference) {
  const auto saved =
      optim::AdamWOptions(0.01).betas({0.8, 0.95}).eps(1e-6).weight_decay(0.1);
  const MakeOptimizer make = maker<optim::AdamW>(saved);
  EXPECT_THAT(warnings_of(make, make), IsEmpty());
  auto other = saved;
  EXPECT_THAT(
      warnings_of(make, maker<optim::AdamW>(other.lr(0.5).betas({0.8, 0.9}))),
      ElementsAre(AllOf(HasSubstr("other options of AdamW"),
                        HasSubstr("lr = 0.5 became 0.01"),
                        HasSubstr("betas = [0.8,0.9] became [0.8,0.95]"))));
  EXPECT_THAT(warnings_of(make, maker<optim::AdamW>(optim::AdamWOptions(0.01))),
              ElementsAre(AllOf(HasSubstr("eps = "), HasSubstr("weight_decay"),
                                Not(HasSubstr("lr")))));
  EXPECT_THAT(
      warnings_of(maker<optim::SGD>(optim::SGDOptions(0.1).momentum(0.9)),
                  maker<optim::SGD>(
                      optim::SGDOptions(0.1).momentum(0.5).nesterov(true))),
      ElementsAre(AllOf(HasSubstr("momentum = 0.5 became 0.9"),
                        HasSubstr("nesterov = true became false"))));
}

TEST_F(OptionsTest, EachParameterGroupHasItsOwnOptions) {
  const auto group = single_process_group();
  const auto make = [&](ShardedTraining& training, double first,
                        double second) {
    std::vector<optim::OptimizerParamGroup> groups;
    const Tensors held = training.held();
    groups.emplace_back(Tensors(held.begin(), held.begin() + 1),
                        std::make_unique<optim::SGDOptions>(first));
    groups.emplace_back(Tensors(held.begin() + 1, held.end()),
                        std::make_unique<optim::SGDOptions>(second));
    training.optimizer =
        std::make_unique<optim::SGD>(groups, optim::SGDOptions(1));
  };
  ShardedTraining saved(group, 1, adamw());
  make(saved, 0.1, 0.2);
  save_checkpoint(file(), saved.model, *saved.optimizer);
  ShardedTraining loaded(group, 1, adamw());
  make(loaded, 0.1, 0.3);
  OptimizerState state = state_of(*loaded.optimizer);
  EXPECT_THAT(load_with_state(file(), loaded.model, &state).warnings,
              ElementsAre(AllOf(HasSubstr("group 1: lr = 0.3 became 0.2"),
                                Not(HasSubstr("group 0")))));
  loaded.optimizer = maker<optim::SGD>(optim::SGDOptions(0.1))(loaded.held());
  EXPECT_THAT(error_of([&] {
                load_checkpoint(file(), loaded.model, *loaded.optimizer);
              }),
              HasSubstr("SGD has 2 parameter groups, this one has 1"));
}

// Python's optimizers have options that LibTorch's lack.
TEST_F(OptionsTest, AnOptionOfOnlyOneLibraryIsNamed) {
  ShardedTraining training(single_process_group(), 1, adamw());
  OptimizerState python = state_of(*training.optimizer);
  const std::string own = python.options[0];
  python.options[0] = R"({"lr":0.01,"maximize":false})";
  save_with_state(file(), CheckpointLayout::kFile, training.model, &python, {});
  OptimizerState state = state_of(*training.optimizer);
  EXPECT_THAT(load_with_state(file(), training.model, &state).warnings,
              ElementsAre(HasSubstr("betas = [0.9,0.999] stays")));
  python.options[0] = R"({"lr":0.01,"maximize":true})";
  save_with_state(file(), CheckpointLayout::kFile, training.model, &python, {});
  EXPECT_THAT(error_of([&] {
                load_checkpoint(file(), training.model, *training.optimizer);
              }),
              HasSubstr("maximize = true, which this AdamW does not have"));
}

// ---- Damage and other models.

TEST_F(CheckpointTest, AnyDamageIsOneErrorAndChangesNothing) {
  save(2, 2, 2);
  std::vector<fs::path> files = files_of_folder();
  files.push_back(file());
  for (const fs::path& damaged : files) {
    const std::string& from = damaged == file() ? file() : folder();
    const std::string good = bytes_of_file(damaged);
    for (const size_t cut : {size_t{0}, good.size() / 2, good.size() - 1}) {
      write_file(damaged, good.substr(0, cut));
      EXPECT_THAT(error_of_loading(from),
                  AllOf(HasSubstr(damaged.filename()), HasSubstr("damaged")));
    }
    for (const size_t byte : {size_t{20}, good.size() - 1}) {
      std::string bad = good;
      bad[byte] = static_cast<char>(bad[byte] ^ 1);
      write_file(damaged, bad);
      EXPECT_THAT(error_of_loading(from), HasSubstr(damaged.filename()));
      EXPECT_THAT(error_of_loading(from, 3), HasSubstr(damaged.filename()));
    }
    fs::remove(damaged);
    EXPECT_THAT(error_of_loading(from),
                AllOf(HasSubstr(damaged.filename()), HasSubstr("No such")));
    write_file(damaged, good);
  }
  EXPECT_EQ(resumed(folder(), 2, 2, 0), bytes_of_file(file()));
}

TEST_F(CheckpointTest, AnIndexThatContradictsItselfIsAnError) {
  save(2, 2, 2);
  const std::string index = folder() + "/index.safetensors";
  const SafetensorsMetadata good = SafetensorsReader(index).metadata();
  const auto error_with = [&](const std::string& before,
                              const std::string& after) {
    SafetensorsMetadata bad = good;
    std::string& text = bad.at("brigade.shards");
    EXPECT_NE(text.find(before), std::string::npos);
    text.replace(text.find(before), before.size(), after);
    SafetensorsWriter(index, {}, bad).finish();
    return error_of_loading(folder());
  };
  EXPECT_THAT(error_with(R"("numel":17)", R"("numel":16)"),
              HasSubstr("are not consecutive"));
  EXPECT_THAT(error_with("[5,7]", "[5,8]"), HasSubstr("expected 40"));
  EXPECT_THAT(error_with("{", "["), HasSubstr("is not an index of shards"));
}

TEST_F(CheckpointTest, EachCopyOfAFileIsVerified) {
  save(1, 1, 2);
  const std::string good = bytes_of_file(file());
  const std::string copy = path("copy.safetensors");
  for (size_t from_end = 1; from_end < 200; from_end += 60) {
    std::string bad = good;
    bad[bad.size() - from_end] ^= 1;
    write_file(copy, bad);
    run_ranks(3, [&](const Group& group) {
      ShardedTraining training(group, 3, adamw(), /*seed=*/99);
      EXPECT_THAT(error_of([&] {
                    load_checkpoint(group->getRank() == 2 ? copy : file(),
                                    training.model, *training.optimizer);
                  }),
                  AllOf(HasSubstr("rank 2"), HasSubstr("CRC-32")));
    });
  }
}

TEST_F(CheckpointTest, OtherTensorsOrOptimizersAreErrors) {
  save(2, 2, 3);
  const auto error_of_model = [&](const CheckpointModel& model) {
    return error_of([&] { load_checkpoint(folder(), model); });
  };
  const auto group = single_process_group();
  EXPECT_THAT(error_of_model(
                  {{unsharded_tensor("weight", torch::ones({5, 8}))}, group}),
              HasSubstr("'weight' is F32 of [5, 7], expected F32 of [5, 8]"));
  EXPECT_THAT(
      error_of_model({{unsharded_tensor("other", torch::ones({5, 7}))}, group}),
      HasSubstr("has no tensor 'other'"));
  const auto load_with = [&](const MakeOptimizer& make) {
    return error_of_loading(file(), 2, make);
  };
  EXPECT_THAT(load_with(maker<optim::Adam>(optim::AdamOptions(0.01))),
              HasSubstr("the state of Adam, found the state of AdamW"));
  EXPECT_THAT(
      load_with(maker<optim::AdamW>(optim::AdamWOptions(0.01).amsgrad(true))),
      HasSubstr("max_exp_avg_sq', expected as state of this AdamW"));
  save(2, 2, 3, maker<optim::SGD>(optim::SGDOptions(0.1).momentum(0.9)));
  EXPECT_THAT(load_with(maker<optim::SGD>(optim::SGDOptions(0.1))),
              HasSubstr("momentum_buffer', which this SGD does not use"));
  ShardedTraining training(group, 1, adamw());
  save_checkpoint(file(), training.model);
  EXPECT_THAT(load_with(adamw()), HasSubstr("without optimizer state"));
}

// ---- Ranks.

TEST_F(CheckpointTest, RanksThatDifferThrowTheSameError) {
  run_ranks(2, [&](const Group& group) {
    const bool is_first = group->getRank() == 0;
    ShardedTraining training(group, 2, adamw());
    training.train(0, 2);
    const auto error_of_saving = [&](const optim::Optimizer& optimizer,
                                     const CheckpointMetadata& metadata = {}) {
      return error_of([&] {
        save_checkpoint(folder(), training.model, optimizer, metadata);
      });
    };
    EXPECT_THAT(
        error_of_saving(*training.optimizer, {{"rank", is_first ? "0" : "1"}}),
        HasSubstr("metadata text rank differs between ranks:\n  rank 0: 0\n"
                  "  rank 1: 1"));
    optim::Adam adam(training.held(), 0.01);
    EXPECT_THAT(
        error_of_saving(is_first ? adam : *training.optimizer),
        HasSubstr(
            "brigade.optimizer differs between ranks:\n  rank 0: Adam\n"));
    optim::AdamW other(training.held(), is_first ? 0.01 : 0.02);
    EXPECT_THAT(error_of_saving(other), HasSubstr("brigade.optimizer.options"));
    optim::LBFGS lbfgs(training.held());
    EXPECT_THAT(error_of_saving(lbfgs), HasSubstr("found another type"));
    optim::AdamW unrelated({torch::zeros(3)}, 0.01);
    EXPECT_THAT(error_of_saving(unrelated),
                HasSubstr("parameter 0 of the optimizer is not in this"));
    EXPECT_FALSE(fs::exists(folder()));

    const auto error_of_model = [&](std::vector<CheckpointTensor> tensors) {
      return error_of([&] {
        save_checkpoint(file(), CheckpointModel(std::move(tensors), group));
      });
    };
    const int rank = group->getRank();
    CheckpointTensor expert = unsharded_tensor("expert", torch::ones({5}));
    expert.ranks = {rank};
    EXPECT_THAT(error_of_model({expert}), HasSubstr("found 'expert' on two"));
    const CheckpointTensor own =
        unsharded_tensor(absl::StrCat("of ", rank), torch::ones({5}));
    EXPECT_THAT(error_of_model({own}), HasSubstr("'of 0' on rank 0 only"));
    EXPECT_THAT(
        error_of_model({unsharded_tensor("wide", torch::ones({3 + rank}))}),
        HasSubstr(
            "found F32 of [3] with strides [1] on rank 0 and F32 of [4]"));
    CheckpointTensor half = unsharded_tensor("half", torch::ones({5}));
    half.held = torch::ones({2});
    EXPECT_THAT(error_of_model({half}), HasSubstr("have 2 elements, expected"));
    EXPECT_FALSE(fs::exists(file()));
  });
}

// Experts: different ranks hold different parameters. One rank loads them all.
TEST_F(CheckpointTest, TensorsOnSomeRanksAreSavedInBothLayouts) {
  run_ranks(4, [&](const Group& group) {
    const int rank = group->getRank();
    const int expert = rank % 2;
    CheckpointTensor shard = unsharded_tensor(absl::StrCat("expert.", expert),
                                              torch::arange(4.0) + 10 * expert);
    shard.begin = rank / 2 * 2;
    shard.held = shard.held.narrow(0, shard.begin, 2).clone();
    shard.ranks = {expert, expert + 2};
    const CheckpointModel model(
        {shard, unsharded_tensor("shared", torch::ones({3}))}, group);
    save_checkpoint(file(), model);
    save_checkpoint(folder(), model);
  });
  for (const std::string& from : {file(), folder()}) {
    const CheckpointModel model(
        {unsharded_tensor("expert.0", torch::zeros({4})),
         unsharded_tensor("expert.1", torch::zeros({4}))},
        single_process_group());
    load_checkpoint(from, model);
    for (int expert = 0; expert < 2; ++expert) {
      EXPECT_TRUE(at::equal(model.tensors[expert].held,
                            torch::arange(4.0) + 10 * expert));
    }
  }
}

// ---- Memory.

// Peak memory of the tensors that the calling thread allocates, in bytes.
class PeakMemory final : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* /*memory*/, int64_t num_bytes,
                         size_t /*allocated*/, size_t /*reserved*/,
                         c10::Device /*device*/) override {
    bytes_ += num_bytes;
    peak_bytes_ = std::max(peak_bytes_, bytes_);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t peak_bytes() const { return peak_bytes_; }

 private:
  int64_t bytes_ = 0;
  int64_t peak_bytes_ = 0;
};

// Saving a file needs one unsharded tensor and the shards sent at a time. All
// 20 would be 60 tensors; the bound leaves room for tensors that Gloo's threads
// free late. Loading needs one shard.
TEST_F(CheckpointTest, SavingAndLoadingUseMemoryOfFewTensors) {
  constexpr int kNumRanks = 2;
  constexpr int64_t kNumel = 1 << 14;
  constexpr int64_t kTensorBytes = 4 * kNumel;
  run_ranks(kNumRanks, [&](const Group& group) {
    std::vector<CheckpointTensor> tensors;
    for (int i = 0; i < 20; ++i) {
      CheckpointTensor tensor = unsharded_tensor(
          absl::StrCat("weight.", i), torch::empty({kNumel / 64, 64}));
      tensor.begin = group->getRank() * kNumel / kNumRanks;
      tensor.held = torch::ones({kNumel / kNumRanks});
      tensors.push_back(std::move(tensor));
    }
    const CheckpointModel model(tensors, group);
    const auto peak_of = [](const std::function<void()>& step) {
      const auto memory = std::make_shared<PeakMemory>();
      const c10::DebugInfoGuard counting(c10::DebugInfoKind::PROFILER_STATE,
                                         memory);
      step();
      return memory->peak_bytes();
    };
    const auto save = [&](const std::string& to) {
      return peak_of([&] { save_checkpoint(to, model); });
    };
    const int64_t saving = save(file());
    EXPECT_GE(saving, kTensorBytes / 2);
    EXPECT_LE(saving, 20 * kTensorBytes);
    EXPECT_LE(save(folder()), kTensorBytes);
    for (const std::string& from : {file(), folder()}) {
      EXPECT_LE(peak_of([&] { load_checkpoint(from, model); }),
                2 * kTensorBytes);
    }
  });
}

// ---- Saves that fail.

TEST_F(CheckpointTest, AFailedSaveKeepsThePreviousCheckpoint) {
  save(2, 2, 2);
  const std::string before = bytes_of_file(file());
  const auto error_of_saving_to = [&](const std::string& first,
                                      const std::string& second) {
    std::vector<std::string> errors(2);
    run_ranks(2, [&](const Group& group) {
      ShardedTraining training(group, 2, adamw());
      training.train(0, 3);
      errors[group->getRank()] = error_of([&] {
        save_checkpoint(group->getRank() == 0 ? first : second, training.model,
                        *training.optimizer);
      });
      training.train(3, 4);
    });
    EXPECT_THAT(errors, Each(errors[0]));
    return errors[0];
  };
  // Rank 1 writes elsewhere, as if to its host's own disk.
  EXPECT_THAT(error_of_saving_to(folder(), path("elsewhere")),
              HasSubstr("rank 0 does not see the file that rank 1 wrote"));
  EXPECT_EQ(resumed(folder(), 2, 2, 0), before);
  EXPECT_THAT(
      error_of_saving_to(folder(), files_of_folder()[0].string() + "/in"),
      AllOf(HasSubstr("rank 1"), HasSubstr("cannot create directories")));
  EXPECT_EQ(resumed(folder(), 2, 2, 0), before);
  const std::string none = path("no/such/folder/a.safetensors");
  EXPECT_THAT(error_of_saving_to(none, none), HasSubstr("rank 0: "));
  const std::string index = path("taken/index.safetensors");
  fs::create_directories(index);
  EXPECT_THAT(error_of_saving_to(path("taken"), path("taken")),
              HasSubstr("expected the path of a safetensors file"));
  save(2, 2, 3);
  EXPECT_EQ(files_of_folder().size(), 3u) << "leftovers are removed";
  EXPECT_EQ(resumed(folder(), 2, 2, 0), bytes_of_file(file()));
}

}  // namespace
}  // namespace brigade
