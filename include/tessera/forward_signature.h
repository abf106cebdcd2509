// What a module's forward takes and returns, as a type: a handle has the same forward.
//
// Next: shard.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <type_traits>

namespace torch::nn {
class SequentialImpl;
}

namespace tessera {

/// The signature of M's forward. Specialize it for a module whose forward is a template or
/// overloaded: `template <> struct tessera::ForwardSignature<MyImpl> { using type =
/// at::Tensor(at::Tensor); };`
template <class M>
struct ForwardSignature {
  template <class R, class C, class... Args>
  static R (*deduce(R (C::*)(Args...)))(Args...);
  template <class R, class C, class... Args>
  static R (*deduce(R (C::*)(Args...) const))(Args...);
  using type = std::remove_pointer_t<decltype(deduce(&M::forward))>;
};
template <>
struct ForwardSignature<torch::nn::SequentialImpl> {
  using type = at::Tensor(at::Tensor);
};

}  // namespace tessera
