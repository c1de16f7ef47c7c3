// From float weights to ggml blocks of 32: what `--quantize` does while a matrix is packed.
#pragma once

#include "layout.h"

namespace steppe {

// One row of k values (whole groups of 32) as blocks of `target`, Q8_0 or Q4_1, into `out`. The
// arithmetic is that of `steppe.formats.quantize`, to the bit. A group that holds no finite scale
// gets one that is not finite, which packing refuses.
void quantize_row(Format target, const float* x, int k, uint8_t* out);

uint16_t float_to_half(float x);

}  // namespace steppe
