#include "quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "pack.h"

namespace steppe {

namespace {

constexpr int kLanes = 8;
constexpr uint16_t kHalfNan = 0x7e00;

// Nearest integer, ties to even, of |x| < 2^22; unlike rint it is vectorised everywhere.
inline float nearest(float x) {
  constexpr float kShift = 12582912.0f;
  return (x + kShift) - kShift;
}

float total(const float* lanes) {
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) +
         ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

void q8_0(const float* x, uint8_t* out) {
  float most = 0.0f;
  for (int i = 0; i < kGroup; i++) most = std::max(most, std::fabs(x[i]));
  const uint16_t half = float_to_half(most / 127.0f);
  const float d = half_to_float(half);
  std::memcpy(out, &half, 2);
  for (int i = 0; i < kGroup; i++) {
    const float q = d == 0.0f ? 0.0f : nearest(x[i] / d);
    out[2 + i] = uint8_t(int8_t(std::clamp(q, -127.0f, 127.0f)));
  }
}

struct Line {  // x is about d q + m, both as stored in half precision
  float d, m;
};

Line rounded(float d, float m) {
  return {half_to_float(float_to_half(d)), half_to_float(float_to_half(m))};
}

// Quants of 32 values on a line, and the sum of the squared errors.
float fit(const float* x, Line line, float* q) {
  const float inverse = line.d == 0.0f ? 0.0f : 1.0f / line.d;
  float errors[kLanes] = {};
  for (int i = 0; i < kGroup; i += kLanes)
    for (int l = 0; l < kLanes; l++) {
      const float level = nearest(std::clamp((x[i + l] - line.m) * inverse, 0.0f, 15.0f));
      const float error = x[i + l] - (line.d * level + line.m);
      q[i + l] = level;
      errors[l] += error * error;
    }
  return total(errors);
}

// The line of least squares through the values, given the quants of a first guess.
bool regression(const float* x, float low, float inverse, Line* line) {
  float s[kLanes] = {}, sq[kLanes] = {}, sqq[kLanes] = {}, sxq[kLanes] = {};
  for (int i = 0; i < kGroup; i += kLanes)
    for (int l = 0; l < kLanes; l++) {
      const float v = x[i + l];
      const float q = nearest(std::clamp((v - low) * inverse, 0.0f, 15.0f));
      s[l] += v;
      sq[l] += q;
      sqq[l] += q * q;
      sxq[l] += v * q;
    }
  const float sum = total(s), quants = total(sq), squares = total(sqq), mixed = total(sxq);
  const float spread = 32.0f * squares - quants * quants;
  if (!(spread > 0.0f)) return false;
  const float d = (32.0f * mixed - sum * quants) / spread;
  *line = rounded(d, (sum - d * quants) / 32.0f);
  return line->d > 0.0f;
}

void q4_1(const float* x, uint8_t* out) {
  float low = x[0], high = x[0];
  for (int i = 1; i < kGroup; i++) {
    low = std::min(low, x[i]);
    high = std::max(high, x[i]);
  }
  low += 0.0f;  // of two zeros, the positive one
  high += 0.0f;
  const float range = high - low;
  Line best = rounded(range / 15.0f, low);
  float quants[kGroup], tried[kGroup];
  float error = fit(x, best, quants);
  // Guesses whose step is a little wider or narrower than the range asks for.
  for (int c = 0; c <= 10 && range > 0.0f; c++) {
    Line line;
    if (!regression(x, low, (14.0f + 0.2f * float(c)) / range, &line)) continue;
    const float e = fit(x, line, tried);
    if (e < error) {
      error = e;
      best = line;
      std::memcpy(quants, tried, sizeof quants);
    }
  }
  const uint16_t d = float_to_half(best.d), m = float_to_half(best.m);
  std::memcpy(out, &d, 2);
  std::memcpy(out + 2, &m, 2);
  for (int i = 0; i < 16; i++)
    out[4 + i] = uint8_t(int(quants[i]) | int(quants[16 + i]) << 4);
}

}  // namespace

uint16_t float_to_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return uint16_t(sign | kHalfNan);
  if (bits >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds to infinity
  if (bits < 0x38800000) {  // subnormal: in units of 2^-24, which the addition rounds to
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return uint16_t(sign | (bits - 0x3f000000));
  }
  const uint32_t odd = bits >> 13 & 1;
  return uint16_t(sign | (bits - 0x38000000 + 0xfff + odd) >> 13);
}

void quantize_row(Format target, const float* x, int k, uint8_t* out) {
  const int bytes = target == Format::Q8_0 ? 34 : 20;
  for (int g = 0; g < k / kGroup; g++, x += kGroup, out += bytes) {
    bool finite = true;
    for (int i = 0; i < kGroup; i++) finite = finite && std::isfinite(x[i]);
    if (!finite) {
      std::memset(out, 0, size_t(bytes));
      std::memcpy(out, &kHalfNan, 2);
    } else if (target == Format::Q8_0) {
      q8_0(x, out);
    } else {
      q4_1(x, out);
    }
  }
}

}  // namespace steppe
