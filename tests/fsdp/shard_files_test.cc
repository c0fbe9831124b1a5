#include "brigade/fsdp/checkpoint/shard_files.h"

#include <torch/torch.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "brigade/fsdp/checkpoint/optimizer_state.h"
#include "brigade/fsdp/checkpoint/safetensors_file.h"
#include "brigade/tests/fsdp/checkpoint_checks.h"
#include "brigade/tests/fsdp/sharded_net.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace shard_files_test {

namespace fs = std::filesystem;

using ::testing::AllOf;
using testing::bytes_of_file;
using testing::error_of;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::Net;
using testing::run_ranks;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

void write_file(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

void train(ShardedRoot& root, const Net& net, torch::optim::AdamW& optimizer,
           int from, int to) {
  for (int step = from; step < to; ++step) {
    optimizer.zero_grad();
    // The same batch on all ranks, so that their number changes nothing.
    loss_of(root.forward([&] {
      return net.run(root, net.input(0, step));
    })).backward();
    optimizer.step();
  }
}

// A net and its optimizer on one rank.
struct Training {
  explicit Training(const Group& group, ShardingOptions options = {},
                    uint64_t seed = 1)
      : net({5, 7, 3, 6, 4}, seed),
        root(net.units(), group, options),
        optimizer(root.shards(), 0.01) {}

  void train(int from, int to) {
    shard_files_test::train(root, net, optimizer, from, to);
  }

  Net net;
  ShardedRoot root;
  torch::optim::AdamW optimizer;
};

class ShardFilesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    base_ = fs::path(::testing::TempDir()) /
            ("brigade_shards_" + std::to_string(getpid()));
    fs::create_directories(base_);
  }
  void TearDown() override { fs::remove_all(base_); }

  std::string folder() const { return base_ / "some" / "checkpoint"; }
  std::string path(const std::string& name) const { return base_ / name; }

  std::vector<fs::path> files() const {
    std::vector<fs::path> found;
    for (const auto& entry : fs::directory_iterator(folder())) {
      found.push_back(entry.path());
    }
    std::ranges::sort(found);
    return found;
  }

  // Trains to `steps` on a mesh, and saves; whole, too, as "whole <steps>".
  void save(int num_ranks, int num_shards, int steps) {
    run_ranks(num_ranks, [&](const Group& group) {
      Training training(group, {.num_shards = num_shards});
      training.train(0, steps);
      save_shards(training.root, training.optimizer, folder(),
                  {{"step", std::to_string(steps)}});
      save_whole(training.root, training.optimizer, whole(steps),
                 {{"step", std::to_string(steps)}});
    });
  }
  std::string whole(int steps) const {
    return path("whole " + std::to_string(steps));
  }

  // Loads on a mesh: what is then saved whole is `expected`.
  void expect_loads(int num_ranks, int num_shards,
                    const std::string& expected) {
    const std::string again = path("again");
    run_ranks(num_ranks, [&](const Group& group) {
      Training training(group, {.num_shards = num_shards}, /*seed=*/99);
      const SafetensorsMetadata metadata =
          load_shards(training.root, training.optimizer, folder());
      save_whole(training.root, training.optimizer, again, metadata);
    });
    EXPECT_EQ(bytes_of_file(again), bytes_of_file(expected))
        << num_ranks << " ranks, " << num_shards << " shards";
  }

  // The error of loading on `num_ranks`, the same on all; nothing changes.
  std::string error_of_loading(int num_ranks) {
    std::vector<std::string> errors(num_ranks);
    run_ranks(num_ranks, [&](const Group& group) {
      Training training(group, {}, /*seed=*/99);
      training.train(0, 1);
      save_whole(training.root, training.optimizer, path("before"));
      errors[group->getRank()] = error_of(
          [&] { load_shards(training.root, training.optimizer, folder()); });
      save_whole(training.root, training.optimizer, path("after"));
    });
    EXPECT_THAT(errors, ::testing::Each(errors[0]));
    EXPECT_EQ(bytes_of_file(path("before")), bytes_of_file(path("after")));
    return errors[0];
  }

 private:
  fs::path base_;
};

