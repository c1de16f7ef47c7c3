#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "demand.h"

namespace steppe {

namespace {

constexpr float kGreedyBelow = 1e-5f;
constexpr float kNever = -std::numeric_limits<float>::infinity();

// Ids of `scores` in [0, n) by falling score, equals by rising id: the order in which all rules look.
struct Falling {
  const float* scores;
  bool operator()(int32_t a, int32_t b) const {
    return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
  }
};

// The first `count` ids of that order, sorted; `ids` holds the candidates.
void sort_first(std::vector<int32_t>& ids, size_t count, const float* scores) {
  count = std::min(count, ids.size());
  if (count < ids.size())
    std::nth_element(ids.begin(), ids.begin() + std::ptrdiff_t(count), ids.end(),
                     Falling{scores});
  ids.resize(count);
  std::sort(ids.begin(), ids.end(), Falling{scores});
}

// The ids of the `count` best scores of a row, without looking closely at the many that are far off.
void likeliest(const float* scores, int vocab, size_t count, std::vector<int32_t>& ids) {
  ids.clear();
  // Blocks' maxima bound the count-th best from below: `count` blocks have one at least as high.
  constexpr int kBlock = 64;
  const int blocks = (vocab + kBlock - 1) / kBlock;
  if (count > 0 && count < size_t(blocks) / 4) {
    std::vector<float> tops(static_cast<size_t>(blocks));
    for (int b = 0; b < blocks; b++) {
      float top = kNever;
      for (int i = b * kBlock; i < std::min(vocab, (b + 1) * kBlock); i++)
        top = scores[i] > top ? scores[i] : top;
      tops[size_t(b)] = top;
    }
    std::vector<float> sorted = tops;
    std::nth_element(sorted.begin(), sorted.begin() + std::ptrdiff_t(count - 1), sorted.end(),
                     [](float a, float b) { return a > b; });
    const float least = sorted[count - 1];
    for (int b = 0; b < blocks; b++) {
      if (tops[size_t(b)] < least) continue;
      for (int i = b * kBlock; i < std::min(vocab, (b + 1) * kBlock); i++)
        if (scores[i] >= least) ids.push_back(i);
    }
  } else {
    for (int i = 0; i < vocab; i++)
      if (!std::isnan(scores[i])) ids.push_back(i);
  }
  sort_first(ids, count, scores);
}

// The ids that a mask allows, rising, and their logits; how many there are. What is left out has no
// weight in any rule, so sampling from these alone takes the same token.
int gather_allowed(const float* logits, int vocab, const uint32_t* mask, SampleScratch& scratch) {
  scratch.allowed.resize(size_t(vocab));
  int32_t* ids = scratch.allowed.data();
  int n = 0;
  for (int first = 0; first < vocab; first += 32) {
    uint32_t word = mask[first / 32];
    if (vocab - first < 32) word &= (1u << (vocab - first)) - 1;
    for (; word; word &= word - 1) ids[n++] = first + __builtin_ctz(word);
  }
  scratch.work.resize(size_t(n));
  for (int j = 0; j < n; j++) scratch.work[size_t(j)] = logits[ids[j]];
  return n;
}

// Where `id` is among `n` rising ids, or -1.
int64_t place_of(int32_t id, const int32_t* ids, int n) {
  const int32_t* at = std::lower_bound(ids, ids + n, id);
  return at != ids + n && *at == id ? at - ids : -1;
}

// Bias, penalties and bans. `place` says where in `w` a token is, or that it is not (negative).
template <class Place>
void edit(float* w, const SampleRow& row, const RowExtras& extras, Place place) {
  for (int i = 0; i < extras.bias_count; i++) {
    const int64_t at = place(extras.bias_ids[i]);
    if (at >= 0) w[at] += extras.bias_values[i];
  }
  for (int i = 0; i < extras.history_count; i++) {
    const int64_t at = place(extras.history_ids[i]);
    if (at < 0) continue;
    float& x = w[at];
    const int count = extras.history_counts[i];
    if (extras.history_in_prompt[i] || count > 0)
      x = x > 0 ? x / row.repetition_penalty : x * row.repetition_penalty;
    x = x - row.frequency_penalty * float(count);
    x = x - row.presence_penalty * (count > 0 ? 1.0f : 0.0f);
  }
  for (int i = 0; i < extras.banned_count; i++) {
    const int64_t at = place(extras.banned[i]);
    if (at >= 0) w[at] = kNever;
  }
}

}  // namespace

double uniform(uint64_t seed, int32_t sequence_index, int64_t position, int32_t purpose) {
  // Philox4x32-10 (Salmon et al., SC 2011): key from the seed, counter from the place.
  uint32_t x0 = uint32_t(uint64_t(position)), x1 = uint32_t(uint64_t(position) >> 32);
  uint32_t x2 = uint32_t(sequence_index), x3 = uint32_t(purpose);
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int i = 0; i < 10; i++) {
    const uint64_t left = uint64_t(x0) * 0xD2511F53u, right = uint64_t(x2) * 0xCD9E8D57u;
    x0 = uint32_t(right >> 32) ^ x1 ^ k0;
    x1 = uint32_t(right);
    x2 = uint32_t(left >> 32) ^ x3 ^ k1;
    x3 = uint32_t(left);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return double((uint64_t(x0) << 32 | x1) >> 11) * 0x1p-53;
}

void check_row(const SampleRow& row, const RowExtras& x, int vocab) {
  const auto inside = [&](const int32_t* ids, int n) {
    return std::all_of(ids, ids + n, [&](int32_t id) { return id >= 0 && id < vocab; });
  };
  demand(row.target < vocab, "target outside the vocabulary");
  demand(inside(x.bias_ids, x.bias_count), "bias outside the vocabulary");
  demand(inside(x.history_ids, x.history_count), "history outside the vocabulary");
  demand(inside(x.banned, x.banned_count), "banned outside the vocabulary");
}

int sample_row(const Kernels& k, const float* logits, int vocab, const SampleRow& row,
               const RowExtras& extras, SampleScratch& scratch) {
  if (row.target >= 0) return row.target;
  const bool few = row.top_k > 0 && row.top_k < vocab;
  // Under a mask only what it allows is looked at: place j of `scores` is the token `allowed[j]`.
  const float* scores = logits;
  const int32_t* allowed = nullptr;
  if (extras.mask) {
    vocab = gather_allowed(logits, vocab, extras.mask, scratch);
    allowed = scratch.allowed.data();
    scores = scratch.work.data();
  } else if (extras.bias_count || extras.history_count || extras.banned_count) {
    scratch.work.assign(logits, logits + vocab);
    scores = scratch.work.data();
  }
  if (scores != logits)
    edit(scratch.work.data(), row, extras, [&](int32_t id) {
      return allowed ? place_of(id, allowed, vocab) : int64_t(id);
    });
  float top;
  const int best = vocab > 0 ? k.argmax(scores, vocab, &top) : -1;
  if (best < 0 || !std::isfinite(top)) return -1;
  const auto token_at = [&](int32_t place) { return allowed ? allowed[place] : place; };
  if (row.temperature < kGreedyBelow) return token_at(best);

  const double temperature = double(row.temperature), highest = double(top) / temperature;
  auto weight = [&](float x) { return std::exp(double(x) / temperature - highest); };
  std::vector<int32_t>& ids = scratch.ids;
  std::vector<double>& weights = scratch.weights;
  double total = 0.0;
  if (few) {
    likeliest(scores, vocab, size_t(row.top_k), ids);
  } else if (row.top_p < 1.0f) {
    weights.resize(size_t(vocab));
    for (int i = 0; i < vocab; i++) total += weights[size_t(i)] = weight(scores[i]);
  }
  if (row.top_p < 1.0f) {
    // Falling until the mass is reached, looking at ever more of the row.
    size_t count = few ? ids.size() : 256;
    for (;; count *= 8) {
      if (!few) likeliest(scores, vocab, count, ids);
      else total = 0.0;
      if (few)
        for (int32_t id : ids) total += weight(scores[id]);
      const double enough = double(row.top_p) * total;
      double before = 0.0;
      size_t keep = 0;
      while (keep < ids.size() && (keep == 0 || before < enough))
        before += weight(scores[ids[keep++]]);
      if (keep < ids.size() || few || ids.size() >= size_t(vocab)) {
        ids.resize(keep);
        break;
      }
      if (before >= enough) break;
    }
  }
  const bool all = !few && row.top_p >= 1.0f;
  if (all) {
    ids.clear();
    for (int i = 0; i < vocab; i++) ids.push_back(i);
  } else {
    std::sort(ids.begin(), ids.end());
  }
  weights.resize(ids.size());
  double mass = 0.0;
  for (size_t i = 0; i < ids.size(); i++) {
    const double w = weight(scores[ids[i]]);
    mass += row.min_p > 0.0f && w < double(row.min_p) ? 0.0 : w;
    weights[i] = mass;
  }
  const double u = uniform(row.seed, row.sequence_index, row.position, row.purpose);
  size_t at = size_t(std::upper_bound(weights.begin(), weights.end(), u * mass) - weights.begin());
  const size_t last =
      size_t(std::lower_bound(weights.begin(), weights.end(), mass) - weights.begin());
  return token_at(ids[std::min(at, last)]);
}

void row_logprobs(const Kernels& k, const float* logits, int vocab, int token, int count,
                  float* logprob, int32_t* top_ids, float* top_logprobs,
                  SampleScratch& scratch) {
  float top;
  k.argmax(logits, vocab, &top);
  const double whole = double(top) + std::log(double(k.sum_exp(logits, vocab, top)));
  if (token >= 0) *logprob = float(double(logits[token]) - whole);
  if (count <= 0) return;
  likeliest(logits, vocab, size_t(count), scratch.ids);
  for (size_t i = 0; i < scratch.ids.size(); i++) {
    top_ids[i] = scratch.ids[i];
    top_logprobs[i] = float(double(logits[scratch.ids[i]]) - whole);
  }
}

}  // namespace steppe
