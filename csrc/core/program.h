// A traced model as a list of phases over buffers, and the execution of one step.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "demand.h"
#include "kernels.h"
#include "memory.h"
#include "pool.h"
#include "sampling.h"
#include "timing.h"

namespace steppe {

// Panels of a GEMM tile: few enough for the activations to stay in the second-level cache.
constexpr int kChunkPanels = 32;
// Panels of which gate and up are computed at once where many rows are faster that way.
constexpr int kGatedPanels = 8;

inline int panels_of(int rows) { return (rows + kPanelRows - 1) / kPanelRows; }


enum class Domain : int { TOKENS, ROWS };  // [T, width], or [R, width] after take_rows

enum class MicroKind : int {
  EMBED,    // a: weight, out: slot, f: scale
  NORM,     // a: slot, b: vector, c: heads, out: slot, f: eps
  ADD,      // a, b: slots, out: slot
  GATED,    // a: gate, b: up, c: activation, out: slot
  SOFTCAP,  // a: slot, out: slot, f: cap
  TAKE,     // a: slot of TOKENS, out: slot of ROWS
  PACK,     // a: slot, out: panel
  ANGLES,   // a: rope
  ROPE,     // a: q slot, b: k slot, c: v slot, d: layer, e: rope, out: slot
  CAPTURE,  // a: slot, out: output number
};

struct Micro {
  MicroKind kind;
  int a = -1, b = -1, c = -1, d = -1, e = -1, out = -1;
  float f = 0.0f;
};

struct Segment {  // out = x W^T + bias + add
  int weight, bias, out, add;
};

struct Phase {
  enum class Kind {
    MICROS, GEMM, GATED, ATTENTION,
    EXPERTS, ROUTE, GROUP, GATHER, EXPERTS_IN, EXPERTS_OUT,  // the first is cut into the others
    SELECT, SAMPLE
  } kind;
  Domain domain = Domain::TOKENS;
  std::vector<Micro> micros;
  int panel = -1;                 // GEMM, GATED: the input
  std::vector<Segment> segments;  // GATED: gate and up
  Act act = Act::SILU;
  int out = -1, out_panel = -1;   // GATED, ATTENTION
  int q = -1, layer = -1, num_heads = 0;
  int geometry = -1;              // ATTENTION: set by add_phase,
  int selected_geometry = -1;     // and by find_tail: of selected rows
  float scale = 0.0f, softcap = 0.0f;
  // EXPERTS: from slot `q` to slot `out`; segments are the experts' gate, up and down, in threes.
  int router = -1, top_k = 0;
  bool normalize = false;
  int label = 0;                  // its kind in Timing
  bool tail = false;              // works on selected rows (tail.cpp)
};

struct LayerSpec {
  int group, kv_heads, head_dim, window;
};

// Everything of a step, checked by `Program::run` before anything is written.
struct Step {
  int tokens = 0, sequences = 0, rows = 0;
  const int32_t* token_ids = nullptr;
  const int32_t* positions = nullptr;
  const int32_t* query_start = nullptr;
  const int32_t* context_len = nullptr;
  struct Table {
    const int32_t* pages;
    int width;
    const int64_t* slots;
  };
  std::vector<Table> groups;
  const int32_t* logit_rows = nullptr;
  const SampleRow* sample = nullptr;
  std::vector<RowExtras> extras;      // empty, or one per row
  std::vector<int> outputs;           // numbers of wanted outputs
  const int32_t* hidden_rows = nullptr;
  int hidden_count = 0;
  // Results; where null, not wanted.
  int32_t* sampled = nullptr;
  float* logprob = nullptr;
  int32_t* top_ids = nullptr;
  float* top_logprobs = nullptr;
  int top_width = 0;
  float* logits = nullptr;            // [rows][vocab]
  std::vector<float*> hidden;         // one per entry of outputs
};

class Program : private Pool::Job {
 public:
  Program(const Kernels& kernels, int threads, int vocab, int max_positions);
  ~Program();

  // Building. All return the number of the new thing. Errors throw std::invalid_argument.
  int add_weight(const std::string& type, const uint8_t* data, size_t bytes, int n, int k,
                 const int64_t* order, const std::string& quantize = "");
  // A matrix that `pack_block` has written before, copied and checked (packed.cpp).
  int add_packed(const std::string& format, const uint8_t* data, size_t bytes, int n, int k,
                 uint64_t expected);
  int add_vector(const float* values, int n);
  int add_rope(const float* inv_freq, int half, float scale);
  int add_slot(int width, Domain domain);
  int add_panel(Form form, int k, Domain domain);
  int add_output(int width);
  void set_kv_type(KvType type);  // before the first layer
  void add_layer(LayerSpec spec);
  void add_phase(Phase phase);
  void set_logits(int slot) { logits_slot_ = slot; }
  void set_groups(int count) { page_counts_.assign(size_t(count), 0); }

