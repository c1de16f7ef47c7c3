// What the tiles of a step's phases do: the running half of Program.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "pack.h"
#include "program.h"

namespace steppe {

namespace {

// While a column block computes, the next one arrives. With fewer rows than this the reads are the
// work: they then run this far ahead of themselves, past the ends of pages where a processor's own
// fetching stops. On a busy Xeon a step of one row on one thread took 0.80 times as long with 4 KB as
// with none, 0.88 with 2 and 0.83 with 8.
constexpr int kPrefetchRows = 5;
constexpr size_t kAheadBytes = 4096;

// What a product of `rows` rows with a column block fetches meanwhile. It may lie past the matrix,
// where mostly the next one does; asking for what is no memory at all does nothing.
const uint8_t* ahead_of(const Weight& w, int block, int next, int rows) {
  if (rows < kPrefetchRows) return w.data + size_t(block) * w.stride + kAheadBytes;
  return next < w.blocks ? w.data + size_t(next) * w.stride : nullptr;
}

}  // namespace

void Program::run_phase(const Phase& p, int tile, int thread) {
  switch (p.kind) {
    case Phase::Kind::MICROS: run_micros(p, tile); break;
    case Phase::Kind::GEMM: run_gemm(p, tile); break;
    case Phase::Kind::GATED: run_gated(p, tile, thread); break;
    case Phase::Kind::ATTENTION: run_attention(p, tile, thread); break;
    case Phase::Kind::EXPERTS: break;  // never in a list: it is cut into these
    case Phase::Kind::ROUTE: run_route(p, tile, thread); break;
    case Phase::Kind::GROUP: run_group(p); break;
    case Phase::Kind::GATHER: run_gather(p, tile); break;
    case Phase::Kind::EXPERTS_IN: run_experts_in(p, tile, thread); break;
    case Phase::Kind::EXPERTS_OUT: run_experts_out(p, tile, thread); break;
    case Phase::Kind::SELECT: run_select(); break;
    case Phase::Kind::SAMPLE: run_sample(tile, thread); break;
  }
}

void Program::run_micros(const Phase& p, int tile) {
  const int rows = rows_of(p), per = rows_per_tile(rows);
  const int r0 = tile * per, r1 = std::min(rows, r0 + per);
  for (const Micro& m : p.micros) run_micro(p, m, r0, r1);
}

void Program::run_micro(const Phase& phase, const Micro& m, int r0, int r1) {
  auto row = [&](int slot, int r) {
    const Slot& s = slots_[size_t(slot)];
    return s.data + size_t(r) * s.stride;
  };
  auto width = [&](int slot) { return slots_[size_t(slot)].width; };
  switch (m.kind) {
    case MicroKind::EMBED:
      for (int r = r0; r < r1; r++) {
        float* out = row(m.out, r);
        unpack_row(weights_[size_t(m.a)], step_->token_ids[r], out);
        if (m.f != 1.0f)
          for (int i = 0; i < width(m.out); i++) out[i] *= m.f;
      }
      break;
    case MicroKind::NORM:
      for (int r = r0; r < r1; r++)
        k_.rms_norm(row(m.a, r), vectors_[size_t(m.b)].data(), row(m.out, r), width(m.a), m.c, m.f);
      break;
    case MicroKind::ADD:
      for (int r = r0; r < r1; r++) k_.add(row(m.a, r), row(m.b, r), row(m.out, r), width(m.a));
      break;
    case MicroKind::GATED:
      for (int r = r0; r < r1; r++)
        k_.gated(Act(m.c), row(m.a, r), row(m.b, r), row(m.out, r), width(m.a));
      break;
    case MicroKind::SOFTCAP:
      for (int r = r0; r < r1; r++) k_.softcap(row(m.a, r), row(m.out, r), width(m.a), m.f);
      break;
    case MicroKind::TAKE:
      for (int r = r0; r < r1; r++)
        std::memcpy(row(m.out, r), row(m.a, row_in_tail(step_->logit_rows[chunk_start_ + r])),
                    size_t(width(m.a)) * sizeof(float));
      break;
    case MicroKind::PACK: {
      const Panel& p = panels_[size_t(m.out)];
      k_.pack(p.form, row(m.a, r0), slots_[size_t(m.a)].stride, r1 - r0, 0, p.k, p.k,
              p.data + size_t(r0 / kPanelRows) * p.bytes, r0 % kPanelRows);
      break;
    }
    case MicroKind::ANGLES: {
      Rope& p = ropes_[size_t(m.a)];
      const size_t half = p.inv_freq.size();
      for (int r = r0; r < r1; r++)
        for (size_t i = 0; i < half; i++) {
          const float angle = float(step_->positions[r]) * p.inv_freq[i];
          p.cosine[size_t(r) * half + i] = std::cos(angle) * p.scale;
          p.sine[size_t(r) * half + i] = std::sin(angle) * p.scale;
        }
      break;
    }
    case MicroKind::ROPE: run_rope(m, r0, r1); break;
    case MicroKind::CAPTURE:
      for (size_t i = 0; i < step_->outputs.size(); i++) {
        if (step_->outputs[i] != m.out) continue;
        const size_t n = size_t(width(m.a));
        if (!step_->hidden_rows) {
          for (int r = r0; r < r1; r++)
            std::memcpy(step_->hidden[i] + size_t(r) * n, row(m.a, r), n * sizeof(float));
        } else {
          for (int j = 0; j < step_->hidden_count; j++) {
            const int token = step_->hidden_rows[j];
            const int r = phase.tail ? row_in_tail(token) : token;
            if (r >= r0 && r < r1)
              std::memcpy(step_->hidden[i] + size_t(j) * n, row(m.a, r), n * sizeof(float));
          }
        }
      }
      break;
  }
}

void Program::run_rope(const Micro& m, int r0, int r1) {
  const LayerSpec& spec = layers_[size_t(m.d)];
  const Rope& rope = ropes_[size_t(m.e)];
  const int half = int(rope.inv_freq.size()), dim = spec.head_dim;
  const size_t head_bytes = kv_layout(kv_type_, dim).head_bytes;
  const size_t page_bytes = head_bytes * size_t(spec.kv_heads);
  const Slot &q = slots_[size_t(m.a)], &k = slots_[size_t(m.b)], &v = slots_[size_t(m.c)];
  const Slot& queries = slots_[size_t(m.out)];
  const auto write = k_.write_kv[int(kv_type_)];
  float rotated[kMaxHeadDim];
  for (int r = r0; r < r1; r++) {
    const float* cosine = rope.cosine + size_t(r) * size_t(half);
    const float* sine = rope.sine + size_t(r) * size_t(half);
    k_.rope(q.data + size_t(r) * q.stride, cosine, sine,
            queries.data + size_t(r) * queries.stride, q.width / dim, dim, half);
    const int64_t slot = step_->groups[size_t(spec.group)].slots[r];
    uint8_t* page = caches_[size_t(m.d)].data() + size_t(slot / kPageTokens) * page_bytes;
    for (int h = 0; h < spec.kv_heads; h++, page += head_bytes) {
      const size_t at = size_t(h) * size_t(dim);
      k_.rope(k.data + size_t(r) * k.stride + at, cosine, sine, rotated, 1, dim, half);
      write(rotated, v.data + size_t(r) * v.stride + at, dim, page, int(slot % kPageTokens));
    }
  }
}

void Program::run_gemm(const Phase& p, int tile) {
  const int rows = rows_of(p), panels = panels_of(rows);
  int units = 0;
  for (const Segment& s : p.segments) units += units_of(weights_[size_t(s.weight)], p, rows);
  const int chunk = tile / units;
  int at = tile % units;
  const Segment* s = p.segments.data();
  for (;; s++) {
    const int here = units_of(weights_[size_t(s->weight)], p, rows);
    if (at < here) break;
    at -= here;
  }
  const Weight& w = weights_[size_t(s->weight)];
  const Panel& x = panels_[size_t(p.panel)];
  const Slot& out = slots_[size_t(s->out)];
  const float* bias = bias_of(*s);
  const Slot* add = s->add >= 0 ? &slots_[size_t(s->add)] : nullptr;
  const size_t add_stride = add ? add->stride : 0;
  const int unit = unit_blocks(p);
  const int first = chunk * kChunkPanels, last = std::min(panels, first + kChunkPanels);
  const int here = std::min(rows, last * kPanelRows) - first * kPanelRows;
  auto block_at = [&](int b, size_t r) {
    const int column = b * kColumns;
    return ColumnBlock{w.data + size_t(b) * w.stride, out.data + r * out.stride + column,
                       bias ? bias + column : nullptr,
                       add ? add->data + r * add->stride + column : nullptr,
                       std::min(kColumns, w.n - column)};
  };
  if (const Streams* streams = streams_of(k_, w.format, rows)) {
    const int length = stream_blocks(w, *streams), each = std::max(1, unit / streams->count);
    for (int b = at * each; b < std::min(length, (at + 1) * each); b++) {
      ColumnBlock blocks[kStreams];
      int count = 0;
      for (int i = b; i < w.blocks; i += length) blocks[count++] = block_at(i, 0);
      streams->run(blocks, count, w.supers, x.data, rows, out.stride, add_stride);
    }
    return;
  }
  const auto kernel = k_.tile_ahead[int(w.format)];
  const int end = std::min(w.blocks, (at + 1) * unit);
  if (const auto many = many_of(k_, w.format, here)) {
    ColumnBlock blocks[kMostBlocks];
    for (int b = at * unit; b < end; b++)
      blocks[b - at * unit] = block_at(b, size_t(first) * kPanelRows);
    many(blocks, end - at * unit, w.supers, x.data + size_t(first) * x.bytes, x.bytes, here,
         out.stride, add_stride);
    return;
  }
  for (int b = at * unit; b < end; b++) {
    const uint8_t* next = ahead_of(w, b, b + 1, rows);
    for (int panel = first; panel < last; panel++) {
      const int r = panel * kPanelRows;
      const ColumnBlock o = block_at(b, size_t(r));
      kernel(o.w, panel == first ? next : nullptr, w.supers, x.data + size_t(panel) * x.bytes,
             std::min(kPanelRows, rows - r), o.out, out.stride, o.bias, o.add, add_stride,
             o.columns);
    }
  }
}

// Gate and up of `rows` rows and the columns from `column` on, at most a group of them, into the
// thread's scratch: of one panel, or with `many` of up to kGatedPanels. `ahead`: the rows of the step,
// where the product is to fetch what they make worth fetching, or 0.
void Program::gate_and_up(const Weight* const (&weights)[2], const float* const (&biases)[2],
                          int column, const uint8_t* panels, size_t panel_bytes, int rows,
                          bool many, int ahead, Scratch& s) {
  const int columns = std::min(kGroup, weights[0]->n - column);
  constexpr int kBlocks = kGroup / kColumns;
  ColumnBlock blocks[2 * kBlocks];
  int count = 0;
  const bool alike = weights[0]->format == weights[1]->format;
  const Streams* streams = alike ? streams_of(k_, weights[0]->format, rows) : nullptr;
  for (int i = 0; i < 2; i++) {
    const Weight& w = *weights[i];
    const float* bias = biases[i] ? biases[i] + column : nullptr;
    float* to = i == 0 ? s.gate.data() : s.up.data();
    for (int c = 0; c < columns; c += kColumns)
      blocks[count++] = {w.data + size_t((column + c) / kColumns) * w.stride, to + c,
                         bias ? bias + c : nullptr, nullptr, std::min(kColumns, columns - c)};
    if (i == 0 && alike && (streams || many)) continue;  // both at once
    if (streams) {
      for (int j = 0; 2 * j < count; j++) {
        const ColumnBlock both[2] = {blocks[j], blocks[count / 2 + j]};
        streams->run(both, 2, w.supers, panels, rows, kGroup, 0);
      }
    } else if (many) {
      k_.many[int(w.format)](blocks, count, w.supers, panels, panel_bytes, rows, kGroup, 0);
    } else {
      for (int j = 0; j < count; j++) {
        const ColumnBlock& block = blocks[j];
        const int at = column / kColumns + j;
        k_.tile_ahead[int(w.format)](
            block.w, ahead > 0 ? ahead_of(w, at, at + kBlocks, ahead) : nullptr, w.supers, panels,
            rows, block.out, kGroup, block.bias, nullptr, 0, block.columns);
      }
    }
    count = 0;
  }
}

void Program::run_gated(const Phase& p, int tile, int thread) {
  const int rows = rows_of(p), panels = panels_of(rows);
  const Weight& gate = weights_[size_t(p.segments[0].weight)];
  const Weight& up = weights_[size_t(p.segments[1].weight)];
  if (gated_streams(p, rows)) return run_gated_streams(p, tile, thread);
  const int groups = (gate.n + kGroup - 1) / kGroup;
  const int chunk = tile / groups, column = tile % groups * kGroup;
  const Panel& x = panels_[size_t(p.panel)];
  Scratch& s = scratch_[size_t(thread)];
  const int first = chunk * kChunkPanels, last = std::min(panels, first + kChunkPanels);
  const int here = std::min(rows, last * kPanelRows) - first * kPanelRows;
  const bool many = many_of(k_, gate.format, here) && many_of(k_, up.format, here);
  const int step = many ? kGatedPanels : 1;
  for (int panel = first; panel < last; panel += step) {
    const int r = panel * kPanelRows, count = std::min(step * kPanelRows, rows - r);
    gate_and_up({&gate, &up}, {bias_of(p.segments[0]), bias_of(p.segments[1])}, column,
                x.data + size_t(panel) * x.bytes, x.bytes, count, many, panel == first ? rows : 0,
                s);
    finish_gated(p, column, r, count, s.gate.data(), s.up.data(), s.act.data());
  }
}

// The rows from `row`, the first of a panel, of a group of columns: rows of kGroup floats are activated
// and go where the phase wants them.
void Program::finish_gated(const Phase& p, int column, int row, int rows, const float* gate,
                           const float* up, float* act) {
  const int columns = std::min(kGroup, weights_[size_t(p.segments[0].weight)].n - column);
  for (int i = 0; i < rows; i++) {
    const size_t at = size_t(i) * kGroup;
    k_.gated(p.act, gate + at, up + at, act + at, columns);
    if (p.out >= 0) {
      const Slot& o = slots_[size_t(p.out)];
      std::memcpy(o.data + size_t(row + i) * o.stride + column, act + at,
                  size_t(columns) * sizeof(float));
    }
  }
  if (p.out_panel < 0) return;
  const Panel& o = panels_[size_t(p.out_panel)];
  for (int i = 0; i < rows; i += kPanelRows)
    k_.pack(o.form, act + size_t(i) * kGroup, kGroup, std::min(kPanelRows, rows - i), column,
            column + columns, o.k, o.data + size_t((row + i) / kPanelRows) * o.bytes, 0);
}

// The streams by which gate and up are read for so many rows, where more than one group of columns is read
// at a time.
const Streams* Program::gated_streams(const Phase& p, int rows) const {
  const Format gate = weights_[size_t(p.segments[0].weight)].format;
  const Format up = weights_[size_t(p.segments[1].weight)].format;
  const Streams* streams = gate == up ? streams_of(k_, gate, rows) : nullptr;
  return streams && streams->count > 2 ? streams : nullptr;
}

// Groups of columns of gate and up that lie apart, the same columns of all at a time.
void Program::run_gated_streams(const Phase& p, int tile, int thread) {
  const int rows = rows_of(p), length = tiles_of(p);
  const Weight& gate = weights_[size_t(p.segments[0].weight)];
  const Panel& x = panels_[size_t(p.panel)];
  Scratch& s = scratch_[size_t(thread)];
  const Streams& streams = *gated_streams(p, rows);
  // Of each group that is read, in the thread's scratch.
  constexpr size_t kRoom = size_t(kStreamRows) * kGroup;
  for (int c = 0; c < kGroup; c += kColumns) {
    ColumnBlock blocks[kStreams];
    int count = 0;
    size_t room = 0;
    for (int column = tile * kGroup + c; column < gate.n; column += length * kGroup, room += kRoom)
      for (int i = 0; i < 2; i++) {
        const Segment& segment = p.segments[size_t(i)];
        const Weight& w = weights_[size_t(segment.weight)];
        const float* bias = bias_of(segment);
        float* to = (i == 0 ? s.gate.data() : s.up.data()) + room;
        blocks[count++] = {w.data + size_t(column / kColumns) * w.stride, to + c,
                           bias ? bias + column : nullptr, nullptr,
                           std::min(kColumns, w.n - column)};
      }
    streams.run(blocks, count, gate.supers, x.data, rows, kGroup, 0);
  }
  size_t room = 0;
  for (int column = tile * kGroup; column < gate.n; column += length * kGroup, room += kRoom)
    finish_gated(p, column, 0, rows, s.gate.data() + room, s.up.data() + room, s.act.data());
}

void Program::run_attention(const Phase& p, int tile, int thread) {
  const LayerSpec& spec = layers_[size_t(p.layer)];
  const Item& item = items_of(p)[size_t(tile)];
  const Step::Table& table = step_->groups[size_t(spec.group)];
  const int s = item.sequence;
  AttentionTile t{};
  t.q = slots_[size_t(p.q)].data;
  t.q_stride = slots_[size_t(p.q)].stride;
  t.out = slots_[size_t(p.out)].data;
  t.out_stride = slots_[size_t(p.out)].stride;
  t.keys = {caches_[size_t(p.layer)].data(), layer_page_bytes(p.layer),
            table.pages + size_t(s) * size_t(table.width)};
  t.first_token = item.token;
  t.first_position = item.position;
  t.tokens = item.count;
  t.head = item.head;
  t.heads = item.heads;
  t.kv_head = item.kv_head;
  t.head_dim = spec.head_dim;
  t.window = spec.window;
  t.scale = p.scale;
  t.softcap = p.softcap;
  t.first_block = item.first_block;
  t.end_block = item.end_block;
  t.partials = item.tile >= 0 ? partials_.data() + item.partials : nullptr;
  float* scratch = scratch_[size_t(thread)].attention.data();
  k_.attention[int(kv_type_)](t, scratch);
  if (item.tile >= 0) {
    // Who finishes the last part puts them together.
    std::atomic<int>& done = parts_[size_t(item.tile)];
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < item.parts) return;
    done.store(0, std::memory_order_relaxed);
    k_.merge(t, scratch);
  }
  if (p.out_panel >= 0) {
    // A head is whole groups, so its rows are packed here and no one else writes these bytes.
    const Panel& o = panels_[size_t(p.out_panel)];
    const int k0 = item.head * spec.head_dim, k1 = k0 + item.heads * spec.head_dim;
    for (int r = item.token; r < item.token + item.count; r++)
      k_.pack(o.form, t.out + size_t(r) * t.out_stride + k0, 0, 1, k0, k1, o.k,
              o.data + size_t(r / kPanelRows) * o.bytes, r % kPanelRows);
  }
}

void Program::run_sample(int tile, int thread) {
  Step& s = *step_;
  const int row = chunk_start_ + tile;
  const Slot& slot = slots_[size_t(logits_slot_)];
  const float* logits = slot.data + size_t(tile) * slot.stride;
  SampleScratch& scratch = scratch_[size_t(thread)].sampling;
  const RowExtras none;
  const int token =
      sample_row(k_, logits, vocab_, s.sample[row],
                 s.extras.empty() ? none : s.extras[size_t(row)], scratch);
  s.sampled[row] = token;
  const int wanted = s.sample[row].num_logprobs;
  if (wanted >= 0 && s.logprob) {
    const size_t at = size_t(row) * size_t(s.top_width);
    row_logprobs(k_, logits, vocab_, token, std::min(wanted, vocab_), s.logprob + row,
                 s.top_ids + at, s.top_logprobs + at, scratch);
  }
  if (s.logits)
    std::memcpy(s.logits + size_t(row) * size_t(vocab_), logits, size_t(vocab_) * sizeof(float));
}

}  // namespace steppe
