// The thread pool: every tile runs once, phases in order, by threads that sleep and wake.
#include "../core/pool.h"

#include <atomic>
#include <chrono>
#include <thread>

#include "support.h"

namespace steppe::testing {

namespace {

// Plain writes by whoever runs a tile: if the pool does not order them, ThreadSanitizer tells.
struct Count final : Pool::Job {
  std::vector<std::vector<int>> seen;
  std::atomic<int> phase{0};
  const int threads;

  Count(int threads_, const std::vector<int>& tiles) : threads(threads_) {
    for (int n : tiles) seen.emplace_back(size_t(n), 0);
  }
  void run(int p, int tile, int thread) override {
    CHECK(thread >= 0 && thread < threads);
    // No tile may start before all of the phase before are done.
    int last = phase.load();
    while (last < p && !phase.compare_exchange_weak(last, p)) {
    }
    CHECK(phase.load() == p);
    if (p > 0)
      for (int n : seen[size_t(p - 1)]) CHECK(n == 1);
    seen[size_t(p)][size_t(tile)]++;
  }
};

void submit(Pool& pool, int phases, int most) {
  std::vector<int> tiles;
  for (int p = 0; p < phases; p++) tiles.push_back(between(0, most));
  Count job(pool.threads(), tiles);
  pool.run(job, tiles);
  for (const auto& phase : job.seen)
    for (int n : phase) CHECK(n == 1);
}

}  // namespace

void test_pool() {
  CHECK(default_threads() >= 1);
  CHECK(Pool(0).threads() == 1);
  for (int threads : {1, 2, 3, 5, 7}) {
    { Pool unused(threads); }
    Pool pool(threads);
    CHECK(pool.threads() == threads);
    for (int repeat = 0; repeat < 60; repeat++) {
      submit(pool, between(0, 60), 30);
      // Long enough for the workers to fall asleep, now and then; otherwise they still spin.
      if (repeat % 8 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    for (int repeat = 0; repeat < 500; repeat++) submit(pool, 1, 3);
    // Another thread may be the caller later.
    std::thread([&] { submit(pool, 20, 20); }).join();
    submit(pool, 20, 20);
  }
}

}  // namespace steppe::testing
