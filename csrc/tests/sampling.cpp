// The sampler, against a plain sort of the row; its draws are checked in Python against numpy.
#include <algorithm>
#include <limits>
#include <numeric>

#include "../core/sampling.h"
#include "support.h"

namespace steppe::testing {

namespace {

struct Row {
  std::vector<float> logits;
  std::vector<int32_t> bias_ids, history_ids, history_counts, banned;
  std::vector<float> bias_values;
  std::vector<uint8_t> in_prompt;
  std::vector<uint32_t> mask;
  RowExtras extras;
  SampleRow row{};
};

std::vector<int32_t> some_ids(int vocab) {
  std::vector<int32_t> ids(static_cast<size_t>(vocab));
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), rng);
  ids.resize(size_t(between(0, std::min(vocab - 1, 40))));
  return ids;
}

Row random_row() {
  Row r;
  const int vocab = between(0, 1) ? between(1, 100) : between(1000, 6000);
  r.logits = normals(size_t(vocab));
  for (float& x : r.logits) x = std::round(x * 8.0f) / 4.0f;  // with ties
  r.row.temperature = between(0, 3) ? 0.3f + 0.1f * float(between(0, 20)) : 0.0f;
  r.row.top_p = between(0, 1) ? 1.0f : 0.05f * float(between(1, 19));
  r.row.min_p = between(0, 2) ? 0.0f : 0.05f;
  r.row.repetition_penalty = between(0, 1) ? 1.0f : 1.3f;
  r.row.presence_penalty = between(0, 1) ? 0.0f : 0.5f;
  r.row.frequency_penalty = between(0, 1) ? 0.0f : 0.25f;
  r.row.top_k = between(0, 1) ? 0 : between(1, vocab);
  r.row.num_logprobs = between(-1, std::min(vocab, 20));
  r.row.seed = rng();
  r.row.position = between(0, 1 << 30);
  r.row.target = -1;
  if (between(0, 1)) return r;
  r.bias_ids = some_ids(vocab);
  r.bias_values = normals(r.bias_ids.size());
  r.history_ids = some_ids(vocab);
  for (size_t i = 0; i < r.history_ids.size(); i++) {
    r.history_counts.push_back(between(0, 3));
    r.in_prompt.push_back(uint8_t(between(0, 1)));
  }
  r.banned = some_ids(vocab);
  if (between(0, 1)) {
    r.mask.resize(size_t(vocab + 31) / 32);
    for (uint32_t& word : r.mask) word = uint32_t(rng()) | 1u;
  }
  return r;
}

void point(Row& r) {
  r.extras.bias_ids = r.bias_ids.data();
  r.extras.bias_values = r.bias_values.data();
  r.extras.bias_count = int(r.bias_ids.size());
  r.extras.history_ids = r.history_ids.data();
  r.extras.history_counts = r.history_counts.data();
  r.extras.history_in_prompt = r.in_prompt.data();
  r.extras.history_count = int(r.history_ids.size());
  r.extras.banned = r.banned.data();
  r.extras.banned_count = int(r.banned.size());
  r.extras.mask = r.mask.empty() ? nullptr : r.mask.data();
}

// The logits after bias, penalties, bans and mask, by the rules of the same order.
std::vector<float> edited(const Row& r) {
  std::vector<float> x = r.logits;
  for (size_t i = 0; i < r.bias_ids.size(); i++) x[size_t(r.bias_ids[i])] += r.bias_values[i];
  for (size_t i = 0; i < r.history_ids.size(); i++) {
    float& v = x[size_t(r.history_ids[i])];
    const int n = r.history_counts[i];
    if (r.in_prompt[i] || n > 0)
      v = v > 0.0f ? v / r.row.repetition_penalty : v * r.row.repetition_penalty;
    v = v - r.row.frequency_penalty * float(n);
    v = v - (n > 0 ? r.row.presence_penalty : 0.0f);
  }
  constexpr float never = -std::numeric_limits<float>::infinity();
  for (int32_t id : r.banned) x[size_t(id)] = never;
  for (size_t i = 0; i < x.size() && !r.mask.empty(); i++)
    if (!(r.mask[i / 32] >> (i % 32) & 1)) x[i] = never;
  return x;
}

std::vector<int32_t> falling(const std::vector<float>& x) {
  std::vector<int32_t> ids(x.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(),
                   [&](int32_t a, int32_t b) { return x[size_t(a)] > x[size_t(b)]; });
  return ids;
}

void check_choice(const Row& r, int token) {
  const std::vector<float> x = edited(r);
  const std::vector<int32_t> ids = falling(x);
  const double top = x[size_t(ids[0])];
  if (std::isinf(top)) {
    CHECK(token == -1);
    return;
  }
  if (r.row.temperature < 1e-5f) {
    CHECK(token == ids[0]);
    return;
  }
  CHECK(token >= 0 && token < int(x.size()) && !std::isinf(x[size_t(token)]));
  const size_t kept = r.row.top_k > 0 ? size_t(r.row.top_k) : ids.size();
  const size_t place = size_t(std::find(ids.begin(), ids.end(), token) - ids.begin());
  CHECK(place < kept);
  auto weight = [&](int32_t id) {
    return std::exp((double(x[size_t(id)]) - top) / double(r.row.temperature));
  };
  double total = 0.0, before = 0.0;
  for (size_t i = 0; i < std::min(kept, ids.size()); i++) {
    total += weight(ids[i]);
    if (i < place) before += weight(ids[i]);
  }
  CHECK(place == 0 || before <= (double(r.row.top_p) + 1e-9) * total);
  CHECK(weight(token) >= double(r.row.min_p) * (1.0 - 1e-9));
}