TEST_F(ShardFilesTest, AreLoadedOnAnyMesh) {
  for (const auto& [num_ranks, num_shards] :
       {std::pair(2, 2), std::pair(3, 3), std::pair(4, 2), std::pair(2, 1)}) {
    save(num_ranks, num_shards, 2);
    EXPECT_EQ(files().size(), num_shards + 1u);
    expect_loads(1, 1, whole(2));
    expect_loads(2, 2, whole(2));
    expect_loads(3, 3, whole(2));
    expect_loads(4, 4, whole(2));
    expect_loads(4, 2, whole(2));
  }
}

TEST_F(ShardFilesTest, TrainingGoesOnAsIfItHadNotStopped) {
  save(2, 2, 6);
  save(2, 2, 3);
  run_ranks(2, [&](const Group& group) {
    Training training(group, {}, /*seed=*/99);
    const SafetensorsMetadata metadata =
        load_shards(training.root, training.optimizer, folder());
    EXPECT_EQ(metadata.at("step"), "3");
    EXPECT_FALSE(metadata.contains("brigade.shards"));
    training.train(3, 6);
    save_whole(training.root, training.optimizer, path("again"),
               {{"step", "6"}});
  });
  EXPECT_EQ(bytes_of_file(path("again")), bytes_of_file(whole(6)));
}

TEST_F(ShardFilesTest, OtherUnitsLoadThem) {
  save(3, 3, 2);
  run_ranks(2, [&](const Group& group) {
    Net net({5, 7, 3, 6, 4}, /*seed=*/99);
    UnitSpec all = {.name = "all", .parameters = {}};
    for (const UnitSpec& unit : net.units()) {
      all.parameters.insert(all.parameters.begin(), unit.parameters.begin(),
                            unit.parameters.end());
    }
    ShardedRoot root({all}, group, {});
    load_shards(root, folder());
    root.unshard();
    const auto reader = SafetensorsReader::open(whole(2));
    for (const NamedParameter& parameter : all.parameters) {
      at::Tensor expected = torch::empty_like(parameter.tensor);
      ASSERT_TRUE(reader
                      ->read(parameter.name, 0,
                             {static_cast<std::byte*>(expected.data_ptr()),
                              expected.nbytes()})
                      .ok());
      EXPECT_TRUE(at::equal(parameter.tensor, expected)) << parameter.name;
    }
    root.reshard(/*writes=*/false);
  });
}

TEST_F(ShardFilesTest, AnyDamageIsTheSameErrorOnAllRanks) {
  save(2, 2, 2);
  for (const fs::path& file : files()) {
    const std::string good = bytes_of_file(file);
    for (const size_t cut :
         {size_t{0}, size_t{7}, good.size() / 2, good.size() - 1}) {
      write_file(file, good.substr(0, cut));
      EXPECT_THAT(error_of_loading(2),
                  AllOf(HasSubstr(file.filename()), HasSubstr("damaged")));
    }
    for (const size_t place : {size_t{20}, good.size() / 2, good.size() - 1}) {
      std::string bad = good;
      bad[place] = static_cast<char>(bad[place] ^ 1);
      write_file(file, bad);
      EXPECT_THAT(error_of_loading(2), HasSubstr(file.filename()));
      // A rank that needs a part of it finds it out, too.
      EXPECT_THAT(error_of_loading(3), HasSubstr(file.filename()));
    }
    fs::remove(file);
    EXPECT_THAT(error_of_loading(2),
                AllOf(HasSubstr(file.filename()), HasSubstr("exists")));
    write_file(file, good);
  }
  expect_loads(2, 2, whole(2));
}

TEST_F(ShardFilesTest, AFileOfAnotherCheckpointIsRefused) {
  save(2, 2, 2);
  const fs::path old = files()[2];
  ASSERT_THAT(old.filename(), HasSubstr("shard-1-of-2."));
  const std::string old_bytes = bytes_of_file(old);
  save(2, 2, 3);
  ASSERT_EQ(files().size(), 3u);
  write_file(files()[2], old_bytes);
  EXPECT_THAT(error_of_loading(2), HasSubstr("expected a file of checkpoint"));
}

