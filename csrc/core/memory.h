// Large blocks of memory: zeroed, 64-byte aligned, in huge pages where the system gives them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace steppe {

class Block {
 public:
  Block() = default;
  explicit Block(size_t bytes);
  ~Block();
  Block(Block&& other) noexcept;
  Block& operator=(Block&& other) noexcept;
  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// Hands out memory that lives as long as the arena: weights, one after another in tape order.
class Arena {
 public:
  uint8_t* take(size_t bytes);
  size_t used() const { return used_; }

 private:
  std::vector<Block> blocks_;
  size_t left_ = 0, used_ = 0;
};

}  // namespace steppe
