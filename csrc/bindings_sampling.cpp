// Sampling apart from a step: logits from anywhere, for tests, and again those of a program's last
// step.
#include "bindings.h"

#include <algorithm>
#include <limits>

#include "core/program.h"

namespace steppe::bindings {

namespace {

// Samples rows as a step would; `logits_of` says where each row's logits are.
template <class LogitsOf>
nb::tuple sample_each(const Kernels& kern, int vocab, LogitsOf logits_of, In<uint8_t, 2> rows,
                      const std::optional<std::vector<Row>>& extras, int top_width) {
  const size_t n = rows.shape(0), width = size_t(top_width);
  demand(rows.shape(1) == sizeof(SampleRow), "a sample row has another size");
  demand(!extras || extras->size() == n, "not one entry each");
  demand(top_width >= 0, "top_width is negative");
  int32_t *tokens, *ids;
  float *logprob, *tops;
  Numpy<int32_t> sampled = array<int32_t>({n}, &tokens);
  Numpy<float> logprobs = array<float>({n}, &logprob);
  Numpy<int32_t> top_ids = array<int32_t>({n, width}, &ids);
  Numpy<float> top_logprobs = array<float>({n, width}, &tops);
  std::fill(logprob, logprob + n, -std::numeric_limits<float>::infinity());
  std::fill(ids, ids + n * width, -1);
  std::fill(tops, tops + n * width, -std::numeric_limits<float>::infinity());
  SampleScratch scratch;
  const auto* row = reinterpret_cast<const SampleRow*>(rows.data());
  for (size_t i = 0; i < n; i++) {
    const float* x = logits_of(i);
    const RowExtras extra = extras ? extras_of((*extras)[i], vocab) : RowExtras{};
    check_row(row[i], extra, vocab);
    tokens[i] = sample_row(kern, x, vocab, row[i], extra, scratch);
    if (row[i].num_logprobs >= 0)
      row_logprobs(kern, x, vocab, tokens[i], std::min({row[i].num_logprobs, vocab, top_width}),
                   logprob + i, ids + i * width, tops + i * width, scratch);
  }
  return nb::make_tuple(sampled, logprobs, top_ids, top_logprobs);
}

nb::tuple sample(const std::string& isa, In<float, 2> logits, In<uint8_t, 2> rows,
                 std::optional<std::vector<Row>> extras, int top_width) {
  demand(rows.shape(0) == logits.shape(0), "not one row each");
  const size_t vocab = logits.shape(1);
  return sample_each(kernels(isa), count(vocab),
                     [&](size_t i) { return logits.data() + i * vocab; }, rows, extras, top_width);
}

nb::tuple resample(const Program& program, In<int32_t, 1> which, In<uint8_t, 2> rows,
                   std::optional<std::vector<Row>> extras, int top_width) {
  demand(rows.shape(0) == which.size(), "not one row each");
  return sample_each(program.kernels(), program.vocab(),
                     [&](size_t i) { return program.kept_logits(which.data()[i]); }, rows, extras,
                     top_width);
}

}  // namespace

void add_sampling(nb::module_& m) {
  m.def("sample", &sample, "isa"_a, "logits"_a, "rows"_a, "extras"_a.none(), "top_width"_a);
  m.def("resample", &resample, "program"_a, "which"_a.noconvert(), "rows"_a.noconvert(),
        "extras"_a.none(), "top_width"_a);
}

}  // namespace steppe::bindings
