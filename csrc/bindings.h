// What the Python faces of the kernels and of the program share: arrays in and out.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "core/demand.h"
#include "core/sampling.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace steppe::bindings {

template <typename T, int N>
using In = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <typename T, int N>
using Out = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Numpy = nb::ndarray<nb::numpy, T>;

using steppe::demand;

inline const steppe::Kernels& kernels(const std::string& isa) {
  const steppe::Kernels* k = isa.empty() ? steppe::best_kernels() : steppe::kernels_by_name(isa.c_str());
  if (!k) throw std::invalid_argument("no kernels for '" + isa + "' run on this machine");
  return *k;
}

template <typename T>
Numpy<T> array(std::vector<size_t> shape, T** data) {
  size_t n = 1;
  for (size_t s : shape) n *= s;
  T* p = new T[n ? n : 1]();
  *data = p;
  nb::capsule owner(p, [](void* x) noexcept { delete[] static_cast<T*>(x); });
  return Numpy<T>(p, shape.size(), shape.data(), owner);
}

inline int count(size_t n) {
  demand(n < (size_t(1) << 30), "an array is too large");
  return int(n);
}

using Row = std::tuple<std::optional<In<int32_t, 1>>, std::optional<In<float, 1>>,
                       std::optional<In<int32_t, 1>>, std::optional<In<int32_t, 1>>,
                       std::optional<In<bool, 1>>, std::optional<In<int32_t, 1>>,
                       std::optional<In<uint32_t, 1>>>;

inline steppe::RowExtras extras_of(const Row& row, int vocab) {
  steppe::RowExtras x;
  const auto& [bias_ids, bias_values, ids, counts, in_prompt, banned, mask] = row;
  if (bias_ids) {
    demand(bias_values && bias_values->size() == bias_ids->size(), "bias ids and values differ");
    x.bias_ids = bias_ids->data();
    x.bias_values = bias_values->data();
    x.bias_count = count(bias_ids->size());
  }
  if (ids) {
    demand(counts && in_prompt && counts->size() == ids->size() &&
               in_prompt->size() == ids->size(),
           "history arrays differ in length");
    x.history_ids = ids->data();
    x.history_counts = counts->data();
    x.history_in_prompt = reinterpret_cast<const uint8_t*>(in_prompt->data());
    x.history_count = count(ids->size());
  }
  if (banned) {
    x.banned = banned->data();
    x.banned_count = count(banned->size());
  }
  if (mask) {
    demand(mask->size() >= size_t(vocab + 31) / 32, "a mask is shorter than the vocabulary");
    x.mask = mask->data();
  }
  return x;
}

inline KvType kv_type(const std::string& name) {
  if (name == "bfloat16") return KvType::BF16;
  if (name == "float16") return KvType::F16;
  if (name == "int8") return KvType::INT8;
  throw std::invalid_argument("keys and values cannot be kept as " + name);
}

void add_kernels(nb::module_& m);  // single kernels, for tests and benchmarks
void add_packing(nb::module_& m);  // packed weights outside of a program
void add_sampling(nb::module_& m);  // after the program, which is an argument

}  // namespace steppe::bindings
