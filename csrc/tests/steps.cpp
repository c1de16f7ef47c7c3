// Whole steps of a small model of everything: the same bits whatever the threads and the chunks.
#include <algorithm>
#include <stdexcept>
#include <utility>

#include "../core/program.h"
#include "support.h"

namespace steppe::testing {

namespace {

constexpr int kVocab = 61, kHidden = 96, kInner = 112, kHeads = 4, kKvHeads = 2;
constexpr int kExperts = 5, kExpertInner = 40, kTablePages = 2;

Micro micro(MicroKind kind, int a, int b, int c, int d, int e, int out, float f = 0.0f) {
  return Micro{kind, a, b, c, d, e, out, f};
}

// Two layers: one with full attention and a gate, one with a window, a soft cap and experts.
class Model {
 public:
  Model(const Kernels& kern, int threads, uint32_t seed) : p(kern, threads, kVocab, 512) {
    // The weights follow from the seed alone, and the draws of the test are not disturbed.
    const std::mt19937 saved = rng;
    rng.seed(seed);
    build();
    rng = saved;
  }

  Program p;

 private:
  static constexpr Domain T = Domain::TOKENS, R = Domain::ROWS;

  int matrix(const char* type, int n, int k) {
    const std::vector<uint8_t> d = random_blocks(*source_type(type), n, k);
    return p.add_weight(type, d.data(), d.size(), n, k, nullptr);
  }
  void rows(Domain domain, std::vector<Micro> micros) {
    Phase f{};
    f.kind = Phase::Kind::MICROS;
    f.domain = domain;
    f.micros = std::move(micros);
    p.add_phase(std::move(f));
  }
  void gemm(Domain domain, int panel, std::vector<Segment> segments) {
    Phase g{};
    g.kind = Phase::Kind::GEMM;
    g.domain = domain;
    g.panel = panel;
    g.segments = std::move(segments);
    p.add_phase(std::move(g));
  }
  // Norm, attention of `dim` wide heads, and the residual; ends with the next norm in y.
  void attend(int layer, int dim, const char* type, float softcap) {
    const int sq = p.add_slot(kHeads * dim, T), sk = p.add_slot(kKvHeads * dim, T);
    const int sv = p.add_slot(kKvHeads * dim, T), turned = p.add_slot(kHeads * dim, T);
    const int a = p.add_slot(kHeads * dim, T), pa = p.add_panel(Form::Q8, kHeads * dim, T);
    const std::vector<float> freq(size_t(dim / 2), 0.1f), bias = normals(size_t(kHeads * dim));
    const int rope = p.add_rope(freq.data(), dim / 2, 1.0f);
    const int q = matrix(type, kHeads * dim, kHidden), k = matrix("Q8_0", kKvHeads * dim, kHidden);
    const int v = matrix("Q4_1", kKvHeads * dim, kHidden);
    const int o = matrix("Q5_0", kHidden, kHeads * dim);
    rows(T, {micro(MicroKind::ANGLES, rope, -1, -1, -1, -1, -1),
             micro(MicroKind::NORM, x, norm, 1, -1, -1, y, 1e-5f),
             micro(MicroKind::PACK, y, -1, -1, -1, -1, px)});
    gemm(T, px, {{q, p.add_vector(bias.data(), kHeads * dim), sq, -1}, {k, -1, sk, -1},
                 {v, -1, sv, -1}});
    rows(T, {micro(MicroKind::ROPE, sq, sk, sv, layer, rope, turned)});
    // A head that is whole groups is packed where it is computed.
    const bool packs = dim % kGroup == 0;
    Phase t{};
    t.kind = Phase::Kind::ATTENTION;
    t.q = turned;
    t.layer = layer;
    t.num_heads = kHeads;
    t.scale = 0.2f;
    t.softcap = softcap;
    t.out = a;
    t.out_panel = packs ? pa : -1;
    p.add_phase(t);
    if (!packs) rows(T, {micro(MicroKind::PACK, a, -1, -1, -1, -1, pa)});
    gemm(T, pa, {{o, -1, x, x}});
    rows(T, {micro(MicroKind::NORM, x, norm, 1, -1, -1, y, 1e-5f),
             micro(MicroKind::PACK, y, -1, -1, -1, -1, px)});
  }
  void build() {
    p.set_groups(2);
    p.add_layer({0, kKvHeads, 32, 0});
    p.add_layer({1, kKvHeads, 24, 20});
    const std::vector<float> ones(kHidden, 1.0f);
    norm = p.add_vector(ones.data(), kHidden);
    x = p.add_slot(kHidden, T);
    y = p.add_slot(kHidden, T);
    px = p.add_panel(Form::Q8, kHidden, T);
    const int embed = matrix("F32", kVocab, kHidden);
    rows(T, {micro(MicroKind::EMBED, embed, -1, -1, -1, -1, x, 2.0f)});

    attend(0, 32, "Q4_0", 0.0f);
    const int pi = p.add_panel(Form::BF16, kInner, T);
    Phase h{};
    h.kind = Phase::Kind::GATED;
    h.panel = px;
    h.segments = {{matrix("IQ4_NL", kInner, kHidden), -1, -1, -1},
                  {matrix("Q5_1", kInner, kHidden), -1, -1, -1}};
    h.out_panel = pi;
    p.add_phase(h);
    gemm(T, pi, {{matrix("BF16", kHidden, kInner), -1, x, x}});
    const int captured = p.add_output(kHidden);
    rows(T, {micro(MicroKind::CAPTURE, x, -1, -1, -1, -1, captured)});

    attend(1, 24, "Q8_0", 30.0f);
    const int z = p.add_slot(kHidden, T);
    Phase e{};
    e.kind = Phase::Kind::EXPERTS;
    e.router = matrix("F32", kExperts, kHidden);
    for (int i = 0; i < kExperts; i++) {
      e.segments.push_back({matrix("Q8_0", kExpertInner, kHidden), -1, -1, -1});
      e.segments.push_back({matrix("Q4_0", kExpertInner, kHidden), -1, -1, -1});
      e.segments.push_back({matrix("BF16", kHidden, kExpertInner), -1, -1, -1});
    }
    e.top_k = 2;
    e.normalize = true;
    e.act = Act::GELU_TANH;
    e.q = y;
    e.out = z;
    p.add_phase(e);
    const int late = p.add_output(kHidden);
    rows(T, {micro(MicroKind::ADD, x, z, -1, -1, -1, x),
             micro(MicroKind::CAPTURE, x, -1, -1, -1, -1, late)});

    const int xr = p.add_slot(kHidden, R), pr = p.add_panel(Form::F32, kHidden, R);
    const int raw = p.add_slot(kVocab, R), logits = p.add_slot(kVocab, R);
    p.set_logits(logits);
    rows(R, {micro(MicroKind::TAKE, x, -1, -1, -1, -1, xr),
             micro(MicroKind::PACK, xr, -1, -1, -1, -1, pr)});
    gemm(R, pr, {{embed, -1, raw, -1}});
    rows(R, {micro(MicroKind::SOFTCAP, raw, -1, -1, -1, -1, logits, 25.0f)});
    p.allocate_cache({6, 6});
  }

