// How the work of a step is cut into tiles. What a tile is changes no bit, so all of this is chosen for
// speed.

#include <algorithm>

#include "program.h"

namespace steppe {

// The way in which a phase of attention is cut, a new one if there is none yet.
int Program::geometry_of(const Phase& p, bool selected) {
  const LayerSpec& spec = layers_[size_t(p.layer)];
  for (size_t i = 0; i < geometries_.size(); i++) {
    const Geometry& g = geometries_[i];
    if (g.num_heads == p.num_heads && g.kv_heads == spec.kv_heads &&
        g.head_dim == spec.head_dim && g.window == spec.window && g.selected == selected)
      return int(i);
  }
  geometries_.push_back(
      {p.num_heads, spec.kv_heads, spec.head_dim, spec.window, selected, {}});
  return int(geometries_.size()) - 1;
}

const std::vector<Program::Item>& Program::items_of(const Phase& p) const {
  const bool selected = p.tail && selecting_;
  return geometries_[size_t(selected ? p.selected_geometry : p.geometry)].items;
}

void Program::plan_attention() {
  size_t partials = 0;
  int tiles = 0;
  runs_.clear();
  for (int s = 0; s < step_->sequences; s++) {
    const int begin = step_->query_start[s], count = step_->query_start[s + 1] - begin;
    if (count > 0) runs_.push_back({s, begin, count, step_->context_len[s] - count});
  }
  for (Geometry& g : geometries_)
    if (!g.selected) plan_attention(g, &partials, &tiles);
  if (selecting_) {
    select_runs();
    for (Geometry& g : geometries_)
      if (g.selected) plan_attention(g, &partials, &tiles);
  }
  if (partials_.size() < partials) partials_.resize(partials);
  if (tiles > parts_capacity_) {
    parts_.reset(new std::atomic<int>[size_t(tiles)] {});
    parts_capacity_ = tiles;
  }
}

// One geometry's tiles for `runs_`. What a tile is, and whether it is cut into parts, changes no
// bit: see AttentionTile. So both are chosen for speed.
void Program::plan_attention(Geometry& g, size_t* partials, int* tiles) {
  g.items.clear();
  const int shared = g.num_heads / g.kv_heads;
  const int heads = std::min(shared, kAttentionRows);
  const int tokens = kAttentionRows / heads;
  int64_t work = 0;
  auto cost = [](const Item& i) { return int64_t(i.end_block - i.first_block) * i.count * i.heads; };
  for (const Run& run : runs_) {
    // Head by head, so that a thread's tiles share the keys and values that its cache holds.
    for (int kv = 0; kv < g.kv_heads; kv++)
      for (int h = kv * shared; h < (kv + 1) * shared; h += heads)
        for (int at = 0; at < run.count; at += tokens) {
          const int count = std::min(tokens, run.count - at), position = run.position + at;
          g.items.push_back({run.sequence, run.row + at, count, position, h,
                             std::min(heads, (kv + 1) * shared - h), kv,
                             first_block_of(position, g.window), end_block_of(position, count), -1,
                             1, 0});
          work += cost(g.items.back());
        }
  }
  if (pool_.threads() == 1) return;
  // A tile that is much of all there is to do is cut, so that every thread gets its share.
  const int64_t share = work / (4 * pool_.threads());
  std::vector<Item> whole;
  whole.swap(g.items);
  size_t at = 0;
  int tile = 0;
  for (const Item& w : whole) {
    const int rows = w.count * w.heads, blocks = w.end_block - w.first_block;
    const int each = int(std::max<int64_t>(1, share / rows));
    if (blocks <= each) {
      g.items.push_back(w);
      continue;
    }
    for (int block = w.first_block; block < w.end_block; block += each) {
      Item part = w;
      part.first_block = block;
      part.end_block = std::min(block + each, w.end_block);
      part.tile = tile;
      part.parts = (blocks + each - 1) / each;
      part.partials = at;
      g.items.push_back(part);
    }
    tile++;
    at += size_t(blocks) * size_t(rows) * partial_floats(g.head_dim);
  }
  // Phases run one after another and use the same memory.
  *partials = std::max(*partials, at);
  *tiles = std::max(*tiles, tile);
}

// How many of all the column blocks of a product's matrices a tile takes.
int Program::unit_blocks(int blocks) const {
  return std::clamp(blocks / (pool_.threads() * 8), 1, kMostBlocks);
}

int Program::unit_blocks(const Phase& p) const {
  int blocks = 0;
  for (const Segment& s : p.segments) blocks += weights_[size_t(s.weight)].blocks;
  return unit_blocks(blocks);
}

// How many tiles a matrix is cut into for up to kChunkPanels panels. Where column blocks are read
// several at a time, a tile takes as many from each part of the matrix.
int Program::units_of(const Weight& w, const Phase& p, int rows) const {
  const int unit = unit_blocks(p);
  const Streams* streams = streams_of(k_, w.format, rows);
  if (!streams) return (w.blocks + unit - 1) / unit;
  const int each = std::max(1, unit / streams->count);
  return (stream_blocks(w, *streams) + each - 1) / each;
}

// A panel, or half of one where that gives another thread something. Less would have two threads
// write to one line of a panel all the time.
int Program::rows_per_tile(int rows) const {
  return rows <= kPanelRows && pool_.threads() > 1 ? kPanelRows / 2 : kPanelRows;
}

int Program::tiles_of(const Phase& p) const {
  const int rows = rows_of(p), panels = panels_of(rows);
  if (rows == 0) return 0;
  switch (p.kind) {
    case Phase::Kind::MICROS: return (rows + rows_per_tile(rows) - 1) / rows_per_tile(rows);
    case Phase::Kind::GEMM: {
      int units = 0;
      for (const Segment& s : p.segments) units += units_of(weights_[size_t(s.weight)], p, rows);
      return units * ((panels + kChunkPanels - 1) / kChunkPanels);
    }
    case Phase::Kind::GATED: {
      const int groups = (weights_[size_t(p.segments[0].weight)].n + kGroup - 1) / kGroup;
      // Of gate and of up half of the streams each.
      if (const Streams* streams = gated_streams(p, rows))
        return (groups + streams->count / 2 - 1) / (streams->count / 2);
      return groups * ((panels + kChunkPanels - 1) / kChunkPanels);
    }
    case Phase::Kind::ATTENTION: return int(items_of(p).size());
    case Phase::Kind::SELECT: return selecting_ ? 1 : 0;
    case Phase::Kind::SAMPLE: return rows;
    default: return expert_tiles(p);
  }
  return 0;
}

}  // namespace steppe
