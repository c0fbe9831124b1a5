#include "brigade/comm/group/launch_environment.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace launch_environment_test {

using ::testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

constexpr const char* kNames[] = {"RANK",
                                  "WORLD_SIZE",
                                  "LOCAL_RANK",
                                  "MASTER_ADDR",
                                  "MASTER_PORT",
                                  "TORCHELASTIC_USE_AGENT_STORE",
                                  "TORCHELASTIC_RESTART_COUNT",
                                  "SLURM_PROCID",
                                  "SLURM_NTASKS",
                                  "SLURM_LOCALID",
                                  "OMPI_COMM_WORLD_RANK",
                                  "OMPI_COMM_WORLD_SIZE",
                                  "OMPI_COMM_WORLD_LOCAL_RANK"};

class LaunchEnvironmentTest : public ::testing::Test {
 protected:
  static void clear() {
    for (const char* name : kNames) unsetenv(name);
  }
  void TearDown() override { clear(); }

  static LaunchEnvironment read(const Variables& variables);
};

LaunchEnvironment LaunchEnvironmentTest::read(const Variables& variables) {
  clear();
  for (const auto& [name, value] : variables) {
    setenv(name.c_str(), value.c_str(), /*overwrite=*/1);
  }
  return read_launch_environment();
}

const Variables kTorchrun = {{"RANK", "3"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"MASTER_ADDR", "10.0.0.1"},
                             {"MASTER_PORT", "29501"}};
const Variables kSlurm = {{"SLURM_PROCID", "5"},
                          {"SLURM_NTASKS", "12"},
                          {"SLURM_LOCALID", "2"},
                          {"MASTER_ADDR", "login"},
                          {"MASTER_PORT", "4000"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "1"},
                            {"OMPI_COMM_WORLD_SIZE", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                            {"MASTER_ADDR", "head"},
                            {"MASTER_PORT", "1"}};

// Returns `base` with some variables changed; an empty one counts as unset.
Variables with(Variables base, const Variables& changes) {
  for (const auto& [name, value] : changes) base[name] = value;
  return base;
}

TEST_F(LaunchEnvironmentTest, ReadsTorchrunsVariables) {
  LaunchEnvironment env = read(kTorchrun);
  EXPECT_EQ(env.rank, 3);
  EXPECT_EQ(env.world_size, 8);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.master_addr, "10.0.0.1");
  EXPECT_EQ(env.master_port, 29501);
  EXPECT_FALSE(env.agent_hosts_store);
  EXPECT_EQ(env.restart_count, 0);
  env = read(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"},
                              {"TORCHELASTIC_RESTART_COUNT", "2"}}));
  EXPECT_TRUE(env.agent_hosts_store);
  EXPECT_EQ(env.restart_count, 2);
}

TEST_F(LaunchEnvironmentTest, ReadsOpenMpisAndSlurmsVariables) {
  LaunchEnvironment env = read(kOpenMpi);
  EXPECT_EQ(env.rank, 1);
  EXPECT_EQ(env.world_size, 2);
  EXPECT_EQ(env.local_rank, 0);
  EXPECT_EQ(env.master_addr, "head");
  env = read(kSlurm);
  EXPECT_EQ(env.rank, 5);
  EXPECT_EQ(env.world_size, 12);
  EXPECT_EQ(env.local_rank, 2);
  EXPECT_EQ(env.master_port, 4000);
}

TEST_F(LaunchEnvironmentTest, TorchrunThenMpirunTakePrecedenceOverSlurm) {
  EXPECT_EQ(read(with(kSlurm, kOpenMpi)).world_size, 2);
  EXPECT_EQ(read(with(with(kSlurm, kOpenMpi), kTorchrun)).world_size, 8);
}

TEST_F(LaunchEnvironmentTest, AWorldOfOneNeedsNoAddress) {
  const LaunchEnvironment env =
      read({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}});
  EXPECT_EQ(env.world_size, 1);
  EXPECT_EQ(env.master_addr, "");
  EXPECT_EQ(env.master_port, 0);
}

TEST_F(LaunchEnvironmentTest, NamesTheMissingOrInvalidVariable) {
  struct Case {
    Variables variables;
    std::vector<const char*> says;
  };
  const Case cases[] = {
      {{{"MASTER_ADDR", "x"}},
       {"found none of RANK (torchrun)", "SLURM_PROCID (Slurm)",
        "single_process_group()", "torchrun --nproc-per-node"}},
      {with(kTorchrun, {{"WORLD_SIZE", ""}}),
       {"environment variable WORLD_SIZE is missing; torchrun is the assumed "
        "launcher because RANK is set.\nStart every rank through torchrun, "
        "or set WORLD_SIZE to an integer >= 1."}},
      {with(kTorchrun, {{"RANK", ""}}),
       {"environment variable RANK is missing", "because WORLD_SIZE is set"}},
      {with(kTorchrun, {{"LOCAL_RANK", ""}}), {"LOCAL_RANK is missing"}},
      {with(kTorchrun, {{"MASTER_ADDR", ""}}),
       {"MASTER_ADDR is missing", "host name of rank 0"}},
      {with(kTorchrun, {{"MASTER_PORT", ""}}), {"MASTER_PORT is missing"}},
      {with(kTorchrun, {{"RANK", "8"}}), {"RANK=8 and WORLD_SIZE=8"}},
      {with(kTorchrun, {{"RANK", "-1"}}),
       {"RANK: expected an integer >= 0, found '-1'"}},
      {with(kTorchrun, {{"RANK", "two"}}),
       {"RANK: expected an integer", "'two'", "torchrun is the assumed"}},
      {with(kTorchrun, {{"RANK", "99999999999999999999"}}),
       {"'99999999999999999999'"}},
      {with(kTorchrun, {{"WORLD_SIZE", "0"}}),
       {"WORLD_SIZE: expected an integer >= 1, found '0'"}},
      {with(kTorchrun, {{"MASTER_PORT", "65536"}}),
       {"MASTER_PORT: expected an integer from 1 to 65535, found '65536'"}},
      {with(kTorchrun, {{"TORCHELASTIC_RESTART_COUNT", "x"}}),
       {"TORCHELASTIC_RESTART_COUNT", "'x'"}},
      {with(kSlurm, {{"SLURM_NTASKS", ""}}),
       {"SLURM_NTASKS is missing", "Slurm is the assumed"}},
      {with(kSlurm, {{"MASTER_PORT", ""}}),
       {"MASTER_PORT is missing", "a free port of rank 0's host"}},
      {with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "2"}}),
       {"OMPI_COMM_WORLD_RANK=2 and OMPI_COMM_WORLD_SIZE=2"}}};
  for (const Case& bad : cases) {
    std::string error = "no error";
    try {
      read(bad.variables);
    } catch (const c10::ValueError& e) {
      error = e.what_without_backtrace();
    }
    for (const char* words : bad.says) EXPECT_THAT(error, HasSubstr(words));
  }
}

}  // namespace launch_environment_test
}  // namespace brigade
