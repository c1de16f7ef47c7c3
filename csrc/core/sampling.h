// How a row of logits becomes a token. The rules and their order are those that
// `steppe.backends.sampling_rules` states in numpy.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace steppe {

struct SampleRow {  // SAMPLE_ROW of steppe.backends.base
  float temperature, top_p, min_p;
  float repetition_penalty, presence_penalty, frequency_penalty;
  int32_t top_k, num_logprobs;
  uint64_t seed;
  int64_t position;
  int32_t sequence_index, purpose, target, reserved;
};
static_assert(sizeof(SampleRow) == 64);

struct RowExtras {
  const int32_t* bias_ids = nullptr;
  const float* bias_values = nullptr;
  int bias_count = 0;
  const int32_t* history_ids = nullptr;
  const int32_t* history_counts = nullptr;
  const uint8_t* history_in_prompt = nullptr;
  int history_count = 0;
  const int32_t* banned = nullptr;
  int banned_count = 0;
  const uint32_t* mask = nullptr;
};

struct SampleScratch {
  std::vector<float> work, near, tops, sorted_tops;
  std::vector<double> weights, sums;
  std::vector<int32_t> ids;
  std::vector<int32_t> allowed;  // by the mask of the row at hand
};

// Whether what a row names is in the vocabulary; throws std::invalid_argument.
void check_row(const SampleRow& row, const RowExtras& extras, int vocab);

// The token of a row, -1 if there is nothing to choose.
int sample_row(const Kernels& k, const float* logits, int vocab, const SampleRow& row,
               const RowExtras& extras, SampleScratch& scratch);

// Log probabilities of raw logits: of `token` (if not negative), and the `count` likeliest, falling,
// equals by rising id.
void row_logprobs(const Kernels& k, const float* logits, int vocab, int token, int count,
                  float* logprob, int32_t* top_ids, float* top_logprobs, SampleScratch& scratch);

double uniform(uint64_t seed, int32_t sequence_index, int64_t position, int32_t purpose);

}  // namespace steppe
