// The Python face of the program: `steppe.backends.native._native`. Arrays are checked here (type,
// shape, contiguity) and in Program (ranges), so that no Python input can reach memory it should not.
#include "bindings.h"

#include <algorithm>

#include "core/program.h"

namespace {

using namespace steppe::bindings;
using steppe::Domain;
using steppe::Form;
using steppe::Micro;
using steppe::MicroKind;
using steppe::Phase;
using steppe::Program;

void run_step(Program& program, In<int32_t, 1> token_ids, In<int32_t, 1> positions,
              In<int32_t, 1> query_start, In<int32_t, 1> context_len,
              std::vector<In<int32_t, 2>> tables, std::vector<In<int64_t, 1>> slots,
              In<int32_t, 1> logit_rows, In<uint8_t, 2> sample,
              std::optional<std::vector<Row>> extras, std::vector<int> outputs,
              std::optional<In<int32_t, 1>> hidden_rows, Out<int32_t, 1> sampled,
              std::optional<Out<float, 1>> logprob, std::optional<Out<int32_t, 2>> top_ids,
              std::optional<Out<float, 2>> top_logprobs, std::optional<Out<float, 2>> logits,
              std::vector<Out<float, 2>> hidden) {
  steppe::Step s;
  s.tokens = count(token_ids.size());
  s.rows = count(logit_rows.size());
  demand(positions.size() == token_ids.size(), "positions and token_ids differ in length");
  demand(query_start.size() == context_len.size() + 1,
         "query_start and context_len differ in length");
  s.sequences = count(context_len.size());
  s.token_ids = token_ids.data();
  s.positions = positions.data();
  s.query_start = query_start.data();
  s.context_len = context_len.data();
  demand(tables.size() == slots.size(), "block_tables and slot_mappings differ in length");
  for (size_t g = 0; g < tables.size(); g++) {
    demand(tables[g].shape(0) == context_len.size(), "block_tables has not one row each sequence");
    demand(slots[g].size() == token_ids.size(), "slot_mappings has not one slot for each token");
    s.groups.push_back({tables[g].data(), count(tables[g].shape(1)), slots[g].data()});
  }
  s.logit_rows = logit_rows.data();
  demand(sample.shape(0) == logit_rows.size() && sample.shape(1) == sizeof(steppe::SampleRow),
         "not one sample row for each logit row");
  s.sample = reinterpret_cast<const steppe::SampleRow*>(sample.data());
  const int vocab = program.vocab();
  if (extras) {
    demand(extras->size() == logit_rows.size(), "not one entry for each logit row");
    for (const Row& row : *extras) s.extras.push_back(extras_of(row, vocab));
  }
  s.outputs = std::move(outputs);
  if (hidden_rows) {
    s.hidden_rows = hidden_rows->data();
    s.hidden_count = count(hidden_rows->size());
  }
  demand(hidden.size() == s.outputs.size(), "not one array for each output");
  for (size_t i = 0; i < hidden.size(); i++) {
    demand(s.outputs[i] >= 0 && s.outputs[i] < program.output_count(), "no such output");
    demand(hidden[i].shape(0) == (hidden_rows ? hidden_rows->size() : token_ids.size()) &&
               hidden[i].shape(1) == size_t(program.output_width(s.outputs[i])),
           "an output array has another shape");
    s.hidden.push_back(hidden[i].data());
  }
  demand(sampled.size() == logit_rows.size(), "sampled has another length");
  s.sampled = sampled.data();
  if (logprob) {
    demand(top_ids && top_logprobs && logprob->size() == logit_rows.size() &&
               top_ids->shape(0) == logit_rows.size() &&
               top_logprobs->shape(0) == logit_rows.size() &&
               top_ids->shape(1) == top_logprobs->shape(1),
           "logprob arrays have other shapes");
    s.logprob = logprob->data();
    s.top_ids = top_ids->data();
    s.top_logprobs = top_logprobs->data();
    s.top_width = count(top_ids->shape(1));
    for (int i = 0; i < s.rows; i++)
      demand(std::min(s.sample[i].num_logprobs, vocab) <= s.top_width, "top_ids is too narrow");
  }
  if (logits) {
    demand(logits->shape(0) == logit_rows.size() && logits->shape(1) == size_t(vocab),
           "logits has another shape");
    s.logits = logits->data();
  }
  nb::gil_scoped_release released;
  program.run(s);
}

using MicroTuple = std::tuple<int, int, int, int, int, int, int, float>;

void rows_phase(Program& program, int domain, const std::vector<MicroTuple>& micros) {
  Phase p{};
  p.kind = Phase::Kind::MICROS;
  p.domain = Domain(domain);
  for (const auto& [kind, a, b, c, d, e, out, f] : micros) {
    demand(kind >= 0 && kind <= int(MicroKind::CAPTURE), "no such operation");
    p.micros.push_back(Micro{MicroKind(kind), a, b, c, d, e, out, f});
  }
  program.add_phase(std::move(p));
}

using SegmentTuple = std::tuple<int, int, int, int>;

std::vector<steppe::Segment> segments_of(const std::vector<SegmentTuple>& tuples) {
  std::vector<steppe::Segment> out;
  for (const auto& [weight, bias, to, add] : tuples) out.push_back({weight, bias, to, add});
  return out;
}

}  // namespace

