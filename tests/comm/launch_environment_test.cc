#include "brigade/comm/group/launch_environment.h"

#include <cstdlib>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Variables = std::map<std::string, std::string>;

EnvironmentLookup lookup(Variables variables) {
  return [variables = std::move(variables)](
             const std::string& name) -> std::optional<std::string> {
    auto it = variables.find(name);
    if (it == variables.end()) return std::nullopt;
    return it->second;
  };
}

LaunchEnvironment read(const Variables& variables) {
  auto env = read_launch_environment(lookup(variables));
  EXPECT_TRUE(env.ok()) << env.status();
  return env.ok() ? *env : LaunchEnvironment{.launcher = "none"};
}

const Variables kTorchrun = {{"RANK", "3"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"MASTER_ADDR", "10.0.0.1"},
                             {"MASTER_PORT", "29501"}};
const Variables kSlurm = {{"SLURM_PROCID", "5"},
                          {"SLURM_NTASKS", "12"},
                          {"SLURM_LOCALID", "2"},
                          {"SLURM_JOB_NODELIST", "node[003-010,12]"},
                          {"SLURM_JOB_ID", "1234567"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "1"},
                            {"OMPI_COMM_WORLD_SIZE", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                            {"MASTER_ADDR", "head"},
                            {"MASTER_PORT", "1"}};

// `base` with some variables set, or removed where the value is "-".
Variables with(Variables base, const Variables& changes) {
  for (const auto& [name, value] : changes) {
    if (value == "-") {
      base.erase(name);
    } else {
      base[name] = value;
    }
  }
  return base;
}

TEST(LaunchEnvironmentTest, ReadsTorchrunsVariables) {
  const LaunchEnvironment env = read(kTorchrun);
  EXPECT_EQ(env.rank, 3);
  EXPECT_EQ(env.world_size, 8);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.master_addr, "10.0.0.1");
  EXPECT_EQ(env.master_port, 29501);
  EXPECT_FALSE(env.agent_hosts_store);
  EXPECT_EQ(env.restart_count, 0);
  EXPECT_EQ(env.launcher, "torchrun");
}

TEST(LaunchEnvironmentTest, BelievesTheAgentOnlyWhenItSaysTrue) {
  const char* name = "TORCHELASTIC_USE_AGENT_STORE";
  EXPECT_TRUE(read(with(kTorchrun, {{name, "True"}})).agent_hosts_store);
  EXPECT_FALSE(read(with(kTorchrun, {{name, "False"}})).agent_hosts_store);
}

TEST(LaunchEnvironmentTest, ReadsHowOftenTorchrunHasRestarted) {
  EXPECT_EQ(read(with(kTorchrun, {{"TORCHELASTIC_RESTART_COUNT", "2"}}))
                .restart_count,
            2);
}

TEST(LaunchEnvironmentTest, ReadsSlurmsVariables) {
  const LaunchEnvironment env = read(kSlurm);
  EXPECT_EQ(env.rank, 5);
  EXPECT_EQ(env.world_size, 12);
  EXPECT_EQ(env.local_rank, 2);
  EXPECT_EQ(env.master_addr, "node003");
  EXPECT_EQ(env.master_port, 10000 + 1234567 % 20000);
  EXPECT_EQ(env.launcher, "Slurm");
}

TEST(LaunchEnvironmentTest, SlurmMeetsOnTheFirstHostOfTheStep) {
  EXPECT_EQ(
      read(with(kSlurm, {{"SLURM_STEP_NODELIST", "node[7-8]"}})).master_addr,
      "node7");
}

TEST(LaunchEnvironmentTest, SlurmMeetsWhereMasterVariablesSay) {
  const LaunchEnvironment env =
      read(with(kSlurm, {{"MASTER_ADDR", "login"}, {"MASTER_PORT", "4000"}}));
  EXPECT_EQ(env.master_addr, "login");
  EXPECT_EQ(env.master_port, 4000);
}

TEST(LaunchEnvironmentTest, ReadsOpenMpisVariables) {
  const LaunchEnvironment env = read(kOpenMpi);
  EXPECT_EQ(env.rank, 1);
  EXPECT_EQ(env.world_size, 2);
  EXPECT_EQ(env.local_rank, 0);
  EXPECT_EQ(env.master_addr, "head");
  EXPECT_EQ(env.launcher, "Open MPI");
}

TEST(LaunchEnvironmentTest, TorchrunInsideOthersIsBelieved) {
  Variables all = kTorchrun;
  all.insert(kSlurm.begin(), kSlurm.end());
  all.insert(kOpenMpi.begin(), kOpenMpi.end());
  EXPECT_EQ(read(all).launcher, "torchrun");
}

