#include "sim/late_copies.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <cstring>
#include <utility>

#include "sim/pinned.h"

namespace tessera::sim {
namespace {

/// The values, one behind the other.
at::Tensor dense_copy(const at::Tensor& values) {
  // An observer may ask for an event, and the mutex is held.
  const at::DisableRecordFunctionGuard unobserved;
  const at::AutoDispatchBelowADInplaceOrView plainly;
  return at::empty_like(values, values.options().pinned_memory(false), at::MemoryFormat::Contiguous)
      .copy_(values);
}

/// No number, in any dtype that has such a thing; in others none of the values.
at::Tensor nothing_like(const at::Tensor& values) {
  at::Tensor result = dense_copy(values);
  if (result.numel() == 0) return result;
  auto* const bytes = static_cast<std::uint8_t*>(result.mutable_data_ptr());
  if (at::isIntegralType(result.scalar_type(), /*includeBool=*/true)) {
    const auto turned = static_cast<std::uint8_t>(result.scalar_type() == at::kBool ? 1 : 0xff);
    for (std::size_t i = 0; i < result.nbytes(); ++i) {
      bytes[i] = static_cast<std::uint8_t>(bytes[i] ^ turned);
    }
  } else {
    std::memset(bytes, 0xff, result.nbytes());
  }
  return result;
}

void put(const at::Tensor& values, const at::Tensor& target) {
  const at::AutoDispatchBelowADInplaceOrView plainly;
  const at::DisableRecordFunctionGuard unobserved;
  target.copy_(values);
}

}  // namespace

void LateCopies::to_host(const Access& copy, const at::Tensor& target, const at::Tensor& value) {
  // An earlier copy to the same place may have made it unreadable.
  forbid(target, false);
  put(nothing_like(value), target);
  forbid(target, true);
  copies_.push_back({copy, target, value, true});
}

void LateCopies::from_pinned(const Access& copy, const at::Tensor& source) {
  copies_.push_back({copy, source, dense_copy(source), false});
}

LateCopies::Landed LateCopies::land(const Clock& known) {
  // An observer may ask for an event, and the mutex is held.
  const at::DisableRecordFunctionGuard unobserved;
  Landed landed;
  std::vector<Copy> rest;
  for (Copy& copy : copies_) {
    if (!is_over(known, copy.access)) {
      rest.push_back(std::move(copy));
      continue;
    }
    if (copy.arrives) {
      forbid(copy.host, false);
      put(copy.value, copy.host);
    } else {
      const at::Tensor now = dense_copy(copy.host);
      if (now.numel() > 0 &&
          std::memcmp(now.const_data_ptr(), copy.value.const_data_ptr(), now.nbytes()) != 0) {
        landed.changed.push_back(
            *copy.access.operation +
            ": its source in pinned memory was written before the copy was over; wait for an event "
            "behind the copy, then write");
      }
      landed.tensors.push_back(now);
    }
    landed.tensors.push_back(std::move(copy.host));
    landed.tensors.push_back(std::move(copy.value));
  }
  copies_ = std::move(rest);
  if (landed.tensors.empty()) return landed;
  for (const Copy& copy : copies_) {
    if (copy.arrives) forbid(copy.host, true);  // pages may be shared with what has landed
  }
  return landed;
}

}  // namespace tessera::sim
