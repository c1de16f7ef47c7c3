// How the core refuses what it is given: a ValueError, once it reaches Python.
#pragma once

#include <stdexcept>

namespace steppe {

inline void demand(bool true_, const char* what) {
  if (!true_) throw std::invalid_argument(what);
}

}  // namespace steppe
