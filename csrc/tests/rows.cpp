// Kernels that work along one row, against the same in double precision.
#include <algorithm>
#include <limits>

#include "support.h"

namespace steppe::testing {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

bool close(double got, double exact, double error) { return std::fabs(got - exact) <= error; }

// The group's quants, scale, sum and negated sums, from the same float operations.
void check_group(const uint8_t* group, int r, const float* x, int n) {
  float largest = 0.0f, scale, total;
  for (int i = 0; i < n; i++) largest = std::max(largest, std::fabs(x[i]));
  const float expected = largest < 1e-30f ? 0.0f : largest * (1.0f / 127.0f);
  const float inverse = largest < 1e-30f ? 0.0f : 127.0f / largest;
  std::memcpy(&scale, group + kPanelScales + r * 4, 4);
  std::memcpy(&total, group + kPanelSums + r * 4, 4);
  CHECK(scale == expected);
  int sums[2] = {0, 0};
  for (int i = 0; i < 32; i++) {
    const float v = i < n ? x[i] * inverse : 0.0f;
    const int q = int(std::nearbyint(std::min(std::max(v, -127.0f), 127.0f)));
    CHECK(int8_t(group[r * 32 + i]) == q);
    sums[i / 16] += q;
  }
  CHECK(total == float(sums[0] + sums[1]) * expected);
  for (int half = 0; half < 2; half++) {
    int32_t minus;
    std::memcpy(&minus, group + kPanelNegatives + half * 32 + r * 4, 4);
    CHECK(minus == -sums[half]);
  }
}

void test_pack(const Kernels& kern) {
  const int k = between(1, 300), rows = between(1, 8), r0 = between(0, 8 - rows);
  const size_t stride = size_t(k) + 3;
  std::vector<float> x = normals(size_t(rows) * stride);
  if (k > 32) std::fill_n(x.begin(), 32, 0.0f);
  for (Form form : {Form::Q8, Form::BF16, Form::F32}) {
    const size_t bytes = panel_bytes(form, size_t(k));
    std::vector<uint8_t> panel(bytes, 0xaa);
    kern.pack(form, x.data(), stride, rows, 0, k, k, panel.data(), r0);
    // In pieces that end at multiples of 32: the same bytes.
    std::vector<uint8_t> pieces(bytes, 0xaa);
    for (int k0 = 0; k0 < k;) {
      const int k1 = std::min(k, k0 + 32 * between(1, 4));
      kern.pack(form, x.data() + k0, stride, rows, k0, k1, k, pieces.data(), r0);
      k0 = k1;
    }
    CHECK(panel == pieces);
    const int padded = int(round_up(size_t(k), 64));
    for (int i = 0; i < rows; i++) {
      const float* row = x.data() + size_t(i) * stride;
      const int r = r0 + i;
      if (form == Form::Q8)
        for (int g = 0; g < padded / 32; g++)
          check_group(panel.data() + size_t(g) * kPanelGroupBytes, r, row + std::min(k, g * 32),
                      std::clamp(k - g * 32, 0, 32));
      for (int j = 0; form != Form::Q8 && j < padded; j++) {
        const float v = j < k ? row[j] : 0.0f;
        const uint16_t h = float_to_bf16(v);
        const uint8_t* at = form == Form::F32
                                ? panel.data() + size_t(j * 8 + r) * 4
                                : panel.data() + size_t(j / 2 * 8 + r) * 4 + j % 2 * 2;
        if (form == Form::F32) CHECK(std::memcmp(at, &v, 4) == 0);
        else CHECK(std::memcmp(at, &h, 2) == 0);
      }
    }
  }
}

void test_norm(const Kernels& kern) {
  const int heads = between(1, 4), n = between(1, 150);
  const std::vector<float> x = normals(size_t(n * heads)), weight = normals(size_t(n));
  std::vector<float> out(x.size());
  kern.rms_norm(x.data(), weight.data(), out.data(), n * heads, heads, 1e-5f);
  for (int h = 0; h < heads; h++) {
    double mean = 0.0;
    for (int i = 0; i < n; i++) mean += double(x[size_t(h * n + i)]) * x[size_t(h * n + i)] / n;
    for (int i = 0; i < n; i++) {
      const double exact = x[size_t(h * n + i)] / std::sqrt(mean + 1e-5) * weight[size_t(i)];
      CHECK(close(out[size_t(h * n + i)], exact, 2e-6 * std::fabs(exact) + 1e-30));
    }
  }
}

void test_elements(const Kernels& kern) {
  const int n = between(1, 150);
  std::vector<float> a = normals(size_t(n)), b = normals(size_t(n)), out(a.size());
  for (float& x : a) x *= between(0, 4) ? 3.0f : 60.0f;
  kern.add(a.data(), b.data(), out.data(), n);
  for (size_t i = 0; i < out.size(); i++) CHECK(out[i] == a[i] + b[i]);
  for (Act act : {Act::SILU, Act::GELU_TANH}) {
    kern.gated(act, a.data(), b.data(), out.data(), n);
    for (size_t i = 0; i < out.size(); i++) {
      const double g = a[i];
      const double u =
          act == Act::SILU ? g : 2 * 0.7978845608028654 * (g + 0.044715 * g * g * g);
      const double exact = g / (1.0 + std::exp(-u)) * b[i];
      // exp turns an error of its argument into a relative one of the result.
      CHECK(close(out[i], exact, (2e-6 + 3e-7 * std::fabs(u)) * std::fabs(exact) + 1e-30));
    }
  }
  const float cap = float(between(1, 60));
  kern.softcap(a.data(), out.data(), n, cap);
  for (size_t i = 0; i < out.size(); i++)
    CHECK(close(out[i], cap * std::tanh(double(a[i]) / cap), 1e-6 * cap));
}

void test_rope(const Kernels& kern) {
  const int heads = between(1, 3), dim = 2 * between(1, 70), half = between(1, dim / 2);
  const std::vector<float> x = normals(size_t(heads * dim));
  std::vector<float> cosine(static_cast<size_t>(half)), sine(static_cast<size_t>(half));
  for (int i = 0; i < half; i++) {
    const float angle = 3.0f * normal();
    cosine[size_t(i)] = std::cos(angle);
    sine[size_t(i)] = std::sin(angle);
  }
  std::vector<float> out(x.size());
  kern.rope(x.data(), cosine.data(), sine.data(), out.data(), heads, dim, half);
  for (int h = 0; h < heads; h++)
    for (int i = 0; i < dim; i++) {
      const float* head = x.data() + h * dim;
      const int j = i % half;
      double exact = head[i], size = std::fabs(exact);
      if (i < 2 * half) {
        const double a = head[j], b = head[half + j], c = cosine[size_t(j)], s = sine[size_t(j)];
        exact = i < half ? a * c - b * s : b * c + a * s;
        size = std::fabs(a) + std::fabs(b);
      }
      CHECK(close(out[size_t(h * dim + i)], exact, 1e-6 * size));
    }
  std::vector<float> there = x;
  kern.rope(there.data(), cosine.data(), sine.data(), there.data(), heads, dim, half);
  CHECK(same_bits(there, out));
}

void test_reductions(const Kernels& kern) {
  const int n = between(1, 3000);
  std::vector<float> x = normals(size_t(n));
  for (int ties = between(0, 3); ties > 0; ties--) x[size_t(between(0, n - 1))] = 9.0f;
  float top;
  const int first = int(std::max_element(x.begin(), x.end()) - x.begin());
  CHECK(kern.argmax(x.data(), n, &top) == first && top == x[size_t(first)]);
  double sum = 0.0;
  for (float v : x) sum += std::exp(double(v) - top);
  CHECK(close(kern.sum_exp(x.data(), n, top), sum, 1e-5 * sum));
  const std::vector<float> low(size_t(n), -kInfinity);
  CHECK(kern.argmax(low.data(), n, &top) == 0 && top == -kInfinity);
  x[size_t(between(0, n - 1))] = kNaN;
  CHECK(kern.argmax(x.data(), n, &top) == -1);
  // One value of exp at a time, up to where it is taken for zero.
  for (float v : {0.0f, -1e-7f, -0.5f, -20.0f, -86.9f}) {
    const double exact = std::exp(double(v));
    CHECK(close(kern.sum_exp(&v, 1, 0.0f), exact, 3e-7 * exact));
  }
  for (float v : {-88.0f, -1e30f, -kInfinity}) CHECK(kern.sum_exp(&v, 1, 0.0f) == 0.0f);
}

void test_read(const Kernels& kern) {
  std::vector<uint8_t> data(1024);
  CHECK(kern.read(data.data(), data.size()) == 0.0);
  data[size_t(between(0, 1023))] = 1;
  CHECK(kern.read(data.data(), data.size()) != 0.0);
}

}  // namespace

void test_rows(const Kernels& kern) {
  for (int repeat = 0; repeat < 25; repeat++) {
    test_pack(kern);
    test_norm(kern);
    test_elements(kern);
    test_rope(kern);
    test_reductions(kern);
    test_read(kern);
  }
}

}  // namespace steppe::testing
