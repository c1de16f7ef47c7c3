// Sampling apart from a step: logits from anywhere, for tests, and again those of a program's last
// step.
#include "bindings.h"

#include <algorithm>
#include <limits>

#include "core/program.h"

namespace steppe::bindings {

namespace {

// Samples `n` rows as a step would; `logits_of` says where each row's logits are. With a negative
// `top_width` nothing is said about the tokens.
template <class LogitsOf>
nb::tuple sample_each(const Kernels& kern, int vocab, LogitsOf logits_of, const SampleRow* row, size_t n,
                      const std::optional<std::vector<Row>>& extras, int top_width,
                      SampleScratch& scratch) {
  demand(!extras || extras->size() == n, "not one entry each");
  const bool told = top_width >= 0;
  const size_t width = told ? size_t(top_width) : 0;
  int32_t *tokens, *ids = nullptr;
  float *logprob = nullptr, *tops = nullptr;
  Numpy<int32_t> sampled = array<int32_t>({n}, &tokens), top_ids;
  Numpy<float> logprobs, top_logprobs;
  if (told) {
    logprobs = array<float>({n}, &logprob);
    top_ids = array<int32_t>({n, width}, &ids);
    top_logprobs = array<float>({n, width}, &tops);
    std::fill(logprob, logprob + n, -std::numeric_limits<float>::infinity());
    std::fill(ids, ids + n * width, -1);
    std::fill(tops, tops + n * width, -std::numeric_limits<float>::infinity());
  }
  for (size_t i = 0; i < n; i++) {
    const float* x = logits_of(i);
    const RowExtras extra = extras ? extras_of((*extras)[i], vocab) : RowExtras{};
    check_row(row[i], extra, vocab);
    tokens[i] = sample_row(kern, x, vocab, row[i], extra, scratch);
    if (told && row[i].num_logprobs >= 0)
      row_logprobs(kern, x, vocab, tokens[i], std::min({row[i].num_logprobs, vocab, top_width}),
                   logprob + i, ids + i * width, tops + i * width, scratch);
  }
  if (!told) return nb::make_tuple(sampled);
  return nb::make_tuple(sampled, logprobs, top_ids, top_logprobs);
}

const SampleRow* rows_of(In<uint8_t, 2> rows) {
  demand(rows.shape(1) == sizeof(SampleRow), "a sample row has another size");
  return reinterpret_cast<const SampleRow*>(rows.data());
}

nb::tuple sample(const std::string& isa, In<float, 2> logits, In<uint8_t, 2> rows,
                 std::optional<std::vector<Row>> extras, int top_width) {
  demand(rows.shape(0) == logits.shape(0), "not one row each");
  demand(top_width >= 0, "top_width is negative");
  const size_t vocab = logits.shape(1);
  SampleScratch scratch;
  return sample_each(kernels(isa), count(vocab),
                     [&](size_t i) { return logits.data() + i * vocab; }, rows_of(rows),
                     rows.shape(0), extras, top_width, scratch);
}

nb::tuple resample(Program& program, In<int32_t, 1> which, In<uint8_t, 2> rows,
                   std::optional<std::vector<Row>> extras) {
  const size_t n = rows.shape(0);
  demand(n == which.size(), "not one row each");
  const SampleRow* row = rows_of(rows);
  int most = -1;
  for (size_t i = 0; i < n; i++) most = std::max(most, row[i].num_logprobs);
  return sample_each(program.kernels(), program.vocab(),
                     [&](size_t i) { return program.kept_logits(which.data()[i]); }, row, n, extras,
                     std::min(most, program.vocab()), program.sample_scratch());
}

}  // namespace

void add_sampling(nb::module_& m) {
  m.def("sample", &sample, "isa"_a, "logits"_a, "rows"_a, "extras"_a.none(), "top_width"_a);
  m.def("resample", &resample, "program"_a, "which"_a.noconvert(), "rows"_a.noconvert(),
        "extras"_a.none());
}

}  // namespace steppe::bindings
