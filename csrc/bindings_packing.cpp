// The Python face of packing: what engine directories are made of.
#include <cstring>

#include "bindings.h"
#include "core/pack.h"
#include "core/packed.h"
#include "core/quantize.h"

namespace steppe::bindings {

namespace {

const SourceType& source_of(const std::string& type) {
  const SourceType* source = source_type(type);
  demand(source != nullptr, "unknown type");
  return *source;
}

// The bytes of a packed matrix, as a program computes on them.
Numpy<uint8_t> packed(const std::string& type, In<uint8_t, 1> data, int n, int k,
                      std::optional<In<int64_t, 1>> order, const std::string& quantize) {
  const SourceType& source = source_of(type);
  demand(n > 0 && k > 0 && k % source.elements == 0 &&
             data.size() == size_t(n) * size_t(k) / size_t(source.elements) * size_t(source.bytes),
         "data do not fit the shape");
  if (order) {
    demand(order->size() == size_t(n), "row_order has another length");
    for (size_t i = 0; i < order->size(); i++)
      demand(order->data()[i] >= 0 && order->data()[i] < n, "row_order outside the rows");
  }
  const SourceType* target = quantize_target(source, quantize, k);
  const Weight w = weight_of(target ? target->format : source.format, n, k);
  uint8_t* out;
  Numpy<uint8_t> result = array<uint8_t>({bytes_of(w)}, &out);
  nb::gil_scoped_release released;
  Pool pool(default_threads());
  demand(pack_matrix(pool, source, target, data.data(), order ? order->data() : nullptr, w, out),
         "a scale is not a finite number");
  return result;
}

}  // namespace

void add_packing(nb::module_& m) {
  m.attr("LAYOUT") = kPackedLayout;
  m.def("format_of",
        [](const std::string& type) { return std::string(format_name(source_of(type).format)); });
  m.def("checksum", [](In<uint8_t, 1> data) { return checksum(data.data(), data.size()); },
        "data"_a.noconvert());
  m.def("packed", &packed, "type"_a, "data"_a.noconvert(), "n"_a, "k"_a, "order"_a.none(),
        "quantize"_a = "");
  // Blocks of `target` for float rows, before they are packed: what tests compare.
  m.def("quantized",
        [](const std::string& target, In<float, 2> x) {
          const SourceType* type = quantize_target(source_of("F32"), target, count(x.shape(1)));
          demand(type != nullptr, "name a type");
          const size_t bytes = x.shape(1) / kGroup * size_t(type->bytes);
          uint8_t* out;
          Numpy<uint8_t> result = array<uint8_t>({x.shape(0) * bytes}, &out);
          for (size_t r = 0; r < x.shape(0); r++)
            quantize_row(type->format, x.data() + r * x.shape(1), int(x.shape(1)), out + r * bytes);
          return result;
        },
        "target"_a, "x"_a.noconvert());
}

}  // namespace steppe::bindings
