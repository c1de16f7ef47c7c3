#include "memory.h"

#include <sys/mman.h>

#include <new>
#include <utility>

namespace steppe {

namespace {
constexpr size_t kHuge = size_t(2) << 20;
constexpr size_t kArenaBlock = size_t(64) << 20;
}  // namespace

Block::Block(size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<uint8_t*>(p);
  // A file-backed map never gets huge pages: weights are repacked into memory that may.
  if (bytes >= kHuge) madvise(p, bytes, MADV_HUGEPAGE);
}

Block::~Block() {
  if (data_) munmap(data_, size_);
}

Block::Block(Block&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Block& Block::operator=(Block&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

uint8_t* Arena::take(size_t bytes) {
  bytes = (bytes + 63) / 64 * 64;
  if (bytes > left_) {
    // Pages are only touched when written, so a block's unused rest costs address space alone.
    const size_t size = bytes > kArenaBlock ? bytes : kArenaBlock;
    blocks_.emplace_back(size);
    left_ = size;
  }
  uint8_t* p = blocks_.back().data() + (blocks_.back().size() - left_);
  left_ -= bytes;
  used_ += bytes;
  return p;
}

}  // namespace steppe
