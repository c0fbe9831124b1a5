#include "brigade/examples/support/progress_bar.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>

namespace brigade {
namespace {

constexpr int64_t kBarWidth = 30;
constexpr std::chrono::milliseconds kBetweenDraws{100};
constexpr std::string_view kEraseLine = "\r\033[K";

size_t terminal_width(std::FILE* out) {
  winsize size = {};
  if (ioctl(fileno(out), TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

}  // namespace

ProgressBar::ProgressBar(std::FILE* out, int64_t total)
    : out_(out),
      total_(std::max<int64_t>(total, 1)),
      on_terminal_(isatty(fileno(out)) != 0) {}

ProgressBar::~ProgressBar() {
  if (!drawn_) return;
  draw();
  fmt::print(out_, "\n");
  std::fflush(out_);
}

void ProgressBar::show(int64_t done, std::string_view text) {
  done_ = std::clamp<int64_t>(done, 0, total_);
  text_ = text;
  const auto now = std::chrono::steady_clock::now();
  if (!on_terminal_ || now < next_draw_) return;
  next_draw_ = now + kBetweenDraws;
  draw();
}

void ProgressBar::print(std::string_view line) {
  clear();
  fmt::print(out_, "{}\n", line);
  std::fflush(out_);
}

void ProgressBar::clear() {
  if (!drawn_) return;
  fmt::print(out_, "{}", kEraseLine);
  std::fflush(out_);
  drawn_ = false;
}

void ProgressBar::draw() {
  const int64_t filled = kBarWidth * done_ / total_;
  std::string line =
      fmt::format("[{:#<{}}{: <{}}] {:3d} %  {}", "", filled, "",
                  kBarWidth - filled, 100 * done_ / total_, text_);
  line.resize(std::min(line.size(), terminal_width(out_) - 1));
  fmt::print(out_, "{}{}", kEraseLine, line);
  std::fflush(out_);
  drawn_ = true;
}

}  // namespace brigade