TEST_F(ShardFilesTest, ASaveThatFailsLeavesTheOneBefore) {
  save(2, 2, 2);
  const std::vector<fs::path> before = files();
  run_ranks(2, [&](const Group& group) {
    Training training(group);
    training.train(0, 3);
    // Rank 1 writes elsewhere, as to a disk of its own machine.
    const std::string own =
        group->getRank() == 0 ? folder() : path("elsewhere");
    EXPECT_THAT(
        error_of([&] { save_shards(training.root, training.optimizer, own); }),
        HasSubstr("rank 0 does not see what rank 1 has written"));
  });
  expect_loads(2, 2, whole(2));
  run_ranks(2, [&](const Group& group) {
    Training training(group);
    // A file where rank 1's folder is to be.
    const std::string own =
        group->getRank() == 0 ? folder() : files()[0].string() + "/checkpoint";
    EXPECT_THAT(
        error_of([&] { save_shards(training.root, training.optimizer, own); }),
        AllOf(HasSubstr("rank 1"), HasSubstr("cannot be made")));
  });
  expect_loads(2, 2, whole(2));
  save(2, 2, 3);
  EXPECT_EQ(files().size(), 3u) << "what was left is gone";
  EXPECT_NE(files(), before);
  expect_loads(2, 2, whole(3));
}

TEST_F(ShardFilesTest, AnIndexThatCannotBeWrittenIsAnErrorOnAllRanks) {
  fs::create_directories(fs::path(folder()) / "index.safetensors");
  run_ranks(2, [&](const Group& group) {
    Training training(group);
    EXPECT_THAT(error_of([&] {
                  save_shards(training.root, training.optimizer, folder());
                }),
                HasSubstr("needs the path of a file"));
    training.train(0, 1);
  });
}

TEST_F(ShardFilesTest, AnotherModelIsRefused) {
  save(2, 2, 2);
  run_ranks(2, [&](const Group& group) {
    Net other({5, 7, 3, 6, 5});
    ShardedRoot root(other.units(), group, {});
    EXPECT_THAT(error_of([&] { load_shards(root, folder()); }),
                HasSubstr("tensor 'blocks.3.weight' is F32 of ["));
    Net longer({5, 7, 3, 6, 4, 2});
    ShardedRoot longer_root(longer.units(), group, {});
    EXPECT_THAT(error_of([&] { load_shards(longer_root, folder()); }),
                HasSubstr("tensor 'blocks.4.weight' is missing"));
    Training training(group);
    torch::optim::Adam adam(training.root.shards(), 0.01);
    EXPECT_THAT(error_of([&] { load_shards(training.root, adam, folder()); }),
                HasSubstr("expected the state of Adam, found that of 'AdamW'"));
  });
}

// Parts are in the order of memory, so another order can't be read part by
// part.
TEST_F(ShardFilesTest, AnotherOrderInMemoryIsRefused) {
  run_ranks(2, [&](const Group& group) {
    at::Tensor weight = torch::empty({7, 5}).t();
    weight.copy_(torch::arange(35.0).view({5, 7}));
    ShardedRoot root(
        {{.name = "", .parameters = {{"w", weight.requires_grad_()}}}}, group,
        {});
    save_shards(root, folder());
    load_shards(root, folder());
    root.unshard();
    EXPECT_TRUE(at::equal(weight, torch::arange(35.0).view({5, 7})));
    root.reshard(/*writes=*/false);

    at::Tensor other = torch::zeros({5, 7}).requires_grad_();
    ShardedRoot other_root({{.name = "", .parameters = {{"w", other}}}}, group,
                           {});
    EXPECT_THAT(
        error_of([&] { load_shards(other_root, folder()); }),
        AllOf(HasSubstr("another order in memory"), HasSubstr("save_whole()")));
  });
}

}  // namespace shard_files_test
}  // namespace brigade
