// Where the time of steps goes, for whoever asks. Off, it costs one branch a tile.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace steppe {

class Timing {
 public:
  using Clock = std::chrono::steady_clock;

  bool on() const { return on_; }
  // Starts anew, or ends. Not during a step.
  void set(bool on, int threads) {
    on_ = on;
    steps_ = 0;
    wall_ = 0.0;
    busy_.assign(on ? size_t(threads) : 0, std::vector<double>(labels_.size() + 8));
  }
  // The number of a kind of work; equal names are one kind.
  int label(const std::string& name) {
    for (size_t i = 0; i < labels_.size(); i++)
      if (labels_[i] == name) return int(i);
    labels_.push_back(name);
    return int(labels_.size()) - 1;
  }
  // Called by the thread that worked; each has its own row.
  void add(int thread, int label, Clock::duration time) {
    busy_[size_t(thread)][size_t(label)] += std::chrono::duration<double>(time).count();
  }
  void add_step(Clock::duration time) {
    wall_ += std::chrono::duration<double>(time).count();
    steps_++;
  }
  int steps() const { return steps_; }
  double wall() const { return wall_; }
  // Seconds of work by kind, over all threads.
  std::vector<std::pair<std::string, double>> busy() const {
    std::vector<std::pair<std::string, double>> out;
    for (size_t i = 0; i < labels_.size(); i++) {
      double sum = 0.0;
      for (const std::vector<double>& row : busy_) sum += row[i];
      out.emplace_back(labels_[i], sum);
    }
    return out;
  }

 private:
  bool on_ = false;
  int steps_ = 0;
  double wall_ = 0.0;
  std::vector<std::string> labels_;
  std::vector<std::vector<double>> busy_;  // [thread][label], and a cache line more
};

}  // namespace steppe
