// One line that shows how far a long run is, for examples and benchmarks.
//
//   ProgressBar bar(stdout, num_steps);
//   bar.show(step, fmt::format("loss {:.3f}", loss));
//
// On a terminal the line is drawn over and over, at most ten times a second.
// Elsewhere (a file, a pipe) nothing is drawn and print() alone writes, so that
// logs stay readable.

#ifndef BRIGADE_EXAMPLES_SUPPORT_PROGRESS_BAR_H_
#define BRIGADE_EXAMPLES_SUPPORT_PROGRESS_BAR_H_

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

namespace brigade {

class ProgressBar {
 public:
  // `out` is not closed.
  ProgressBar(std::FILE* out, int64_t total);

  // Leaves what was shown last where it is, and ends the line.
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  bool on_terminal() const { return on_terminal_; }

  void show(int64_t done, std::string_view text);

  // Writes a line that stays, above the bar.
  void print(std::string_view line);

  // Takes the bar away, as if there had been none.
  void clear();

 private:
  void draw();

  std::FILE* const out_;
  const int64_t total_;
  const bool on_terminal_;

  int64_t done_ = 0;
  std::string text_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point next_draw_{};
};

}  // namespace brigade

#endif  // BRIGADE_EXAMPLES_SUPPORT_PROGRESS_BAR_H_
