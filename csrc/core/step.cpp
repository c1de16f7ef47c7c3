// One step: what it may ask for, the memory that it needs, and its run.

#include <algorithm>
#include <new>
#include <utility>

#include "demand.h"
#include "program.h"

namespace steppe {

void Program::check(const Step& s) const {
  demand(!caches_.empty(), "no cache has been allocated");
  demand(s.tokens > 0, "token_ids is empty");
  for (int i = 0; i < s.tokens; i++) {
    demand(s.token_ids[i] >= 0 && s.token_ids[i] < vocab_, "token_ids outside the vocabulary");
    demand(s.positions[i] >= 0 && s.positions[i] < max_positions_, "positions outside the model's");
  }
  demand(s.query_start[0] == 0 && s.query_start[s.sequences] == s.tokens,
         "query_start does not cumulate the query lengths");
  demand(s.groups.size() == page_counts_.size(), "not one block table for each cache group");
  for (int i = 0; i < s.sequences; i++) {
    const int length = s.query_start[i + 1] - s.query_start[i];
    demand(length >= 0, "query_start does not cumulate the query lengths");
    demand(s.context_len[i] >= length, "context_len is shorter than the query");
    if (length == 0) continue;
    const int first = s.context_len[i] - length, last = s.context_len[i] - 1;
    for (size_t g = 0; g < s.groups.size(); g++) {
      const Step::Table& t = s.groups[g];
      demand(last / kPageTokens < t.width, "block_tables is too short for the contexts");
      int window = 0;
      for (const LayerSpec& spec : layers_)
        if (spec.group == int(g)) window = spec.window;
      const int oldest = window > 0 ? std::max(0, first - window + 1) : 0;
      for (int b = oldest / kPageTokens; b <= last / kPageTokens; b++) {
        const int32_t page = t.pages[size_t(i) * size_t(t.width) + size_t(b)];
        demand(page >= 0 && page < page_counts_[g], "block_tables lacks a page that is read");
      }
    }
  }
  for (size_t g = 0; g < s.groups.size(); g++)
    for (int i = 0; i < s.tokens; i++)
      demand(s.groups[g].slots[i] >= 0 &&
                 s.groups[g].slots[i] < int64_t(page_counts_[g]) * kPageTokens,
             "slot_mappings outside the cache");
  for (int i = 0; i < s.rows; i++)
    demand(s.logit_rows[i] >= 0 && s.logit_rows[i] < s.tokens, "logit_rows outside the tokens");
  demand(s.rows == 0 || logits_slot_ >= 0, "the program has no logits");
  for (int i = 0; i < s.hidden_count; i++)
    demand(s.hidden_rows[i] >= 0 && s.hidden_rows[i] < s.tokens, "hidden_rows outside the tokens");
  for (int o : s.outputs) demand(o >= 0 && o < output_count(), "no such output");
  for (int i = 0; i < s.rows; i++)
    check_row(s.sample[i], s.extras.empty() ? RowExtras{} : s.extras[size_t(i)], vocab_);
}

// Grows every buffer to what the step needs. Their content never outlives a step.
void Program::reserve(int tokens, int rows) {
  if (tokens <= capacity_tokens_ && rows <= capacity_rows_) return;
  const int t = std::max(capacity_tokens_, int(round_up(size_t(tokens), 64)));
  const int r = std::max(capacity_rows_, int(round_up(size_t(std::max(rows, 1)), 8)));
  memory_.clear();
  auto take = [&](size_t bytes) {
    memory_.emplace_back(round_up(bytes, 64));
    return memory_.back().data();
  };
  auto of = [&](Domain d) { return size_t(d == Domain::TOKENS ? t : r); };
  for (Slot& s : slots_)
    s.data = reinterpret_cast<float*>(take(of(s.domain) * s.stride * sizeof(float)));
  for (Panel& p : panels_) p.data = take((of(p.domain) + 7) / 8 * p.bytes);
  for (Rope& p : ropes_) {
    p.cosine = reinterpret_cast<float*>(take(size_t(t) * p.inv_freq.size() * 4));
    p.sine = reinterpret_cast<float*>(take(size_t(t) * p.inv_freq.size() * 4));
  }
  if (!mixtures_.empty()) reserve_experts(t, r);
  capacity_tokens_ = t;
  capacity_rows_ = r;
}

void Program::run(Step& step) {
  const auto start = timing_.on() ? Timing::Clock::now() : Timing::Clock::time_point();
  check(step);
  kept_rows_ = 0;
  step_ = &step;
  chunk_start_ = 0;
  chunk_rows_ = std::min(step.rows, kMaxRows);
  reserve(step.tokens, chunk_rows_);
  if (tail_known_ != body_.size() + head_.size()) find_tail();
  select_rows();
  plan_attention();
  std::vector<int> tiles;
  active_.clear();
  for (size_t i = 0; i < body_.size(); i++) {
    if (i == tail_begin_ && selecting_) active_.push_back(&select_);
    active_.push_back(&body_[i]);
  }
  for (;;) {
    if (chunk_rows_ > 0) {
      for (const Phase& p : head_) active_.push_back(&p);
      active_.push_back(&sample_);
    }
    tiles.clear();
    for (const Phase* p : active_) tiles.push_back(tiles_of(*p));
    pool_.run(*this, tiles);
    chunk_start_ += chunk_rows_;
    if (chunk_start_ >= step.rows) break;
    chunk_rows_ = std::min(step.rows - chunk_start_, kMaxRows);
    active_.clear();
  }
  step_ = nullptr;
  kept_rows_ = step.rows <= kMaxRows ? step.rows : 0;
  if (timing_.on()) timing_.add_step(Timing::Clock::now() - start);
  if (failed_.exchange(false)) throw std::bad_alloc();
}

void Program::run(int phase, int tile, int thread) {
  const Phase& p = *active_[size_t(phase)];
  try {
    if (timing_.on()) {
      const auto start = Timing::Clock::now();
      run_phase(p, tile, thread);
      timing_.add(thread, p.label, Timing::Clock::now() - start);
    } else {
      run_phase(p, tile, thread);
    }
  } catch (const std::bad_alloc&) {  // of the sampler's scratch; nothing else here throws
    failed_.store(true, std::memory_order_relaxed);
  }
}

void Program::time_gemm(int weight, int m, int repeats, std::vector<double>& seconds,
                        std::vector<double>& reads, double (*now)()) {
  const Weight& w = weights_.at(size_t(weight));
  demand(m > 0 && m <= max_positions_ * 65536, "too many rows");
  const Form form = layout_of(w.format).form;
  const int x = add_slot(w.k, Domain::TOKENS), y = add_slot(w.n, Domain::TOKENS);
  const int panel = add_panel(form, w.k, Domain::TOKENS);
  Phase phase{};
  phase.kind = Phase::Kind::GEMM;
  phase.panel = panel;
  phase.segments = {{weight, -1, y, -1}};
  add_phase(phase);
  Step step;
  step.tokens = m;
  step_ = &step;
  reserve(m, 0);
  const Slot& from = slots_[size_t(x)];
  std::fill(from.data, from.data + size_t(m) * from.stride, 1.0f);
  for (int r = 0; r < m; r += kPanelRows)
    k_.pack(form, from.data + size_t(r) * from.stride, from.stride, std::min(kPanelRows, m - r), 0,
            w.k, w.k, panels_[size_t(panel)].data + size_t(r / kPanelRows) * panels_[size_t(panel)].bytes, 0);
  active_ = {&body_.back()};
  for (int i = 0; i <= repeats; i++) {
    const double start = now();
    pool_.run(*this, {tiles_of(*active_[0])});
    const double end = now();
    read_weights();
    if (i == 0) continue;
    seconds.push_back(end - start);
    reads.push_back(now() - end);
  }
  step_ = nullptr;
}

size_t Program::read_weights() {
  constexpr size_t kPiece = size_t(256) << 10;
  struct Reading final : Pool::Job {
    const Kernels* k = nullptr;
    std::vector<std::pair<const uint8_t*, size_t>> pieces;
    void run(int, int tile, int) override {
      const auto& [data, bytes] = pieces[size_t(tile)];
      k->read(data, bytes);
    }
  } reading;
  reading.k = &k_;
  size_t total = 0;
  std::vector<bool> seen(weights_.size());
  for (const std::vector<Phase>* list : {&body_, &head_})
    for (const Phase& p : *list) {
      if (p.kind != Phase::Kind::GEMM && p.kind != Phase::Kind::GATED) continue;
      for (const Segment& s : p.segments) {
        if (seen[size_t(s.weight)]) continue;
        seen[size_t(s.weight)] = true;
        const Weight& w = weights_[size_t(s.weight)];
        const size_t bytes = size_t(w.blocks) * w.stride;
        for (size_t at = 0; at < bytes; at += kPiece)
          reading.pieces.emplace_back(w.data + at, std::min(kPiece, bytes - at));
        total += bytes;
      }
    }
  pool_.run(reading, {int(reading.pieces.size())});
  return total;
}

}  // namespace steppe
