#include "brigade/simulation/simulation_json.h"

#include "gtest/gtest.h"
namespace brigade {
namespace {
TEST(A, B) {
  for (const char* kind :
       {"ddp", "zero1", "zero2", "zero3", "fsdp2", "yafsdp", "brigade"}) {
    auto r = simulate_json(
        std::string(
            R"({"model": "llama-7b", "cluster": {"hosts": 4}, "strategy": {"kind": ")") +
        kind + R"("}})");
    ASSERT_TRUE(r.ok()) << r.status();
    std::cout << kind << r->substr(0, 0)
              << r->substr(r->find("\"exposed_s\""), 200)
              << r->substr(r->find("\"memory\""), 200)
              << r->substr(r->find("\"optimizer_s\""), 300) << "\n";
  }
}
}  // namespace
}  // namespace brigade
