// visit_tensors(): visits every tensor inside of the arguments or the result of a forward.
//
// It looks into optionals, pairs, tuples, vectors, arrays and maps, and into any type with a member
// `void visit_tensors(F&& f)` that calls f(at::Tensor&) for each of its tensors. Other types hold
// none. Next: shard.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tessera {

template <class T, class F>
void visit_tensors(T& value, F&& f);

namespace detail {

struct AnyTensorVisitor {
  void operator()(at::Tensor&) const {}
};

template <class T>
concept HasVisitTensors =
    requires(T& value, AnyTensorVisitor visitor) { value.visit_tensors(visitor); };

template <class T>
struct TensorVisit {
  template <class F>
  static void run(T& value, F& f) {
    if constexpr (HasVisitTensors<T>) value.visit_tensors(f);
  }
};
template <>
struct TensorVisit<at::Tensor> {
  template <class F>
  static void run(at::Tensor& value, F& f) {
    f(value);
  }
};
template <class T>
struct TensorVisit<std::optional<T>> {
  template <class F>
  static void run(std::optional<T>& value, F& f) {
    if (value) visit_tensors(*value, f);
  }
};
template <class Range>
struct RangeTensorVisit {
  template <class F>
  static void run(Range& range, F& f) {
    for (auto& element : range) visit_tensors(element, f);
  }
};
template <class T, class A>
struct TensorVisit<std::vector<T, A>> : RangeTensorVisit<std::vector<T, A>> {};
template <class A>
struct TensorVisit<std::vector<bool, A>> {
  template <class F>
  static void run(std::vector<bool, A>&, F&) {}
};
template <class T, std::size_t N>
struct TensorVisit<std::array<T, N>> : RangeTensorVisit<std::array<T, N>> {};
template <class Map>
struct MapTensorVisit {
  template <class F>
  static void run(Map& map, F& f) {
    for (auto& [key, value] : map) visit_tensors(value, f);
  }
};
template <class K, class T, class C, class A>
struct TensorVisit<std::map<K, T, C, A>> : MapTensorVisit<std::map<K, T, C, A>> {};
template <class K, class T, class H, class E, class A>
struct TensorVisit<std::unordered_map<K, T, H, E, A>>
    : MapTensorVisit<std::unordered_map<K, T, H, E, A>> {};
template <class... T>
struct TensorVisit<std::tuple<T...>> {
  template <class F>
  static void run(std::tuple<T...>& value, F& f) {
    std::apply([&f](auto&... elements) { (visit_tensors(elements, f), ...); }, value);
  }
};
template <class A, class B>
struct TensorVisit<std::pair<A, B>> {
  template <class F>
  static void run(std::pair<A, B>& value, F& f) {
    visit_tensors(value.first, f);
    visit_tensors(value.second, f);
  }
};

}  // namespace detail

/// Calls `f(at::Tensor&)` for each tensor in `value`; f may replace it.
template <class T, class F>
void visit_tensors(T& value, F&& f) {
  detail::TensorVisit<std::remove_const_t<T>>::run(value, f);
}

}  // namespace tessera