TEST(LaunchEnvironmentTest, MpirunInsideASlurmJobIsBelieved) {
  Variables both = kSlurm;
  both.insert(kOpenMpi.begin(), kOpenMpi.end());
  EXPECT_EQ(read(both).launcher, "Open MPI");
}

TEST(LaunchEnvironmentTest, AWorldOfOneNeedsNoMeetingPlace) {
  for (const char* prefix : {"", "OMPI_COMM_WORLD_"}) {
    const std::string p = prefix;
    const LaunchEnvironment env =
        read({{p + "RANK", "0"},
              {p + (p.empty() ? "WORLD_SIZE" : "SIZE"), "1"},
              {p + "LOCAL_RANK", "0"}});
    EXPECT_EQ(env.world_size, 1);
    EXPECT_EQ(env.master_addr, "");
    EXPECT_EQ(env.master_port, 0);
  }
}

struct BadEnvironment {
  const char* name;
  Variables variables;
  absl::StatusCode code;
  std::vector<const char*> says;
};

class BadEnvironmentTest : public ::testing::TestWithParam<BadEnvironment> {};

TEST_P(BadEnvironmentTest, IsNamed) {
  const auto env = read_launch_environment(lookup(GetParam().variables));
  ASSERT_FALSE(env.ok());
  EXPECT_EQ(env.status().code(), GetParam().code);
  for (const char* words : GetParam().says) {
    EXPECT_THAT(std::string(env.status().message()), HasSubstr(words));
  }
}

constexpr auto kNotFound = absl::StatusCode::kNotFound;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

INSTANTIATE_TEST_SUITE_P(
    All, BadEnvironmentTest,
    ::testing::Values(
        BadEnvironment{"Empty",
                       {},
                       kNotFound,
                       {"found none of RANK (torchrun)", "SLURM_PROCID (Slurm)",
                        "single_process_group()", "torchrun --nproc-per-node"}},
        BadEnvironment{"OnlyMasterAddr",
                       {{"MASTER_ADDR", "x"}},
                       kNotFound,
                       {"found none of RANK"}},
        BadEnvironment{"RankWithoutWorldSize",
                       with(kTorchrun, {{"WORLD_SIZE", "-"}}),
                       kNotFound,
                       {"environment variable WORLD_SIZE is missing",
                        "torchrun was assumed", "because RANK is set"}},
        BadEnvironment{"WorldSizeWithoutRank",
                       with(kTorchrun, {{"RANK", "-"}}),
                       kNotFound,
                       {"environment variable RANK is missing",
                        "because WORLD_SIZE is set"}},
        BadEnvironment{"EmptyRank",
                       with(kTorchrun, {{"RANK", ""}}),
                       kNotFound,
                       {"environment variable RANK is missing"}},
        BadEnvironment{"NoLocalRank",
                       with(kTorchrun, {{"LOCAL_RANK", "-"}}),
                       kNotFound,
                       {"LOCAL_RANK is missing"}},
        BadEnvironment{"NoMasterAddr",
                       with(kTorchrun, {{"MASTER_ADDR", "-"}}),
                       kNotFound,
                       {"MASTER_ADDR is missing", "host name of rank 0"}},
        BadEnvironment{"NoMasterPort",
                       with(kTorchrun, {{"MASTER_PORT", "-"}}),
                       kNotFound,
                       {"MASTER_PORT is missing"}},
        BadEnvironment{"RankTooHigh",
                       with(kTorchrun, {{"RANK", "8"}}),
                       kInvalid,
                       {"RANK=8 and WORLD_SIZE=8"}},
        BadEnvironment{"LocalRankTooHigh",
                       with(kTorchrun, {{"LOCAL_RANK", "9"}}),
                       kInvalid,
                       {"LOCAL_RANK=9 and WORLD_SIZE=8"}},
        BadEnvironment{"RankNegative",
                       with(kTorchrun, {{"RANK", "-1"}}),
                       kInvalid,
                       {"RANK must be a whole number from 0 on, got '-1'"}},
        BadEnvironment{
            "RankNoNumber",
            with(kTorchrun, {{"RANK", "two"}}),
            kInvalid,
            {"RANK must be a whole number", "'two'", "torchrun was assumed"}},
        BadEnvironment{
            "RankTooLong",
            with(kTorchrun, {{"RANK", "99999999999999999999"}}),
            kInvalid,
            {"RANK must be a whole number", "'99999999999999999999'"}},
        BadEnvironment{
            "WorldSizeZero",
            with(kTorchrun, {{"WORLD_SIZE", "0"}}),
            kInvalid,
            {"WORLD_SIZE must be a whole number from 1 on, got '0'"}},
        BadEnvironment{"PortTooHigh",
                       with(kTorchrun, {{"MASTER_PORT", "65536"}}),
                       kInvalid,
                       {"MASTER_PORT must be a whole number from 1 to 65535, "
                        "got '65536'"}},
        BadEnvironment{"PortZero",
                       with(kTorchrun, {{"MASTER_PORT", "0"}}),
                       kInvalid,
                       {"MASTER_PORT", "'0'"}},
        BadEnvironment{"BadRestartCount",
                       with(kTorchrun, {{"TORCHELASTIC_RESTART_COUNT", "x"}}),
                       kInvalid,
                       {"TORCHELASTIC_RESTART_COUNT", "'x'"}},
        BadEnvironment{"SlurmNoTasks",
                       with(kSlurm, {{"SLURM_NTASKS", "-"}}),
                       kNotFound,
                       {"SLURM_NTASKS is missing", "Slurm was assumed",
                        "because SLURM_PROCID is set"}},
        BadEnvironment{"SlurmNoNodes",
                       with(kSlurm, {{"SLURM_JOB_NODELIST", "-"}}),
                       kNotFound,
                       {"SLURM_JOB_NODELIST is missing", "srun"}},
        BadEnvironment{"SlurmBadNodes",
                       with(kSlurm, {{"SLURM_JOB_NODELIST", "n[1-"}}),
                       kInvalid,
                       {"environment variable SLURM_JOB_NODELIST", "'n[1-'",
                        "without ']'"}},
        BadEnvironment{"SlurmNoJob",
                       with(kSlurm, {{"SLURM_JOB_ID", "-"}}),
                       kNotFound,
                       {"MASTER_PORT is missing"}},
        BadEnvironment{"SlurmBadJob",
                       with(kSlurm, {{"SLURM_JOB_ID", "a1"}}),
                       kInvalid,
                       {"SLURM_JOB_ID", "'a1'"}},
        BadEnvironment{"MpiNoAddress",
                       with(kOpenMpi, {{"MASTER_ADDR", "-"}}),
                       kNotFound,
                       {"MASTER_ADDR is missing", "Open MPI was assumed"}},
        BadEnvironment{"MpiRankTooHigh",
                       with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "2"}}),
                       kInvalid,
                       {"OMPI_COMM_WORLD_RANK=2 and OMPI_COMM_WORLD_SIZE=2"}}),
    [](const auto& info) { return info.param.name; });

