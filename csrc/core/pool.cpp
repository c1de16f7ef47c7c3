#include "pool.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace steppe {

namespace {

constexpr int kSpins = 2000;
constexpr uint64_t kField = (1u << 20) - 1;
constexpr uint64_t kEpochs = (1u << 24) - 1;

uint64_t pack_range(uint64_t epoch, uint64_t front, uint64_t back) {
  return (epoch & kEpochs) << 40 | front << 20 | back;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

double cgroup_limit() {
  double limit = 1e9;
  if (FILE* f = std::fopen("/sys/fs/cgroup/cpu.max", "r")) {
    char quota[64];
    double period;
    if (std::fscanf(f, "%63s %lf", quota, &period) == 2 && std::strcmp(quota, "max") != 0)
      limit = std::atof(quota) / period;
    std::fclose(f);
  }
  double quota = -1, period = -1;
  if (FILE* f = std::fopen("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "r")) {
    if (std::fscanf(f, "%lf", &quota) != 1) quota = -1;
    std::fclose(f);
  }
  if (FILE* f = std::fopen("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "r")) {
    if (std::fscanf(f, "%lf", &period) != 1) period = -1;
    std::fclose(f);
  }
  if (quota > 0 && period > 0) limit = std::min(limit, quota / period);
  return limit;
}

}  // namespace

int default_threads() {
  cpu_set_t set;
  CPU_ZERO(&set);
  int count = int(std::thread::hardware_concurrency());
  if (sched_getaffinity(0, sizeof set, &set) == 0) count = CPU_COUNT(&set);
  const double limit = cgroup_limit();
  if (limit < count) count = int(std::ceil(limit));
  return std::max(1, count);
}

Pool::Pool(int threads) : threads_(std::max(1, threads)) {
  for (int i = 1; i < threads_; i++) workers_.emplace_back([this, i] { loop(i); });
}

Pool::~Pool() {
  stop_.store(true);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  for (std::thread& t : workers_) t.join();
}

// A tile of the phase, or -1. A range of another epoch belongs to a step this thread has slept
// through: nothing in it is ours.
int Pool::claim(int phase, uint64_t epoch, int thread) {
  Range* ranges = range_table_.load(std::memory_order_acquire) + size_t(phase) * size_t(threads_);
  for (int i = 0; i < threads_; i++) {
    const int owner = (thread + i) % threads_;
    std::atomic<uint64_t>& range = ranges[owner].value;
    uint64_t seen = range.load(std::memory_order_acquire);
    for (;;) {
      const uint64_t front = seen >> 20 & kField, back = seen & kField;
      if (seen >> 40 != (epoch & kEpochs) || front >= back) break;
      const uint64_t next = i == 0 ? pack_range(epoch, front + 1, back)
                                   : pack_range(epoch, front, back - 1);
      if (range.compare_exchange_weak(seen, next, std::memory_order_acq_rel,
                                      std::memory_order_acquire))
        return int(i == 0 ? front : back - 1);
    }
  }
  return -1;
}

// Takes tiles until none is left. True if this thread finished the phase's last one.
bool Pool::work(int phase, uint64_t epoch, int thread) {
  int done = 0;
  for (int tile; (tile = claim(phase, epoch, thread)) >= 0; done++) job_->run(phase, tile, thread);
  if (done == 0) return false;
  // Until our tiles are counted the step cannot end, so its total is still there; afterwards another
  // thread may end it, and the next step may have begun to write its own.
  const int total = totals_[size_t(phase)];
  return counts_[size_t(phase)].done.fetch_add(done, std::memory_order_acq_rel) + done == total;
}

// Makes the next phase with any tiles the current one. A phase of a single tile is no work to share:
// the thread that is here runs it at once, and nobody else hears of it.
void Pool::advance(uint64_t epoch, int phase, int thread) {
  const int end = phases_.load(std::memory_order_relaxed);
  for (phase++; phase < end && totals_[size_t(phase)] <= 1; phase++)
    if (totals_[size_t(phase)] == 1) job_->run(phase, 0, thread);
  current_.store(epoch << 32 | uint64_t(phase), std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
}

uint64_t Pool::wait_past(uint64_t seen, bool forever) {
  for (int i = 0; i < kSpins; i++) {
    const uint64_t now = current_.load(std::memory_order_acquire);
    if (now != seen || (forever && stop_.load(std::memory_order_relaxed))) return now;
    relax();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  wake_.wait(lock, [&] {
    return current_.load(std::memory_order_seq_cst) != seen || (forever && stop_.load());
  });
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  return current_.load(std::memory_order_acquire);
}

void Pool::loop(int thread) {
  uint64_t seen = 0;
  for (;;) {
    const uint64_t now = wait_past(seen, true);
    if (stop_.load()) return;
    seen = now;
    const uint64_t epoch = now >> 32;
    const int phase = int(now & 0xffffffff);
    if (epoch == 0 || phase >= phases_.load(std::memory_order_acquire)) continue;
    if (work(phase, epoch, thread)) advance(epoch, phase, thread);
  }
}

void Pool::run(Job& job, const std::vector<int>& tiles) {
  const size_t n = tiles.size();
  if (n > capacity_) {
    const size_t larger = std::max(n, 2 * capacity_);
    std::unique_ptr<Range[]> ranges(new Range[larger * size_t(threads_)]);
    std::unique_ptr<Count[]> counts(new Count[larger]);
    range_table_.store(ranges.get(), std::memory_order_release);
    if (ranges_) old_ranges_.push_back(std::move(ranges_));
    if (counts_) old_counts_.push_back(std::move(counts_));
    ranges_ = std::move(ranges);
    counts_ = std::move(counts);
    capacity_ = larger;
  }
  const uint64_t last = current_.load(std::memory_order_relaxed);
  uint64_t epoch = (last >> 32) + 1;
  // 24 bits of it stand in the ranges, where 0 is what was never set.
  if ((epoch & kEpochs) == 0) epoch++;
  job_ = &job;
  totals_ = tiles;
  for (size_t p = 0; p < n; p++) counts_[p].done.store(0, std::memory_order_relaxed);
  phases_.store(int(n), std::memory_order_release);
  for (size_t p = 0; p < n; p++) {
    const int64_t total = tiles[p];
    for (int t = 0; t < threads_; t++)
      ranges_[p * size_t(threads_) + size_t(t)].value.store(
          pack_range(epoch, uint64_t(total * t / threads_), uint64_t(total * (t + 1) / threads_)),
          std::memory_order_release);
  }
  advance(epoch, -1, 0);
  for (;;) {
    const uint64_t now = current_.load(std::memory_order_acquire);
    const int phase = int(now & 0xffffffff);
    if (phase >= int(n)) break;
    if (work(phase, epoch, 0)) advance(epoch, phase, 0);
    else wait_past(now, false);
  }
}

}  // namespace steppe
