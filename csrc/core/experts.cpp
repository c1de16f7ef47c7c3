// A mixture of experts, grouped: the rows of a step that chose an expert go through it together, so its
// weights are read once however many they are. Five phases: the router's choice for each row; who is in
// which expert's group; the groups' rows as panels; gate, up and activation; down, weighted and summed.
//
// What a row gets is the same to the bit whatever the company: the kernels see to that in a product,
// and its experts' outputs are added in the order of the experts' numbers.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "demand.h"
#include "program.h"

namespace steppe {

namespace {

// Panels that `pairs` rows in at most `experts` groups may take: each group's last one may be short.
size_t most_panels(size_t pairs, size_t experts) {
  return std::min(pairs, pairs / kPanelRows + std::min(pairs, experts));
}

// From the router's outputs to the `top_k` likeliest experts, by rising number, and their shares.
void choose(float* chances, int experts, int top_k, bool normalize, std::vector<int>& order,
            int* chosen, float* shares) {
  float top = chances[0], total = 0.0f;
  for (int e = 1; e < experts; e++) top = std::max(top, chances[e]);
  for (int e = 0; e < experts; e++) total += chances[e] = std::exp(chances[e] - top);
  for (int e = 0; e < experts; e++) chances[e] /= total;
  for (int e = 0; e < experts; e++) order[size_t(e)] = e;
  // A NaN is below every number here, and of equals the first counts, so that the order is one.
  std::partial_sort(order.begin(), order.begin() + top_k, order.begin() + experts,
                    [&](int a, int b) {
                      const bool no_a = std::isnan(chances[a]), no_b = std::isnan(chances[b]);
                      if (no_a != no_b) return no_b;
                      if (!no_a && chances[a] != chances[b]) return chances[a] > chances[b];
                      return a < b;
                    });
  std::sort(order.begin(), order.begin() + top_k);
  float sum = 0.0f;
  for (int i = 0; i < top_k; i++) sum += chances[order[size_t(i)]];
  for (int i = 0; i < top_k; i++) {
    chosen[i] = order[size_t(i)];
    shares[i] = normalize ? chances[chosen[i]] / sum : chances[chosen[i]];
  }
}

}  // namespace

// Checks a mixture, makes room for it and cuts it into its phases.
void Program::add_experts(Phase p, std::vector<Phase>& list) {
  demand(p.q >= 0 && p.q < int(slots_.size()) && p.out >= 0 && p.out < int(slots_.size()) &&
             p.q != p.out,
         "no such slot");
  const Slot &in = slots_[size_t(p.q)], &out = slots_[size_t(p.out)];
  demand(in.domain == p.domain && out.domain == p.domain && in.width == out.width,
         "a slot has another shape");
  const Weight& router = weights_.at(size_t(p.router));
  demand(router.k == in.width && p.segments.size() == 3 * size_t(router.n),
         "the router does not fit its experts");
  demand(p.top_k > 0 && p.top_k <= router.n, "there are not that many experts");
  const Weight& first = weights_.at(size_t(p.segments[0].weight));
  const Form form = layout_of(first.format).form;
  const Form down_form = layout_of(weights_.at(size_t(p.segments[2].weight)).format).form;
  for (size_t i = 0; i < p.segments.size(); i += 3) {
    const Weight& gate = weights_.at(size_t(p.segments[i].weight));
    const Weight& up = weights_.at(size_t(p.segments[i + 1].weight));
    const Weight& down = weights_.at(size_t(p.segments[i + 2].weight));
    demand(gate.k == in.width && up.k == in.width && up.n == first.n && gate.n == first.n &&
               down.k == first.n && down.n == in.width,
           "an expert has another shape");
    demand(layout_of(gate.format).form == form && layout_of(up.format).form == form &&
               layout_of(down.format).form == down_form,
           "the experts of a layer are stored in different kinds of types");
  }
  for (Scratch& s : scratch_) {
    s.chances.resize(std::max(s.chances.size(),
                              round_up(size_t(router.n), kColumns) * size_t(kPanelRows)));
    s.chosen.resize(std::max(s.chosen.size(), size_t(router.n)));
    s.panel.resize(std::max(s.panel.size(), panel_bytes(layout_of(router.format).form,
                                                        size_t(router.k))));
  }
  Mixture m;
  m.domain = p.domain;
  m.top_k = p.top_k;
  m.experts = router.n;
  m.in_bytes = panel_bytes(form, size_t(in.width));
  m.mid_bytes = panel_bytes(down_form, size_t(first.n));
  mixtures_.push_back(m);
  for (Phase::Kind kind : {Phase::Kind::ROUTE, Phase::Kind::GROUP, Phase::Kind::GATHER,
                           Phase::Kind::EXPERTS_IN, Phase::Kind::EXPERTS_OUT}) {
    p.kind = kind;
    p.label = timing_.label(label_of(p));
    list.push_back(p);
  }
}

// One set of buffers serves all layers: they run one after another.
void Program::reserve_experts(int tokens, int rows) {
  size_t pairs = 0, experts = 0, in = 0, mid = 0;
  for (const Mixture& m : mixtures_) {
    const size_t n = size_t(m.domain == Domain::TOKENS ? tokens : rows) * size_t(m.top_k);
    const size_t panels = most_panels(n, size_t(m.experts));
    pairs = std::max(pairs, n);
    experts = std::max(experts, size_t(m.experts));
    in = std::max(in, panels * m.in_bytes);
    mid = std::max(mid, panels * m.mid_bytes);
  }
  Routing& r = routing_;
  r.chosen.resize(pairs);
  r.shares.resize(pairs);
  r.pairs.resize(pairs);
  r.starts.resize(experts + 1);
  r.active.reserve(experts);
  r.panels.resize(most_panels(pairs, experts));
  r.in = Block(in);
  r.mid = Block(mid);
}

int Program::expert_tiles(const Phase& p) const {
  const int rows = rows_of(p), experts = weights_[size_t(p.router)].n;
  const int pairs = rows * p.top_k;
  switch (p.kind) {
    case Phase::Kind::ROUTE: return panels_of(rows);
    case Phase::Kind::GROUP: return 1;
    case Phase::Kind::GATHER: return int(most_panels(size_t(pairs), size_t(experts)));
    case Phase::Kind::EXPERTS_IN: {
      const int inner = weights_[size_t(p.segments[0].weight)].n;
      return std::min(pairs, experts) * ((inner + kGroup - 1) / kGroup);
    }
    default: {
      const int blocks = weights_[size_t(p.segments[2].weight)].blocks;
      const int unit = unit_blocks(blocks);
      return (blocks + unit - 1) / unit;
    }
  }
}

void Program::run_route(const Phase& p, int tile, int thread) {
  Scratch& s = scratch_[size_t(thread)];
  const Slot& in = slots_[size_t(p.q)];
  const Weight& w = weights_[size_t(p.router)];
  const int first = tile * kPanelRows, rows = std::min(kPanelRows, rows_of(p) - first);
  const size_t stride = round_up(size_t(w.n), kColumns);
  k_.pack(layout_of(w.format).form, in.data + size_t(first) * in.stride, in.stride, rows, 0, w.k,
          w.k, s.panel.data(), 0);
  for (int b = 0; b < w.blocks; b++)
    k_.tile[int(w.format)](w.data + size_t(b) * w.stride, w.supers, s.panel.data(), rows,
                           s.chances.data() + b * kColumns, stride, nullptr, nullptr, 0,
                           std::min(kColumns, w.n - b * kColumns));
  for (int r = 0; r < rows; r++) {
    const size_t at = size_t(first + r) * size_t(p.top_k);
    choose(s.chances.data() + size_t(r) * stride, w.n, p.top_k, p.normalize, s.chosen,
           routing_.chosen.data() + at, routing_.shares.data() + at);
  }
}

// Sorts the pairs of a row and an expert by expert, rows in their order, and cuts them into panels.
void Program::run_group(const Phase& p) {
  Routing& r = routing_;
  const int experts = weights_[size_t(p.router)].n, pairs = rows_of(p) * p.top_k;
  std::fill(r.starts.begin(), r.starts.begin() + experts + 1, 0);
  for (int i = 0; i < pairs; i++) r.starts[size_t(r.chosen[size_t(i)]) + 1]++;
  for (int e = 0; e < experts; e++) r.starts[size_t(e) + 1] += r.starts[size_t(e)];
  r.active.clear();
  r.panel_count = 0;
  for (int e = 0; e < experts; e++) {
    const int start = r.starts[size_t(e)], end = r.starts[size_t(e) + 1];
    if (start == end) continue;
    r.active.push_back({e, r.panel_count, 0});
    for (int at = start; at < end; at += kPanelRows)
      r.panels[size_t(r.panel_count++)] = {at, std::min(kPanelRows, end - at)};
    r.active.back().panels = r.panel_count - r.active.back().first_panel;
  }
  // Filling moves each start to its group's end, which is the next one's start.
  for (int i = 0; i < pairs; i++) r.pairs[size_t(r.starts[size_t(r.chosen[size_t(i)])]++)] = i;
}

void Program::run_gather(const Phase& p, int tile) {
  const Routing& r = routing_;
  if (tile >= r.panel_count) return;
  const Slot& in = slots_[size_t(p.q)];
  const Weight& gate = weights_[size_t(p.segments[0].weight)];
  const Form form = layout_of(gate.format).form;
  const Routing::Panel panel = r.panels[size_t(tile)];
  uint8_t* to = r.in.data() + size_t(tile) * panel_bytes(form, size_t(gate.k));
  for (int i = 0; i < panel.rows; i++) {
    const int row = r.pairs[size_t(panel.first + i)] / p.top_k;
    k_.pack(form, in.data + size_t(row) * in.stride, in.stride, 1, 0, gate.k, gate.k, to, i);
  }
}

void Program::run_experts_in(const Phase& p, int tile, int thread) {
  const Routing& r = routing_;
  const int inner = weights_[size_t(p.segments[0].weight)].n;
  const int groups = (inner + kGroup - 1) / kGroup;
  const size_t at = size_t(tile / groups);
  if (at >= r.active.size()) return;
  const Routing::Group group = r.active[at];
  const Segment* expert = p.segments.data() + 3 * group.expert;
  const Weight &gate = weights_[size_t(expert[0].weight)], &up = weights_[size_t(expert[1].weight)];
  const Weight& down = weights_[size_t(expert[2].weight)];
  const Form form = layout_of(down.format).form;
  const size_t in_bytes = panel_bytes(layout_of(gate.format).form, size_t(gate.k));
  const size_t mid_bytes = panel_bytes(form, size_t(inner));
  const int column = tile % groups * kGroup, columns = std::min(kGroup, inner - column);
  Scratch& s = scratch_[size_t(thread)];
  // Only a group's last panel is not full.
  const int end = group.first_panel + group.panels;
  const int group_rows = (group.panels - 1) * kPanelRows + r.panels[size_t(end - 1)].rows;
  const bool many = many_of(k_, gate.format, group_rows) && many_of(k_, up.format, group_rows);
  const int step = many ? kGatedPanels : 1;
  for (int i = group.first_panel; i < end; i += step) {
    const int rows =
        std::min(step * kPanelRows, group_rows - (i - group.first_panel) * kPanelRows);
    gate_and_up({&gate, &up}, {nullptr, nullptr}, column, r.in.data() + size_t(i) * in_bytes,
                in_bytes, rows, many, 0, s);
    for (int row = 0; row < rows; row++)
      k_.gated(p.act, s.gate.data() + row * kGroup, s.up.data() + row * kGroup,
               s.act.data() + row * kGroup, columns);
    for (int row = 0; row < rows; row += kPanelRows)
      k_.pack(form, s.act.data() + row * kGroup, kGroup, std::min(kPanelRows, rows - row), column,
              column + columns, inner, r.mid.data() + size_t(i + row / kPanelRows) * mid_bytes, 0);
  }
}

// A range of output columns for all experts, one after another: nobody else adds to these.
void Program::run_experts_out(const Phase& p, int tile, int thread) {
  const Routing& r = routing_;
  const Slot& out = slots_[size_t(p.out)];
  const Weight& any = weights_[size_t(p.segments[2].weight)];
  const int unit = unit_blocks(any.blocks);
  const int first = tile * unit, last = std::min(any.blocks, first + unit);
  const int column = first * kColumns, end = std::min(any.n, last * kColumns);
  for (int row = 0; row < rows_of(p); row++)
    std::fill(out.data + size_t(row) * out.stride + column,
              out.data + size_t(row) * out.stride + end, 0.0f);
  float* product = scratch_[size_t(thread)].act.data();
  for (const Routing::Group& group : r.active) {
    const Weight& w = weights_[size_t(p.segments[size_t(3 * group.expert + 2)].weight)];
    const size_t bytes = panel_bytes(layout_of(w.format).form, size_t(w.k));
    for (int b = first; b < last; b++) {
      const int columns = std::min(kColumns, w.n - b * kColumns);
      for (int i = group.first_panel; i < group.first_panel + group.panels; i++) {
        const Routing::Panel panel = r.panels[size_t(i)];
        k_.tile[int(w.format)](w.data + size_t(b) * w.stride, w.supers,
                               r.mid.data() + size_t(i) * bytes, panel.rows, product, kColumns,
                               nullptr, nullptr, 0, columns);
        for (int j = 0; j < panel.rows; j++) {
          const int pair = r.pairs[size_t(panel.first + j)];
          const float share = r.shares[size_t(pair)];
          float* to = out.data + size_t(pair / p.top_k) * out.stride + b * kColumns;
          const float* from = product + j * kColumns;
          for (int c = 0; c < columns; c++) to[c] += share * from[c];
        }
      }
    }
  }
}

}  // namespace steppe
