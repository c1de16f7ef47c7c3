// Packed weights on their way to and from an engine directory.
#pragma once

#include <string>

#include "pack.h"
#include "pool.h"

namespace steppe {

// Names how packed weights lie in memory (layout.h). It changes whenever `pack_block` writes other
// bytes for the same matrix: an engine directory of another layout is then refused, not misread.
constexpr const char* kPackedLayout = "columns16-1";

// What is checked, copied and hashed as one tile.
constexpr size_t kPieceBytes = size_t(256) << 10;

// A packed matrix of that shape, without its data.
Weight weight_of(Format format, int n, int k);
inline size_t bytes_of(const Weight& w) { return size_t(w.blocks) * w.stride; }

// Packs a stored matrix [w.n, w.k] into `out`, with all threads. With a `target` the values, which are
// floats, are quantised to it on the way. False if a scale is not finite.
bool pack_matrix(Pool& pool, const SourceType& source, const SourceType* target,
                 const uint8_t* data, const int64_t* order, const Weight& w, uint8_t* out);

// What `quantize` of a float type to the type of that name gives, nullptr for "" (as stored). Throws
// std::invalid_argument where there is no such way.
const SourceType* quantize_target(const SourceType& source, const std::string& name, int k);

bool format_by_name(const std::string& name, Format* out);

// 64 bits over `bytes` bytes: every piece on its own, so that threads share the work, then the
// pieces' results in order. No damage within one 8-byte word goes unseen, other damage with a chance
// of 2^-64. Not a defence against who can write the digest too.
uint64_t checksum(const uint8_t* data, size_t bytes);
uint64_t piece_checksum(const uint8_t* data, size_t bytes);  // of at most kPieceBytes
uint64_t join_checksums(const uint64_t* pieces, size_t count, size_t bytes);

}  // namespace steppe
