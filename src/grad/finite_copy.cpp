#include "grad/finite_copy.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "comm/host_read.h"
#include "grad/torch_dtype.h"
#include "tessera/error.h"

namespace tessera::grad {

namespace {

constexpr std::int64_t kPart = std::int64_t{1} << 20;  // elements, on the host

/// Marks the elements of `before` that became infinite in `after`.
at::Tensor lost_of(const at::Tensor& before, const at::Tensor& after) {
  return before.isfinite().logical_and(after.isinf());
}

[[noreturn]] void refuse(const at::Tensor& lost, DType asked, std::string_view name) {
  throw Error(ErrorKind::kContract,
              concat(name, ": found the value ", lost[0].to(at::kDouble).item<double>(),
                     ", expected one that ", to_string(asked),
                     " can hold; keep it wider by a [[precision.rule]] (pin, param_dtype or "
                     "storage_dtype)"));
}

}  // namespace

void finite_copy(const at::Tensor& to, const at::Tensor& from, std::string_view name) {
  const auto found = to_dtype(from.scalar_type());
  const auto asked = to_dtype(to.scalar_type());
  const bool may_lose = is_floating(found) && !represents(asked, found);
  if (may_lose && from.device() != to.device()) {
    // Casts and checks on the device that has the values.
    const at::Tensor narrow = at::empty(from.sizes(), from.options().dtype(to.scalar_type()));
    finite_copy(narrow, from, name);
    to.copy_(narrow);
    return;
  }
  to.copy_(from);
  if (!may_lose) return;
  if (!from.is_cpu()) {
    const at::Tensor lost = lost_of(from, to);
    if (comm::read_on_host(lost.any(), name).item<bool>()) {
      refuse(comm::read_on_host(from.masked_select(lost), name), asked, name);
    }
    return;
  }
  for (std::int64_t begin = 0; begin < from.numel(); begin += kPart) {
    const auto size = std::min(kPart, from.numel() - begin);
    const auto before = from.narrow(0, begin, size);
    const auto lost = lost_of(before, to.narrow(0, begin, size));
    if (lost.any().item<bool>()) refuse(before.masked_select(lost), asked, name);
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
