// What a figure depends on besides the code: the machine, the versions, the
// commit, the command.  Figures are printed below it.

#ifndef BRIGADE_BENCHMARKS_SUPPORT_SET_UP_H_
#define BRIGADE_BENCHMARKS_SUPPORT_SET_UP_H_

#include <string>
#include <utility>
#include <vector>

namespace brigade::benchmarks {

// Name and value, in the order in which they are printed.
using SetUp = std::vector<std::pair<std::string, std::string>>;

// CPU, cores, load, operating system, torch, compiler, commit and command. What
// can't be found out is "unknown".
SetUp describe_set_up(int argc, char** argv);

// A line for each.
void print_set_up(int argc, char** argv);

}  // namespace brigade::benchmarks

#endif  // BRIGADE_BENCHMARKS_SUPPORT_SET_UP_H_
