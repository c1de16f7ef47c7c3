#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "demand.h"

namespace steppe {

namespace {

constexpr float kGreedyBelow = 1e-5f;
constexpr int32_t kMasked = 5;  // DrawPurpose.MASKED
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

// The ids whose scores are at least that, looking closely at those blocks alone that have any;
// `scratch.tops` holds the blocks' maxima.
void gather_from(const float* scores, int vocab, float least, SampleScratch& scratch) {
  scratch.ids.clear();
  for (size_t b = 0; b < scratch.tops.size(); b++) {
    if (scratch.tops[b] < least) continue;
    const int first = int(b) * kWeightBlock;
    for (int i = first; i < std::min(vocab, first + kWeightBlock); i++)
      if (scores[i] >= least) scratch.ids.push_back(i);
  }
}

void find_tops(const Kernels& k, const float* scores, int vocab, SampleScratch& scratch) {
  scratch.tops.resize(size_t(vocab + kWeightBlock - 1) / kWeightBlock);
  k.block_tops(scores, vocab, scratch.tops.data());
}

// The ids of the `count` best scores of a row, without looking closely at the many that are far off.
void likeliest(const Kernels& k, const float* scores, int vocab, size_t count,
               SampleScratch& scratch) {
  // Blocks' maxima bound the count-th best from below: `count` blocks have one at least as high.
  if (count > 0 && count < size_t(vocab) / kWeightBlock / 4) {
    find_tops(k, scores, vocab, scratch);
    std::vector<float>& sorted = scratch.sorted_tops;
    sorted = scratch.tops;
    std::nth_element(sorted.begin(), sorted.begin() + std::ptrdiff_t(count - 1), sorted.end(),
                     [](float a, float b) { return a > b; });
    gather_from(scores, vocab, sorted[count - 1], scratch);
  } else {
    scratch.ids.clear();
    for (int i = 0; i < vocab; i++)
      if (!std::isnan(scores[i])) scratch.ids.push_back(i);
  }
  sort_first(scratch.ids, count, scores);
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

// The first place whose running sum exceeds `wanted`; where rounding leaves none, the first that
// reaches the whole: the last with any weight.
size_t place_in(const double* running, size_t n, double wanted) {
  const size_t at = size_t(std::upper_bound(running, running + n, wanted) - running);
  return std::min(at, size_t(std::lower_bound(running, running + n, running[n - 1]) - running));
}

// exp(score / temperature), relative to the highest score, of tokens of one row.
struct Weights {
  const Kernels& k;
  double scale, top;
  SampleScratch& scratch;

  // Of those ids, in their order, into `scratch.weights`; 0 for what is below `least`.
  std::vector<double>& of(const float* scores, const std::vector<int32_t>& ids,
                          double least = 0.0) const {
    scratch.near.resize(ids.size());
    for (size_t i = 0; i < ids.size(); i++) scratch.near[i] = scores[ids[i]];
    scratch.weights.resize(ids.size());
    k.weigh(scratch.near.data(), int(ids.size()), scale, top, least, nullptr,
            scratch.weights.data());
    return scratch.weights;
  }

  double total_of(const float* scores, const std::vector<int32_t>& ids) const {
    const std::vector<double>& w = of(scores, ids);
    return std::accumulate(w.begin(), w.end(), 0.0);
  }

  // Sums of the row's blocks, each with those before it, into `scratch.sums`.
  std::vector<double>& running_sums(const float* scores, int vocab, double least) const {
    std::vector<double>& sums = scratch.sums;
    sums.resize(size_t(vocab + kWeightBlock - 1) / kWeightBlock);
    k.weigh(scores, vocab, scale, top, least, sums.data(), nullptr);
    std::partial_sum(sums.begin(), sums.end(), sums.begin());
    return sums;
  }

  // A draw of rising ids: where in the sum of their weights u is.
  int32_t draw_of(const float* scores, const std::vector<int32_t>& ids, double least,
                  double u) const {
    std::vector<double>& w = of(scores, ids, least);
    std::partial_sum(w.begin(), w.end(), w.begin());
    return ids[place_in(w.data(), w.size(), u * w.back())];
  }

  // The same over the whole row: first which block, then who in it.
  int32_t draw_of_all(const float* scores, int vocab, double least, double u) const {
    const std::vector<double>& sums = running_sums(scores, vocab, least);
    const double wanted = u * sums.back();
    const size_t block = place_in(sums.data(), sums.size(), wanted);
    const int first = int(block) * kWeightBlock, n = std::min(vocab - first, kWeightBlock);
    double w[kWeightBlock];
    k.weigh(scores + first, n, scale, top, least, nullptr, w);
    std::partial_sum(w, w + n, w);
    return first + int32_t(place_in(w, size_t(n), wanted - (block ? sums[block - 1] : 0.0)));
  }
};

// Leaves of the falling ids those that stand before a mass of `top_p` of `total` is reached, the
// first always. False if it is not reached by all of them.
bool keep_mass(const Weights& weights, const float* scores, float top_p, double total) {
  std::vector<int32_t>& ids = weights.scratch.ids;
  const std::vector<double>& w = weights.of(scores, ids);
  const double enough = double(top_p) * total;
  double before = 0.0;
  size_t keep = 0;
  while (keep < ids.size() && (keep == 0 || before < enough)) before += w[keep++];
  ids.resize(keep);
  return before >= enough;
}

// The same for a whole row, of which only what may be heavy enough is sorted: all that weigh less
// than 1 - top_p of the whole divided by their number weigh less than 1 - top_p of it together.
void find_mass(const Weights& weights, const float* scores, int vocab, float top_p) {
  SampleScratch& scratch = weights.scratch;
  const double total = weights.running_sums(scores, vocab, 0.0).back();
  const double light = 0.999 * (1.0 - double(top_p)) * total / double(vocab);
  const float bound = float(weights.top + std::log(light) / weights.scale);
  find_tops(weights.k, scores, vocab, scratch);
  gather_from(scores, vocab, std::nextafter(bound, kNever), scratch);
  constexpr size_t kFirst = 256;  // mostly these are enough
  if (scratch.ids.size() > kFirst) {
    std::vector<int32_t> all = scratch.ids;
    sort_first(scratch.ids, kFirst, scores);
    if (keep_mass(weights, scores, top_p, total)) return;
    scratch.ids = std::move(all);
  }
  std::sort(scratch.ids.begin(), scratch.ids.end(), Falling{scores});
  keep_mass(weights, scores, top_p, total);
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
  int32_t purpose = row.purpose;
  if (extras.mask && purpose != kMasked && row.temperature >= kGreedyBelow && !few &&
      row.top_p >= 1.0f && row.min_p <= 0.0f) {
    // Drawn as if it were free, and again if that is forbidden: the rules say why.
    RowExtras free = extras;
    free.mask = nullptr;
    const int token = sample_row(k, logits, vocab, row, free, scratch);
    if (token >= 0 && extras.mask[token / 32] >> (token % 32) & 1) return token;
    purpose = kMasked;
  }
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

  const Weights weights{k, 1.0 / double(row.temperature), double(top), scratch};
  const double u = uniform(row.seed, row.sequence_index, row.position, purpose);
  if (!few && row.top_p >= 1.0f)
    return token_at(weights.draw_of_all(scores, vocab, double(row.min_p), u));
  if (few) likeliest(k, scores, vocab, size_t(row.top_k), scratch);
  if (row.top_p < 1.0f) {
    if (few) keep_mass(weights, scores, row.top_p, weights.total_of(scores, scratch.ids));
    else find_mass(weights, scores, vocab, row.top_p);
  }
  std::sort(scratch.ids.begin(), scratch.ids.end());
  return token_at(weights.draw_of(scores, scratch.ids, double(row.min_p), u));
}

void row_logprobs(const Kernels& k, const float* logits, int vocab, int token, int count,
                  float* logprob, int32_t* top_ids, float* top_logprobs,
                  SampleScratch& scratch) {
  float top;
  k.argmax(logits, vocab, &top);
  const double whole = double(top) + std::log(double(k.sum_exp(logits, vocab, top)));
  if (token >= 0) *logprob = float(double(logits[token]) - whole);
  if (count <= 0) return;
  likeliest(k, logits, vocab, size_t(count), scratch);
  for (size_t i = 0; i < scratch.ids.size(); i++) {
    top_ids[i] = scratch.ids[i];
    top_logprobs[i] = float(double(logits[scratch.ids[i]]) - whole);
  }
}

}  // namespace steppe
