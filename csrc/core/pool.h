// A persistent pool of threads that runs a list of phases, one after another, each cut into tiles.
//
// A thread first takes tiles from the front of its own contiguous range, then from the back of the
// others': weights stream in order, and a core that is lost to somebody else costs only the tile it
// holds. What a tile computes does not depend on who computes it.
//
// There is no barrier of threads: a phase is over when all of its tiles are done, so a thread that
// still sleeps delays nobody. Workers spin briefly between phases and then sleep; an idle pool costs
// nothing.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace steppe {

class Pool {
 public:
  // What runs: `run(phase, tile, thread)` for each tile of each phase. Must not throw.
  struct Job {
    virtual void run(int phase, int tile, int thread) = 0;

   protected:
    ~Job() = default;
  };

  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }
  // Runs all phases, tiles[p] < 2^20 tiles of phase p; the caller is thread 0. One caller at a time.
  void run(Job& job, const std::vector<int>& tiles);

 private:
  struct alignas(64) Range {
    std::atomic<uint64_t> value{0};  // epoch 24 | front 20 | back 20
  };
  struct alignas(64) Count {
    std::atomic<int> done{0};
  };

  int claim(int phase, uint64_t epoch, int thread);
  bool work(int phase, uint64_t epoch, int thread);
  void advance(uint64_t epoch, int phase, int thread);
  uint64_t wait_past(uint64_t seen, bool forever);
  void loop(int thread);

  const int threads_;
  std::vector<std::thread> workers_;
  std::unique_ptr<Range[]> ranges_;  // [phase][thread]
  std::unique_ptr<Count[]> counts_;  // [phase]
  // Arrays that outgrew their size stay alive: a late worker may still look at them.
  std::vector<std::unique_ptr<Range[]>> old_ranges_;
  std::vector<std::unique_ptr<Count[]>> old_counts_;
  std::atomic<Range*> range_table_{nullptr};
  size_t capacity_ = 0;
  std::vector<int> totals_;
  std::atomic<int> phases_{0};
  Job* job_ = nullptr;
  // epoch << 32 | phase; phase == phases_ once all is done. The one word everybody waits on.
  alignas(64) std::atomic<uint64_t> current_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

int default_threads();  // what affinity and the cgroup allow

}  // namespace steppe