  int x = -1, y = -1, px = -1, norm = -1;
};

// Sequence s has the pages 2 s and 2 s + 1, in turned order.
struct Sequences {
  std::vector<std::vector<int32_t>> ids;
  std::vector<int> done;
};

// What a step gives for each token of a sequence.
struct Results {
  std::vector<float> logits, early, late;
};

// Some numbers below n, in order: all of them, the last, a few or none.
std::vector<int32_t> some(int n) {
  std::vector<int32_t> out;
  out.reserve(size_t(n));  // none of them still have an address, or they would be all
  const int odds = between(0, 3);
  for (int i = 0; i < n; i++)
    if (odds == 3 || (odds == 2 && i == n - 1) || (odds == 1 && between(0, 2) == 0)) out.push_back(i);
  return out;
}

// Runs the next `lengths[s]` tokens of each sequence in one step, and appends what it gives. With
// `expected`, asks for some rows only, and compares.
void step(Model& m, Sequences& all, const std::vector<int>& lengths, std::vector<Results>& results,
          const std::vector<Results>* expected = nullptr) {
  std::vector<int32_t> ids, positions, start{0}, context, pages;
  std::vector<int64_t> slots;
  std::vector<std::pair<size_t, size_t>> tokens;  // sequence and place in it
  for (size_t s = 0; s < lengths.size(); s++) {
    if (lengths[s] == 0) continue;
    const int32_t own[kTablePages] = {int32_t(2 * s + 1), int32_t(2 * s)};
    pages.insert(pages.end(), own, own + kTablePages);
    for (int i = all.done[s]; i < all.done[s] + lengths[s]; i++) {
      ids.push_back(all.ids[s][size_t(i)]);
      positions.push_back(i);
      tokens.push_back({s, size_t(i)});
      slots.push_back(int64_t(own[i / kPageTokens]) * kPageTokens + i % kPageTokens);
    }
    start.push_back(int32_t(ids.size()));
    context.push_back(all.done[s] + lengths[s]);
  }
  std::vector<int32_t> every(ids.size());
  for (size_t i = 0; i < every.size(); i++) every[i] = int32_t(i);
  const std::vector<int32_t> rows = expected ? some(int(ids.size())) : every;
  const std::vector<int32_t> hidden_rows = expected ? some(int(ids.size())) : every;
  const size_t n = rows.size(), h = hidden_rows.size();
  Step s;
  s.tokens = int(ids.size());
  s.rows = int(n);
  s.sequences = int(context.size());
  s.token_ids = ids.data();
  s.positions = positions.data();
  s.query_start = start.data();
  s.context_len = context.data();
  s.groups = {{pages.data(), kTablePages, slots.data()}, {pages.data(), kTablePages, slots.data()}};
  s.logit_rows = rows.data();
  std::vector<SampleRow> sample(n, SampleRow{0.7f, 0.9f, 0.01f, 1, 0, 0, 20, 3, 7, 5, 0, 0, -1, 0});
  s.sample = sample.data();
  std::vector<int32_t> sampled(n), top(n * 3);
  std::vector<float> logprob(n), tops(n * 3), out(n * kVocab), early(h * kHidden), late(h * kHidden);
  s.sampled = sampled.data();
  s.logprob = logprob.data();
  s.top_ids = top.data();
  s.top_logprobs = tops.data();
  s.top_width = 3;
  s.logits = out.data();
  s.outputs = {1, 0};
  s.hidden_rows = expected ? hidden_rows.data() : nullptr;
  s.hidden_count = expected ? int(h) : 0;
  s.hidden = {late.data(), early.data()};
  if (expected && between(0, 1)) {
    s.outputs = {0};
    s.hidden = {early.data()};
  }
  m.p.run(s);
  for (int32_t token : sampled) CHECK(token >= 0 && token < kVocab);
  auto take = [&](const std::vector<float>& from, const std::vector<int32_t>& at, int width,
                  std::vector<float> Results::*kind) {
    for (float v : from) CHECK(std::isfinite(v));
    for (size_t i = 0; i < at.size(); i++) {
      const auto [sequence, place] = tokens[size_t(at[i])];
      const float* row = from.data() + i * size_t(width);
      if (expected) {
        const float* same = ((*expected)[sequence].*kind).data() + place * size_t(width);
        CHECK(std::memcmp(row, same, size_t(width) * sizeof(float)) == 0);
      } else {
        std::vector<float>& to = results[sequence].*kind;
        to.insert(to.end(), row, row + width);
      }
    }
  };
  take(out, rows, kVocab, &Results::logits);
  take(early, hidden_rows, kHidden, &Results::early);
  if (s.outputs.size() == 2) take(late, hidden_rows, kHidden, &Results::late);
  for (size_t i = 0; i < lengths.size(); i++) all.done[i] += lengths[i];
  // What does not fit the cache is refused before anything is written.
  context[0] = 5000;
  bool refused = false;
  try {
    m.p.run(s);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
}

}  // namespace

void test_steps(const Kernels& kern) {
  const uint32_t seed = uint32_t(rng());
  std::vector<std::vector<int32_t>> ids(3);
  for (auto& sequence : ids) {
    sequence.resize(size_t(between(1, kTablePages * kPageTokens)));
    for (int32_t& id : sequence) id = between(0, kVocab - 1);
  }
  std::vector<Results> alone(3), together(3);
  Model one(kern, 1, seed), three(kern, 3, seed), chosen(kern, 3, seed);
  for (size_t s = 0; s < 3; s++) {
    Sequences all{ids, {0, 0, 0}};
    std::vector<int> lengths(3);
    lengths[s] = int(ids[s].size());
    step(one, all, lengths, alone);
  }
  Sequences all{ids, {0, 0, 0}}, again = all;
  for (bool more = true; more;) {
    std::vector<int> lengths(3);
    more = false;
    for (size_t s = 0; s < 3; s++) {
      const int left = int(ids[s].size()) - all.done[s];
      lengths[s] = std::min(left, between(0, 1) ? between(0, 3) : between(0, 70));
      more = more || lengths[s] > 0 || left > 0;
    }
    if (lengths == std::vector<int>(3)) continue;
    step(three, all, lengths, together);
    step(chosen, again, lengths, together, &alone);
  }
  for (size_t s = 0; s < 3; s++)
    for (auto kind : {&Results::logits, &Results::early, &Results::late})
      CHECK(same_bits(alone[s].*kind, together[s].*kind));
}

}  // namespace steppe::testing
