// What transitions are made of: a forward and the backward that belongs to it. Private to
// parallel/.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>

#include <string>
#include <string_view>
#include <utility>

#include "parallel/axis.h"

namespace tessera::parallel {

/// Of one tensor. Knows what it needs: neither direction saves tensors.
class Transition : public torch::CustomClassHolder {
 public:
  Transition(std::string_view what, const Axis& over, std::string caller)
      : kind(what), axis(over), where(std::move(caller)) {}
  virtual at::Tensor forward(const at::Tensor& x) const = 0;
  virtual at::Tensor backward(const at::Tensor& grad) const = 0;

  const std::string_view kind;  ///< "all_gather"
  const Axis axis;
  const std::string where;
};

at::Tensor apply_transition(const at::Tensor& x, c10::intrusive_ptr<Transition> transition);

template <class T, class... Args>
at::Tensor apply(const at::Tensor& x, Args&&... args) {
  return apply_transition(x, c10::make_intrusive<T>(std::forward<Args>(args)...));
}

}  // namespace tessera::parallel
