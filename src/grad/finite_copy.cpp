#include "grad/finite_copy.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "grad/torch_dtype.h"
#include "tessera/error.h"

namespace tessera::grad {

void finite_copy(const at::Tensor& to, const at::Tensor& from, std::string_view name) {
  const auto found = to_dtype(from.scalar_type());
  const auto asked = to_dtype(to.scalar_type());
  to.copy_(from);
  if (!is_floating(found) || represents(asked, found)) return;
  constexpr std::int64_t kPart = std::int64_t{1} << 20;  // elements looked at together
  for (std::int64_t begin = 0; begin < from.numel(); begin += kPart) {
    const auto size = std::min(kPart, from.numel() - begin);
    const auto before = from.narrow(0, begin, size);
    const auto lost = before.isfinite().logical_and(to.narrow(0, begin, size).isinf());
    if (!lost.any().item<bool>()) continue;
    throw Error(ErrorKind::kContract,
                concat(name, ": found the value ",
                       before.masked_select(lost)[0].to(at::kDouble).item<double>(),
                       ", expected one that ", to_string(asked),
                       " can hold; keep it wider by a [[precision.rule]] (pin, param_dtype or "
                       "storage_dtype)"));
  }
}

void load_values(const at::Tensor& to, const at::Tensor& from, const GradContract& contract) {
  const std::string name = "parameter " + contract.name;
  if (!contract.loaded_through) return finite_copy(to, from, name);
  const auto through = from.options().dtype(to_scalar_type(*contract.loaded_through));
  const auto passed = at::empty(from.sizes(), through);
  finite_copy(passed, from, name);
  finite_copy(to, passed, name);
}

}  // namespace tessera::grad