NB_MODULE(_native, m) {
  add_kernels(m);
  add_packing(m);
  nb::class_<Program>(m, "Program")
      .def("__init__",
           [](Program* self, const std::string& isa, int threads, int vocab, int max_positions) {
             new (self) Program(kernels(isa), threads, vocab, max_positions);
           },
           "isa"_a, "threads"_a, "vocab"_a, "max_positions"_a)
      .def_prop_ro("isa", [](Program& p) { return std::string(p.kernels().name); })
      .def_prop_ro("threads", [](Program& p) { return p.pool().threads(); })
      .def_prop_ro("weight_bytes", &Program::weight_bytes)
      .def_prop_ro("vocab", &Program::vocab)
      .def("output_width", &Program::output_width)
      .def("add_weight",
           [](Program& p, const std::string& type, In<uint8_t, 1> data, int n, int k,
              std::optional<In<int64_t, 1>> order, const std::string& quantize) {
             demand(!order || order->size() == size_t(n), "row_order has another length");
             nb::gil_scoped_release released;
             return p.add_weight(type, data.data(), data.size(), n, k,
                                 order ? order->data() : nullptr, quantize);
           },
           "type"_a, "data"_a.noconvert(), "n"_a, "k"_a, "order"_a.none(), "quantize"_a = "")
      .def("add_packed",
           [](Program& p, const std::string& format, In<uint8_t, 1> data, int n, int k,
              uint64_t checksum) {
             nb::gil_scoped_release released;
             return p.add_packed(format, data.data(), data.size(), n, k, checksum);
           },
           "format"_a, "data"_a.noconvert(), "n"_a, "k"_a, "checksum"_a)
      .def("add_vector", [](Program& p, In<float, 1> v) { return p.add_vector(v.data(), count(v.size())); })
      .def("add_rope",
           [](Program& p, In<float, 1> f, float scale) {
             return p.add_rope(f.data(), count(f.size()), scale);
           })
      .def("add_slot", [](Program& p, int w, int d) { return p.add_slot(w, Domain(d)); })
      .def("add_panel",
           [](Program& p, int form, int k, int d) {
             demand(form >= 0 && form <= 2, "no such form");
             return p.add_panel(Form(form), k, Domain(d));
           })
      .def("add_output", &Program::add_output)
      .def("set_groups", &Program::set_groups)
      .def("set_kv_dtype",
           [](Program& p, const std::string& name) { p.set_kv_type(kv_type(name)); })
      .def("add_layer",
           [](Program& p, int group, int heads, int dim, int window) {
             p.add_layer({group, heads, dim, window});
           })
      .def("set_logits", &Program::set_logits)
      .def("weight_form", [](Program& p, int w) { return int(p.weight_form(w)); })
      .def("rows_phase", &rows_phase)
      .def("gemm_phase",
           [](Program& p, int domain, int panel, const std::vector<SegmentTuple>& segments) {
             Phase phase{};
             phase.kind = Phase::Kind::GEMM;
             phase.domain = Domain(domain);
             phase.panel = panel;
             phase.segments = segments_of(segments);
             p.add_phase(std::move(phase));
           })
      .def("gated_phase",
           [](Program& p, int domain, int panel, const std::vector<SegmentTuple>& segments, int act,
              int out, int out_panel) {
             Phase phase{};
             phase.kind = Phase::Kind::GATED;
             phase.domain = Domain(domain);
             phase.panel = panel;
             phase.segments = segments_of(segments);
             phase.act = steppe::Act(act);
             phase.out = out;
             phase.out_panel = out_panel;
             p.add_phase(std::move(phase));
           })
      .def("attention_phase",
           [](Program& p, int q, int layer, int heads, float scale, float softcap, int out,
              int out_panel) {
             Phase phase{};
             phase.kind = Phase::Kind::ATTENTION;
             phase.q = q;
             phase.layer = layer;
             phase.num_heads = heads;
             phase.scale = scale;
             phase.softcap = softcap;
             phase.out = out;
             phase.out_panel = out_panel;
             p.add_phase(std::move(phase));
           })
      .def("experts_phase",
           [](Program& p, int domain, int router, const std::vector<std::tuple<int, int, int>>& experts,
              int top_k, bool normalize, int act, int from, int out) {
             Phase phase{};
             phase.kind = Phase::Kind::EXPERTS;
             phase.domain = Domain(domain);
             phase.router = router;
             for (const auto& [gate, up, down] : experts)
               for (int weight : {gate, up, down}) phase.segments.push_back({weight, -1, -1, -1});
             phase.top_k = top_k;
             phase.normalize = normalize;
             phase.act = steppe::Act(act);
             phase.q = from;
             phase.out = out;
             p.add_phase(std::move(phase));
           })
      .def("set_timing",
           [](Program& p, bool on) { p.timing().set(on, p.pool().threads()); })
      .def("timing",
           [](Program& p) {
             const steppe::Timing& t = p.timing();
             return std::make_tuple(t.steps(), t.wall(), t.busy());
           })
      .def("read_weights", &Program::read_weights, nb::call_guard<nb::gil_scoped_release>())
      .def("layer_page_bytes", &Program::layer_page_bytes)
      .def("allocate_cache", &Program::allocate_cache)
      .def("read_pages",
           [](const Program& p, int layer, In<int32_t, 1> pages) {
             const size_t bytes = p.layer_page_bytes(layer);
             uint8_t* out;
             Numpy<uint8_t> result = array<uint8_t>({pages.size(), bytes}, &out);
             p.read_pages(layer, pages.data(), pages.size(), out);
             return result;
           })
      .def("write_pages",
           [](Program& p, int layer, In<int32_t, 1> pages, In<uint8_t, 2> from) {
             demand(from.shape(0) == pages.size() && from.shape(1) == p.layer_page_bytes(layer),
                    "not one page of bytes for each page");
             p.write_pages(layer, pages.data(), pages.size(), from.data());
           })
      .def("embedding_table",
           [](Program& p, int weight) {
             const steppe::Weight& w = p.weight(weight);
             float* out;
             Numpy<float> result = array<float>({size_t(w.n), size_t(w.k)}, &out);
             for (int r = 0; r < w.n; r++) p.embedding_row(weight, r, out + size_t(r) * size_t(w.k));
             return result;
           })
      .def("run", &run_step, "token_ids"_a.noconvert(), "positions"_a.noconvert(),
           "query_start"_a.noconvert(), "context_len"_a.noconvert(), "tables"_a, "slots"_a,
           "logit_rows"_a.noconvert(), "sample"_a.noconvert(), "extras"_a.none(), "outputs"_a,
           "hidden_rows"_a.none(), "sampled"_a.noconvert(), "logprob"_a.noconvert().none(),
           "top_ids"_a.noconvert().none(), "top_logprobs"_a.noconvert().none(),
           "logits"_a.noconvert().none(), "hidden"_a.noconvert());
  add_sampling(m);
}