  Form weight_form(int weight) const { return layout_of(weights_.at(size_t(weight)).format).form; }
  const Weight& weight(int i) const { return weights_.at(size_t(i)); }
  size_t layer_page_bytes(int layer) const;
  void allocate_cache(const std::vector<int>& pages);
  // Copies whole pages of a layer out of the cache or into it: `count` of layer_page_bytes each.
  void read_pages(int layer, const int32_t* pages, size_t count, uint8_t* out) const;
  void write_pages(int layer, const int32_t* pages, size_t count, const uint8_t* from);
  void embedding_row(int weight, int row, float* out) const;
  int output_width(int i) const { return output_widths_.at(size_t(i)); }
  int output_count() const { return int(output_widths_.size()); }
  int vocab() const { return vocab_; }
  size_t weight_bytes() const { return arena_.used(); }
  int max_rows() const { return kMaxRows; }
  Pool& pool() { return pool_; }
  const Kernels& kernels() const { return k_; }
  Timing& timing() { return timing_; }

  // For benchmarks: seconds of `repeats` multiplications of m rows of ones by a weight, and of as many
  // bare reads of it, by turns.
  void time_gemm(int weight, int m, int repeats, std::vector<double>& seconds,
                 std::vector<double>& reads, double (*now)());
  // For benchmarks: reads, and does no more, what a step of one row multiplies by, experts aside. Bytes.
  size_t read_weights();

  void check(const Step& step) const;  // throws std::invalid_argument
  void run(Step& step);
  // Logits of a row of the last step, until the next one begins. Only a step of at most max_rows()
  // keeps them.
  const float* kept_logits(int row) const {
    demand(row >= 0 && row < kept_rows_, "the logits of that row are not kept");
    const Slot& slot = slots_[size_t(logits_slot_)];
    return slot.data + size_t(row) * slot.stride;
  }
  // Between two steps, for whoever samples such a row again.
  SampleScratch& sample_scratch() { return scratch_[0].sampling; }

 private:
  static constexpr int kMaxRows = 64;  // rows of logits that exist at once

  struct Slot {
    int width;
    size_t stride;
    Domain domain;
    float* data = nullptr;
  };
  struct Panel {
    Form form;
    int k;
    size_t bytes;  // of one panel
    Domain domain;
    uint8_t* data = nullptr;
  };
  struct Rope {
    std::vector<float> inv_freq;
    float scale;
    float* cosine = nullptr;
    float* sine = nullptr;
  };
  struct Item {  // an attention tile (rows of one sequence, heads of one kv head), or a part of one
    int sequence, token, count, position, head, heads, kv_head;
    int first_block, end_block;
    int tile;         // of the tiles that are cut into parts, or -1
    int parts;        // of that tile
    size_t partials;  // where its own begin
  };
  struct Geometry {  // one way to cut a step's attention
    int num_heads, kv_heads, head_dim, window;
    bool selected;
    std::vector<Item> items;
  };
  struct Run {  // neighbouring tokens of one sequence, from a row and a position on
    int sequence, row, count, position;
  };
  struct Scratch {
    std::vector<float> attention, gate, up, act, chances;
    std::vector<uint8_t> panel;
    std::vector<int> chosen;
    SampleScratch sampling;
  };

  // A mixture of experts (experts.cpp).
  struct Mixture {
    Domain domain;
    int top_k, experts;
    size_t in_bytes, mid_bytes;  // of a panel of inputs, and of activations between the layers
  };
  struct Routing {  // who goes where in the mixture that runs now
    struct Panel {
      int first, rows;  // among the pairs
    };
    struct Group {
      int expert, first_panel, panels;
    };
    std::vector<int> chosen;    // [rows][top_k] experts of a row, by rising number
    std::vector<float> shares;  // [rows][top_k]
    std::vector<int> pairs;     // [rows * top_k] indices into both, by expert and then by row
    std::vector<int> starts;
    std::vector<Group> active;  // experts that somebody chose
    std::vector<Panel> panels;
    int panel_count = 0;
    Block in, mid;
  };