struct NodeList {
  const char* list;
  const char* first;  // empty: an error
};

class SlurmNodeListTest : public ::testing::TestWithParam<NodeList> {};

TEST_P(SlurmNodeListTest, GivesTheFirstHostOrAnError) {
  const auto host = first_slurm_host(GetParam().list);
  if (*GetParam().first == '\0') {
    ASSERT_FALSE(host.ok());
    EXPECT_THAT(std::string(host.status().message()),
                AllOf(HasSubstr("expected a list of hosts"),
                      HasSubstr(std::string("'") + GetParam().list + "'")));
  } else {
    ASSERT_TRUE(host.ok()) << host.status();
    EXPECT_EQ(*host, GetParam().first);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, SlurmNodeListTest,
    ::testing::Values(NodeList{"gpu7", "gpu7"}, NodeList{"a,b", "a"},
                      NodeList{"node[003-010,12],z1", "node003"},
                      NodeList{"node[5,7-9]", "node5"},
                      NodeList{"rack[2-3]n[04-05].site", "rack2n04.site"},
                      NodeList{"", ""}, NodeList{",a", ""},
                      NodeList{"n[1-2", ""}, NodeList{"n1]", ""},
                      NodeList{"n[]", ""}, NodeList{"n[-3]", ""},
                      NodeList{"n[x-3]", ""}));

TEST(LaunchEnvironmentTest, LooksIntoTheProcess) {
  setenv("BRIGADE_TEST_VARIABLE", "seen", 1);
  EXPECT_EQ(process_environment()("BRIGADE_TEST_VARIABLE"), "seen");
  unsetenv("BRIGADE_TEST_VARIABLE");
  EXPECT_EQ(process_environment()("BRIGADE_TEST_VARIABLE"), std::nullopt);
}

}  // namespace
}  // namespace brigade
