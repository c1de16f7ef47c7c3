// Building a program: weights, buffers and phases, each checked once so that a step need not.

#include "program.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "demand.h"
#include "pack.h"
#include "packed.h"

namespace steppe {

Program::Program(const Kernels& kernels, int threads, int vocab, int max_positions)
    : k_(kernels), pool_(threads), vocab_(vocab), max_positions_(max_positions),
      scratch_(size_t(pool_.threads())) {
  demand(vocab > 0 && max_positions > 0, "vocabulary and positions are at least 1");
  for (Scratch& s : scratch_)
    for (std::vector<float>* v : {&s.gate, &s.up, &s.act})
      v->resize(size_t(kGatedPanels * kPanelRows) * kGroup);
  sample_.kind = Phase::Kind::SAMPLE;
  sample_.domain = Domain::ROWS;
  sample_.label = timing_.label(label_of(sample_));
  select_.kind = Phase::Kind::SELECT;
  select_.tail = true;
  select_.label = timing_.label(label_of(select_));
}

Program::~Program() = default;

int Program::add_weight(const std::string& type, const uint8_t* data, size_t bytes, int n, int k,
                        const int64_t* order, const std::string& quantize) {
  const SourceType* source = source_type(type);
  if (!source) throw std::invalid_argument("weights of type " + type + " are not supported");
  demand(n > 0 && k > 0 && k % source->elements == 0, "a row is no whole number of blocks");
  const size_t stored = size_t(n) * (size_t(k) / size_t(source->elements)) * size_t(source->bytes);
  demand(bytes == stored, "the data do not have the size of their type and shape");
  if (order)
    for (int i = 0; i < n; i++)
      demand(order[i] >= 0 && order[i] < n, "row_order points outside the rows");
  const SourceType* target = quantize_target(*source, quantize, k);
  Weight w = weight_of(target ? target->format : source->format, n, k);
  uint8_t* out = arena_.take(bytes_of(w));
  w.data = out;
  demand(pack_matrix(pool_, *source, target, data, order, w, out), "a scale is not a finite number");
  weights_.push_back(w);
  return int(weights_.size()) - 1;
}

int Program::add_vector(const float* values, int n) {
  vectors_.emplace_back(values, values + n);
  return int(vectors_.size()) - 1;
}

int Program::add_rope(const float* inv_freq, int half, float scale) {
  Rope r;
  r.inv_freq.assign(inv_freq, inv_freq + half);
  r.scale = scale;
  ropes_.push_back(std::move(r));
  return int(ropes_.size()) - 1;
}

int Program::add_slot(int width, Domain domain) {
  demand(width > 0, "a value has no width");
  Slot s{};
  s.width = width;
  s.stride = round_up(size_t(width), 16);
  // Rows a multiple of 4 KiB apart would all fall into the same sets of the cache.
  if (s.stride % 1024 == 0) s.stride += 16;
  s.domain = domain;
  slots_.push_back(s);
  return int(slots_.size()) - 1;
}

int Program::add_panel(Form form, int k, Domain domain) {
  demand(k > 0, "a value has no width");
  panels_.push_back({form, k, panel_bytes(form, size_t(k)), domain, nullptr});
  return int(panels_.size()) - 1;
}

int Program::add_output(int width) {
  output_widths_.push_back(width);
  return int(output_widths_.size()) - 1;
}

// Every number in a phase is checked here, once, so that a step need not.
void Program::add_phase(Phase p) {
  auto slot = [&](int i) -> const Slot& {
    demand(i >= 0 && i < int(slots_.size()), "no such slot");
    return slots_[size_t(i)];
  };
  auto of_domain = [&](int i, int width) {
    const Slot& s = slot(i);
    demand(s.width == width && s.domain == p.domain, "a slot has another shape");
  };
  auto panel = [&](int i) -> const Panel& {
    demand(i >= 0 && i < int(panels_.size()), "no such panel");
    demand(panels_[size_t(i)].domain == p.domain, "a panel has another domain");
    return panels_[size_t(i)];
  };
  auto vector = [&](int i, int n) {
    demand(i >= 0 && i < int(vectors_.size()) && int(vectors_[size_t(i)].size()) == n,
           "a vector has another length");
  };
  auto layer = [&](int i) -> const LayerSpec& {
    demand(i >= 0 && i < int(layers_.size()), "no such layer");
    return layers_[size_t(i)];
  };
  for (const Micro& m : p.micros) {
    switch (m.kind) {
      case MicroKind::EMBED: {
        demand(p.domain == Domain::TOKENS, "tokens are embedded after take_rows");
        const Weight& w = weights_.at(size_t(m.a));
        demand(w.n == vocab_, "the embedding table has not one row for each token");
        of_domain(m.out, w.k);
        break;
      }
      case MicroKind::NORM:
        of_domain(m.a, slot(m.out).width);
        of_domain(m.out, slot(m.a).width);
        demand(m.c > 0 && slot(m.a).width % m.c == 0, "no whole heads");
        vector(m.b, slot(m.a).width / m.c);
        break;
      case MicroKind::ADD:
      case MicroKind::GATED:
        of_domain(m.b, slot(m.a).width);
        [[fallthrough]];
      case MicroKind::SOFTCAP:
        of_domain(m.a, slot(m.a).width);
        of_domain(m.out, slot(m.a).width);
        break;
      case MicroKind::TAKE:
        demand(p.domain == Domain::ROWS && slot(m.a).domain == Domain::TOKENS,
               "take_rows is from tokens to rows");
        of_domain(m.out, slot(m.a).width);
        break;
      case MicroKind::PACK:
        of_domain(m.a, panel(m.out).k);
        break;
      case MicroKind::ANGLES:
        demand(m.a >= 0 && m.a < int(ropes_.size()), "no such rope");
        break;
      case MicroKind::ROPE: {
        const LayerSpec& spec = layer(m.d);
        demand(p.domain == Domain::TOKENS, "keys are written after take_rows");
        of_domain(m.b, spec.kv_heads * spec.head_dim);
        of_domain(m.c, spec.kv_heads * spec.head_dim);
        of_domain(m.a, slot(m.out).width);
        of_domain(m.out, slot(m.a).width);
        demand(slot(m.a).width % spec.head_dim == 0, "no whole heads");
        demand(m.e >= 0 && m.e < int(ropes_.size()), "no such rope");
        demand(2 * int(ropes_[size_t(m.e)].inv_freq.size()) <= spec.head_dim,
               "the rotary embedding is wider than a head");
        break;
      }
      case MicroKind::CAPTURE:
        demand(m.out >= 0 && m.out < output_count(), "no such output");
        of_domain(m.a, output_width(m.out));
        demand(p.domain == Domain::TOKENS, "only values of all tokens can be returned");
        break;
    }
  }
  std::vector<Phase>& list = p.domain == Domain::TOKENS ? body_ : head_;
  if (p.kind == Phase::Kind::EXPERTS) return add_experts(std::move(p), list);
  for (const Segment& s : p.segments) {
    const Weight& w = weights_.at(size_t(s.weight));
    demand(panel(p.panel).k == w.k && panel(p.panel).form == layout_of(w.format).form,
           "a weight does not fit its input");
    if (p.kind == Phase::Kind::GEMM) of_domain(s.out, w.n);
    if (s.bias >= 0) vector(s.bias, w.n);
    if (s.add >= 0) of_domain(s.add, w.n);
  }
  if (p.kind == Phase::Kind::GATED) {
    demand(p.segments.size() == 2, "a gate needs two weights");
    const int n = weights_[size_t(p.segments[0].weight)].n;
    demand(weights_[size_t(p.segments[1].weight)].n == n, "gate and up differ in width");
    if (p.out >= 0) of_domain(p.out, n);
    if (p.out_panel >= 0) demand(panel(p.out_panel).k == n, "a panel has another width");
  }
  if (p.kind == Phase::Kind::ATTENTION) {
    const LayerSpec& spec = layer(p.layer);
    const int width = p.num_heads * spec.head_dim;
    demand(p.num_heads > 0 && p.num_heads % spec.kv_heads == 0, "query heads do not share evenly");
    of_domain(p.q, width);
    of_domain(p.out, width);
    p.geometry = geometry_of(p, false);
    for (Scratch& s : scratch_)
      if (s.attention.size() < attention_scratch(spec.head_dim))
        s.attention.resize(attention_scratch(spec.head_dim));
  }
  p.label = timing_.label(label_of(p));
  list.push_back(std::move(p));
}

// What a phase is called in timings: phases that do the same amount of the same work share a name.
std::string Program::label_of(const Phase& p) const {
  auto shape = [&] {
    int n = 0;
    for (const Segment& s : p.segments) n += weights_[size_t(s.weight)].n;
    const Weight& w = weights_[size_t(p.segments[0].weight)];
    return std::to_string(n) + " x " + std::to_string(w.k) + " " + format_name(w.format);
  };
  switch (p.kind) {
    case Phase::Kind::SELECT: return "rows";
    case Phase::Kind::MICROS: return p.domain == Domain::TOKENS ? "rows" : "rows of the head";
    case Phase::Kind::GEMM: return "linear " + shape();
    case Phase::Kind::GATED: return "gated " + shape();
    case Phase::Kind::ATTENTION: return "attention";
    case Phase::Kind::EXPERTS:
    case Phase::Kind::ROUTE:
    case Phase::Kind::GROUP:
    case Phase::Kind::GATHER: return "experts: routing";
    case Phase::Kind::EXPERTS_IN: return "experts: gate and up";
    case Phase::Kind::EXPERTS_OUT: return "experts: down";
    case Phase::Kind::SAMPLE: break;
  }
  return "sampling";
}

void Program::add_layer(LayerSpec s) {
  demand(s.group >= 0 && s.group < int(page_counts_.size()), "no such cache group");
  demand(s.kv_heads > 0 && s.head_dim > 0 && s.window >= 0, "a layer has no heads");
  demand(s.head_dim <= kMaxHeadDim, "a head has more than 1024 dimensions");
  layers_.push_back(s);
}

void Program::set_kv_type(KvType type) {
  demand(layers_.empty(), "layers have a cache type already");
  kv_type_ = type;
}

size_t Program::layer_page_bytes(int layer) const {
  const LayerSpec& s = layers_.at(size_t(layer));
  return size_t(s.kv_heads) * kv_layout(kv_type_, s.head_dim).head_bytes;
}

void Program::allocate_cache(const std::vector<int>& pages) {
  demand(pages.size() == page_counts_.size(), "not one page count for each cache group");
  for (int count : pages) demand(count > 0, "a cache group has no pages");
  caches_.clear();
  std::vector<Block> caches;
  for (size_t i = 0; i < layers_.size(); i++)
    caches.emplace_back(size_t(pages[size_t(layers_[i].group)]) * layer_page_bytes(int(i)));
  caches_ = std::move(caches);
  page_counts_ = pages;
}

uint8_t* Program::page_of(int layer, int32_t page) const {
  demand(layer >= 0 && size_t(layer) < caches_.size(), "no cache has been allocated");
  demand(page >= 0 && page < page_counts_[size_t(layers_[size_t(layer)].group)],
         "the cache has no such page");
  return caches_[size_t(layer)].data() + size_t(page) * layer_page_bytes(layer);
}

void Program::read_pages(int layer, const int32_t* pages, size_t count, uint8_t* out) const {
  const size_t bytes = layer_page_bytes(layer);
  for (size_t i = 0; i < count; i++)
    std::memcpy(out + i * bytes, page_of(layer, pages[i]), bytes);
}

void Program::write_pages(int layer, const int32_t* pages, size_t count, const uint8_t* from) {
  const size_t bytes = layer_page_bytes(layer);
  for (size_t i = 0; i < count; i++)
    std::memcpy(page_of(layer, pages[i]), from + i * bytes, bytes);
}

void Program::embedding_row(int weight, int row, float* out) const {
  unpack_row(weights_.at(size_t(weight)), row, out);
}

}  // namespace steppe
