// ForwardSignature: the parameters and the result of a module's forward, as a type; a handle has
// the same forward. Next: shard.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <type_traits>

namespace torch::nn {
class SequentialImpl;
}

namespace tessera {

namespace detail {

template <class R, class C, class... Args>
R (*deduce_forward(R (C::*)(Args...)))(Args...);
template <class R, class C, class... Args>
R (*deduce_forward(R (C::*)(Args...) const))(Args...);

template <class M>
concept HasOneForward = requires { deduce_forward(&M::forward); };

template <class M>
struct DeducedForward {
  using type = void();  // ForwardSignature has said why
};
template <HasOneForward M>
struct DeducedForward<M> {
  using type = std::remove_pointer_t<decltype(deduce_forward(&M::forward))>;
};

}  // namespace detail

/// The signature of M's forward. Specialize it, before fully_shard is called, for a module whose
/// forward is a template or overloaded: `template <> struct tessera::ForwardSignature<MyImpl> {
/// using type = at::Tensor(at::Tensor); };`
template <class M>
struct ForwardSignature {
  static_assert(detail::HasOneForward<M>,
                "fully_shard: expected a module with one public forward. Where it is overloaded or "
                "a template, say which one is meant, before fully_shard: template <> struct "
                "tessera::ForwardSignature<MyImpl> { using type = at::Tensor(at::Tensor); };");
  /// R(Args...) of M::forward.
  using type = typename detail::DeducedForward<M>::type;
};
/// A Sequential takes and returns one tensor.
template <>
struct ForwardSignature<torch::nn::SequentialImpl> {
  /// Tensor to tensor.
  using type = at::Tensor(at::Tensor);
};

}  // namespace tessera