  void add_experts(Phase phase, std::vector<Phase>& list);
  void reserve_experts(int tokens, int rows);
  int expert_tiles(const Phase& phase) const;
  std::string label_of(const Phase& phase) const;
  void reserve(int tokens, int rows);
  int geometry_of(const Phase& phase, bool selected);
  const std::vector<Item>& items_of(const Phase& phase) const;
  void plan_attention();
  void plan_attention(Geometry& geometry, size_t* partials, int* tiles);
  void find_tail();
  bool is_tail(size_t begin, std::vector<bool>& kept) const;
  void select_rows();
  void select_runs();
  int tiles_of(const Phase& phase) const;
  void run(int phase, int tile, int thread) override;
  void run_phase(const Phase& phase, int tile, int thread);
  void run_micros(const Phase& phase, int tile);
  void run_micro(const Phase& phase, const Micro& m, int r0, int r1);
  void run_rope(const Micro& m, int r0, int r1);
  void run_gemm(const Phase& phase, int tile);
  void run_gated(const Phase& phase, int tile, int thread);
  void finish_gated(const Phase& phase, int column, int row, int rows, const float* gate,
                    const float* up, float* act);
  const Streams* gated_streams(const Phase& phase, int rows) const;
  void run_gated_streams(const Phase& phase, int tile, int thread);
  void gate_and_up(const Weight* const (&weights)[2], const float* const (&biases)[2], int column,
                   const uint8_t* panels, size_t panel_bytes, int rows, bool many, int ahead,
                   Scratch& scratch);
  void run_attention(const Phase& phase, int tile, int thread);
  void run_route(const Phase& phase, int tile, int thread);
  void run_group(const Phase& phase);
  void run_gather(const Phase& phase, int tile);
  void run_experts_in(const Phase& phase, int tile, int thread);
  void run_experts_out(const Phase& phase, int tile, int thread);
  void run_select();
  void run_sample(int tile, int thread);
  int rows_of(const Phase& p) const {
    if (p.domain == Domain::ROWS) return chunk_rows_;
    return p.tail && selecting_ ? int(selected_.size()) : step_->tokens;
  }
  // Where a token's row is in the tail.
  int row_in_tail(int token) const { return selecting_ ? place_[size_t(token)] : token; }
  const float* bias_of(const Segment& s) const {
    return s.bias >= 0 ? vectors_[size_t(s.bias)].data() : nullptr;
  }
  // How far apart the column blocks are that are read side by side.
  static int stream_blocks(const Weight& w, const Streams& s) {
    return (w.blocks + s.count - 1) / s.count;
  }
  int unit_blocks(int blocks) const;
  int unit_blocks(const Phase& phase) const;
  int units_of(const Weight& w, const Phase& phase, int rows) const;
  int rows_per_tile(int rows) const;

  const Kernels& k_;
  Pool pool_;
  const int vocab_, max_positions_;
  Arena arena_;
  std::vector<Weight> weights_;
  std::vector<std::vector<float>> vectors_;
  std::vector<Rope> ropes_;
  std::vector<Slot> slots_;
  std::vector<Panel> panels_;
  std::vector<LayerSpec> layers_;
  std::vector<int> output_widths_;
  std::vector<Phase> body_, head_;
  Phase select_{}, sample_{};
  size_t tail_begin_ = 0, tail_known_ = 0;  // among the body; how many phases it was found from
  std::vector<int> tail_slots_;             // what the tail reads of what was computed before it
  std::vector<bool> tail_outputs_;          // captured in it
  std::vector<Geometry> geometries_;
  std::vector<Mixture> mixtures_;
  Routing routing_;
  std::vector<float> partials_;                // of the tiles of one phase that are cut into parts
  std::unique_ptr<std::atomic<int>[]> parts_;  // how many parts of each are done; 0 between phases
  int parts_capacity_ = 0;
  KvType kv_type_ = KvType::BF16;
  std::vector<const Phase*> active_;
  std::vector<Scratch> scratch_;
  uint8_t* page_of(int layer, int32_t page) const;

  std::vector<Block> caches_;  // per layer
  std::vector<int> page_counts_;
  std::vector<Block> memory_;  // of slots, halves, panels, ropes
  int capacity_tokens_ = 0, capacity_rows_ = 0;
  int logits_slot_ = -1;
  // Of the step being run.
  Step* step_ = nullptr;
  int chunk_start_ = 0, chunk_rows_ = 0;
  int kept_rows_ = 0;  // of the last step, whose logits are still in their slot
  bool selecting_ = false;
  std::vector<int> selected_, place_;  // the tail's tokens, rising; and where each token is among them
  std::vector<Run> runs_;
  std::atomic<bool> failed_{false};
  Timing timing_;
};

}  // namespace steppe
