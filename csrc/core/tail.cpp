// The tail of a step: what comes after its last keys and values have been written. Nobody will ever
// read more of it than the rows whose logits or outputs the step is asked for, so it runs on these
// alone: a step's last attention, projections, norms. A long prompt saves nearly a layer, and a chunk
// that wants nothing runs no tail at all.
//
// A row's bits depend on no other row and not on its place, so this changes none.

#include <algorithm>
#include <cstring>

#include "program.h"

namespace steppe {

// Finds where the tail begins. Phases may have been added since it was last looked for.
void Program::find_tail() {
  size_t begin = 0;
  for (size_t i = 0; i < body_.size(); i++)
    for (const Micro& m : body_[i].micros)
      if (m.kind == MicroKind::ROPE) begin = i + 1;
  std::vector<bool> kept(slots_.size());
  if (!is_tail(begin, kept)) begin = body_.size();
  tail_slots_.clear();
  tail_outputs_.assign(output_widths_.size(), false);
  for (size_t i = 0; i < body_.size(); i++) {
    Phase& p = body_[i];
    p.tail = i >= begin;
    if (!p.tail) continue;
    if (p.kind == Phase::Kind::ATTENTION) p.selected_geometry = geometry_of(p, true);
    for (const Micro& m : p.micros)
      if (m.kind == MicroKind::CAPTURE) tail_outputs_[size_t(m.out)] = true;
  }
  if (begin < body_.size())
    for (size_t i = 0; i < slots_.size(); i++)
      if (kept[i]) tail_slots_.push_back(int(i));
  tail_begin_ = begin;
  tail_known_ = body_.size() + head_.size();
}

// Whether all from `begin` on can run on fewer rows; and which slots it reads that were filled before.
// It must not ask for a token's number or position, which are known by the row in the whole step, nor
// read a panel of before, whose rows do not move.
bool Program::is_tail(size_t begin, std::vector<bool>& kept) const {
  std::vector<bool> written(slots_.size()), packed(panels_.size());
  bool movable = true;
  auto read = [&](int slot) {
    if (slot >= 0 && !written[size_t(slot)]) kept[size_t(slot)] = true;
  };
  auto write = [&](int slot) {
    if (slot >= 0) written[size_t(slot)] = true;
  };
  auto look = [&](const Phase& p) {
    for (const Micro& m : p.micros) {
      switch (m.kind) {
        case MicroKind::EMBED:
        case MicroKind::ANGLES:
        case MicroKind::ROPE: movable = false; break;
        case MicroKind::ADD:
        case MicroKind::GATED: read(m.b); [[fallthrough]];
        case MicroKind::NORM:
        case MicroKind::SOFTCAP:
        case MicroKind::TAKE:
          read(m.a);
          write(m.out);
          break;
        case MicroKind::PACK:
          read(m.a);
          packed[size_t(m.out)] = true;
          break;
        case MicroKind::CAPTURE: read(m.a); break;
      }
    }
    if (p.panel >= 0 && !packed[size_t(p.panel)]) movable = false;
    read(p.q);
    if (p.kind == Phase::Kind::GEMM)
      for (const Segment& s : p.segments) {
        read(s.add);
        write(s.out);
      }
    write(p.out);
    if (p.out_panel >= 0) packed[size_t(p.out_panel)] = true;
  };
  for (size_t i = begin; i < body_.size(); i++) look(body_[i]);
  for (const Phase& p : head_) look(p);
  return movable;
}

// Which tokens this step's tail runs on. None are moved where it wants all of them.
void Program::select_rows() {
  const Step& s = *step_;
  bool outputs = false;
  for (int o : s.outputs) outputs = outputs || tail_outputs_[size_t(o)];
  selecting_ = tail_begin_ < body_.size() && s.tokens > 1 && !(outputs && !s.hidden_rows);
  if (!selecting_) return;
  place_.assign(size_t(s.tokens), -1);
  for (int i = 0; i < s.rows; i++) place_[size_t(s.logit_rows[i])] = 0;
  if (outputs)
    for (int i = 0; i < s.hidden_count; i++) place_[size_t(s.hidden_rows[i])] = 0;
  selected_.clear();
  for (int i = 0; i < s.tokens; i++) {
    if (place_[size_t(i)] < 0) continue;
    place_[size_t(i)] = int(selected_.size());
    selected_.push_back(i);
  }
  selecting_ = int(selected_.size()) < s.tokens;
}

// From the runs of the whole step to those of the selected tokens.
void Program::select_runs() {
  const std::vector<Run> whole = runs_;
  runs_.clear();
  size_t at = 0;
  for (const Run& w : whole)
    for (; at < selected_.size() && selected_[at] < w.row + w.count; at++) {
      const int token = selected_[at];
      if (!runs_.empty() && runs_.back().sequence == w.sequence && selected_[at - 1] == token - 1)
        runs_.back().count++;
      else
        runs_.push_back({w.sequence, int(at), 1, w.position + token - w.row});
    }
}

// Rows rise, so none is overwritten before it has moved.
void Program::run_select() {
  for (int slot : tail_slots_) {
    const Slot& s = slots_[size_t(slot)];
    if (s.domain != Domain::TOKENS) continue;
    for (size_t i = 0; i < selected_.size(); i++)
      if (selected_[i] != int(i))
        std::memcpy(s.data + i * s.stride, s.data + size_t(selected_[i]) * s.stride,
                    size_t(s.width) * sizeof(float));
  }
}

}  // namespace steppe