void check_logprobs(const Kernels& kern, const Row& r, int token, SampleScratch& scratch) {
  const int vocab = int(r.logits.size()), wanted = r.row.num_logprobs;
  float own = 0.0f;
  std::vector<int32_t> ids(static_cast<size_t>(std::max(wanted, 0)));
  std::vector<float> tops(ids.size());
  row_logprobs(kern, r.logits.data(), vocab, token, wanted, &own, ids.data(), tops.data(), scratch);
  const std::vector<int32_t> order = falling(r.logits);
  const double top = r.logits[size_t(order[0])];
  double total = 0.0;
  for (float x : r.logits) total += std::exp(double(x) - top);
  const double whole = top + std::log(total);
  if (token >= 0) CHECK(std::fabs(own - (r.logits[size_t(token)] - whole)) < 1e-5);
  for (size_t i = 0; i < ids.size(); i++) {
    CHECK(ids[i] == order[i]);
    CHECK(std::fabs(tops[i] - (r.logits[size_t(ids[i])] - whole)) < 1e-5);
  }
}

// What a sampler weighs, against the same by the C library; and the maxima of blocks.
void test_weights(const Kernels& kern) {
  const int n = between(1, 400);
  const size_t blocks = size_t(n + kWeightBlock - 1) / kWeightBlock;
  constexpr float never = -std::numeric_limits<float>::infinity();
  std::vector<float> x = normals(size_t(n));
  for (float& v : x) v = between(0, 9) ? v * 10.0f : never;
  const float top = x[size_t(between(0, n - 1))] = 60.0f;
  const double scale = between(0, 1) ? 1.0 : 0.1 * double(between(1, 200));
  const double least = between(0, 1) ? 0.0 : 1e-9;
  std::vector<double> w(static_cast<size_t>(n)), sums(blocks), only(blocks);
  std::vector<float> tops(blocks);
  kern.weigh(x.data(), n, scale, top, least, sums.data(), w.data());
  kern.weigh(x.data(), n, scale, top, least, only.data(), nullptr);
  kern.block_tops(x.data(), n, tops.data());
  CHECK(sums == only);
  for (size_t b = 0; b < blocks; b++) {
    double sum = 0.0;
    float largest = never;
    const size_t begin = b * kWeightBlock, end = std::min(size_t(n), begin + kWeightBlock);
    for (size_t i = begin; i < end; i++) {
      const double z = (double(x[i]) - double(top)) * scale, exact = std::exp(z);
      if (std::fabs(exact - least) > 1e-12 * least && z > -699.0)
        CHECK(std::fabs(w[i] - (exact < least ? 0.0 : exact)) <= exact * 0x1p-46);
      if (z < -701.0) CHECK(w[i] == 0.0);
      if (x[i] == top) CHECK(w[i] == 1.0);
      sum += w[i];
      largest = std::max(largest, x[i]);
    }
    CHECK(std::fabs(sums[b] - sum) <= 1e-14 * sum);
    CHECK(tops[b] == largest);
  }
  x[size_t(between(0, n - 1))] = std::numeric_limits<float>::quiet_NaN();
  kern.block_tops(x.data(), n, tops.data());
  for (size_t b = 0; b < blocks; b++) {
    float largest = never;
    for (size_t i = b * kWeightBlock; i < std::min(size_t(n), (b + 1) * kWeightBlock); i++)
      if (x[i] > largest) largest = x[i];
    CHECK(tops[b] == largest);
  }
}

}  // namespace

void test_sampling(const Kernels& kern) {
  for (int repeat = 0; repeat < 200; repeat++) test_weights(kern);
  SampleScratch scratch;
  for (int repeat = 0; repeat < 60; repeat++) {
    Row r = random_row();
    point(r);
    const int vocab = int(r.logits.size());
    const int token = sample_row(kern, r.logits.data(), vocab, r.row, r.extras, scratch);
    check_choice(r, token);
    if (r.row.num_logprobs >= 0) check_logprobs(kern, r, token, scratch);
    // The draw is a function of the row alone, whatever the scratch held before.
    SampleScratch fresh;
    CHECK(sample_row(kern, r.logits.data(), vocab, r.row, r.extras, fresh) == token);
    r.row.target = between(0, vocab - 1);
    CHECK(sample_row(kern, r.logits.data(), vocab, r.row, r.extras, scratch) == r.row.target);
    r.row.target = -1;
    r.logits[size_t(between(0, vocab - 1))] = std::numeric_limits<float>::quiet_NaN();
    if (r.banned.empty() && r.mask.empty())
      CHECK(sample_row(kern, r.logits.data(), vocab, r.row, r.extras, scratch) == -1);
    const double u = uniform(rng(), between(0, 9), between(0, 1 << 20), between(0, 3));
    CHECK(u >= 0.0 && u < 1.0);
  }
}

}  // namespace steppe::testing
