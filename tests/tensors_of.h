// What a function gives, one tensor or several or a tuple of both, as one list.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>
#include <vector>

namespace tessera::results {

using Tensors = std::vector<at::Tensor>;

inline void add_to(Tensors& all, const at::Tensor& one) { all.push_back(one); }
inline void add_to(Tensors& all, const Tensors& more) {
  all.insert(all.end(), more.begin(), more.end());
}
template <class... Results>
void add_to(Tensors& all, const std::tuple<Results...>& results) {
  std::apply([&](const auto&... each) { (add_to(all, each), ...); }, results);
}

}  // namespace tessera::results
