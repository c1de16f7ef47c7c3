// From ggml blocks to packed column blocks.
#pragma once

#include <string>

#include "layout.h"

namespace steppe {

struct SourceType {
  const char* name;   // ggml's (or, for floats, safetensors') name of the stored type
  Format format;
  int elements;       // values in a stored block
  int bytes;          // its bytes
};

const SourceType* source_type(const std::string& name);  // nullptr: not one we pack
const char* format_name(Format f);

// Packs column block `block` (output columns 16 block .. + 15) of a stored [n, k] matrix into `out`
// (stride bytes). `order` maps wanted rows to stored ones, or is null. False if a scale is not finite.
bool pack_block(const SourceType& type, const uint8_t* data, int n, int k, const int64_t* order,
                int block, uint8_t* out);

// Row `row` of a stored matrix of floats (F32, F16 or BF16) [k].
void read_floats(const SourceType& type, const uint8_t* data, int k, int64_t row, float* out);

// Row `row` of a packed matrix as floats [k].
void unpack_row(const Weight& w, int row, float* out);

float half_to_float(uint16_t h);
uint16_t float_to_bf16(float x);

}  // namespace steppe
