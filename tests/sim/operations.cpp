#include "sim/operations.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "sim/fallback.h"
#include "sim/guard.h"
#include "sim/memory.h"
#include "sim/pinned.h"
#include "sim/simulator.h"

namespace tessera::sim {
namespace {

const c10::DispatchKeySet kKey(c10::DispatchKey::PrivateUse1);

c10::Stream stream_for(const at::Tensor& tensor) { return current_stream(tensor.device().index()); }

// Made and viewed: no operation of the device.

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> /*layout*/, std::optional<at::Device> device,
                 std::optional<bool> /*pinned*/, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard on(device);
  return at::detail::empty_generic(sizes, &device_memory(), kKey, c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                         std::optional<at::Device> device, std::optional<bool> /*pinned*/) {
  const c10::OptionalDeviceGuard on(device);
  return at::detail::empty_strided_generic(sizes, strides, &device_memory(), kKey,
                                           c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef sizes,
                      c10::SymIntArrayRef strides, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, sizes, strides, std::move(offset));
}
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef sizes) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes));
}
at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef sizes,
                         c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes),
                                    C10_AS_INTARRAYREF_SLOW(strides));
}
at::Tensor unfold(const at::Tensor& self, std::int64_t dim, std::int64_t size, std::int64_t step) {
  return at::native::unfold(self, dim, size, step);
}
at::Tensor view_as_real(const at::Tensor& self) { return at::native::view_as_real(self); }
at::Tensor view_as_complex(const at::Tensor& self) { return at::native::view_as_complex(self); }

at::Tensor& set_storage(at::Tensor& self, at::Storage source, std::int64_t offset,
                        at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::cpu::set_(self, std::move(source), offset, sizes, strides);
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}
const at::Tensor& resize_tensor(const at::Tensor& self, c10::SymIntArrayRef sizes,
                                std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!format || *format == at::MemoryFormat::Contiguous, "sim: resize_ to another format");
  resize_to(self, C10_AS_INTARRAYREF_SLOW(sizes));
  return self;
}

/// Else a parameter that was made on the CPU could not get data of the device (set_data).
bool is_compatible(const at::Tensor& /*self*/, const at::Tensor& /*other*/) { return true; }

void record_stream(at::Tensor& self, at::Stream stream) {
  device_memory().recordStream(self.storage().data_ptr(), stream);
}

// Copied.

void copy_values(const at::Tensor& from, const at::Tensor& to) {
  const at::AutoDispatchBelowADInplaceOrView plainly;
  to.copy_(from);
}

/// As CUDA: on the source's current stream, which waits for the destination's before and is waited
/// for by it afterwards.
void copy_between_devices(const at::Tensor& self, const at::Tensor& to) {
  const c10::Stream from_stream = stream_for(self), to_stream = stream_for(to);
  block(from_stream, record(to_stream));
  launch(from_stream, "copy_", {{self, false}, {to, true}});
  copy_values(as_cpu(self), as_cpu(to));
  block(to_stream, record(from_stream));
}

void copy_on_device(const at::Tensor& self, const at::Tensor& to) {
  launch(stream_for(to), "copy_", {{self, false}, {to, true}});
  copy_values(as_cpu(self), as_cpu(to));
}

void upload(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  const Access access = launch(stream_for(to), "upload", {{to, true}});
  copy_values(self, as_cpu(to));
  if (!non_blocking) {
    wait_on_host(stream_for(to), "blocking upload");
  } else if (self.numel() > 0 && is_pinned(self.const_data_ptr())) {
    check_late(access, self);
  }
}

void read(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  const Access access = launch(stream_for(self), "read", {{self, false}});
  if (non_blocking) {
    at::Tensor value = at::empty_like(to, to.options().pinned_memory(false));
    copy_values(as_cpu(self), value);
    arrive_late(access, to, value);
  } else {
    wait_on_host(stream_for(self), "blocking read");
    copy_values(as_cpu(self), to);
  }
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (!self.device().is_privateuseone()) {
    upload(self, to, non_blocking);
  } else if (!to.device().is_privateuseone()) {
    read(self, to, non_blocking);
  } else if (self.device() != to.device()) {
    copy_between_devices(self, to);
  } else {
    copy_on_device(self, to);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  at::native::resize_output(to, self.sizes());
  return copy_from(self, to, /*non_blocking=*/false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  launch(stream_for(self), "item", {{self, false}});
  wait_on_host(stream_for(self), "item");
  return as_cpu(self).item();
}

}  // namespace

at::Tensor new_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                      c10::Device device) {
  return empty_strided(sizes, strides, dtype, std::nullopt, device, std::nullopt);
}

void resize_storage(const c10::Storage& storage, std::size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  TORCH_CHECK(impl->resizable(), "Trying to resize storage that is not resizable");
  const c10::DeviceGuard on(impl->device());
  at::DataPtr more = device_memory().allocate(bytes);
  const std::size_t kept = std::min(bytes, impl->nbytes());
  if (kept > 0) {
    const auto values = [&](void* data) {
      const c10::Storage of(c10::Storage::use_byte_size_t{}, kept,
                            at::DataPtr(data, impl->device()), nullptr, false);
      at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
          c10::Storage(of), kKey, caffe2::TypeMeta::Make<std::uint8_t>());
      tensor.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<std::int64_t>(kept)});
      return tensor;
    };
    copy_on_device(values(impl->mutable_data()), values(more.get()));
  }
  impl->set_data_ptr_noswap(std::move(more));
  impl->set_nbytes(bytes);
}

void resize_to(const at::Tensor& tensor, at::IntArrayRef sizes) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  const auto elements = static_cast<std::size_t>(impl->storage_offset() + impl->numel());
  const std::size_t bytes = impl->numel() == 0 ? 0 : elements * impl->itemsize();
  if (bytes > impl->storage().nbytes()) resize_storage(impl->storage(), bytes);
}

}  // namespace tessera::sim

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", tessera::sim::empty);
  m.impl("empty_strided", tessera::sim::empty_strided);
  m.impl("as_strided", tessera::sim::as_strided);
  m.impl("view", tessera::sim::view);
  m.impl("_reshape_alias", tessera::sim::reshape_alias);
  m.impl("unfold", tessera::sim::unfold);
  m.impl("view_as_real", tessera::sim::view_as_real);
  m.impl("view_as_complex", tessera::sim::view_as_complex);
  m.impl("resize_", tessera::sim::resize_tensor);
  m.impl("set_.source_Storage_storage_offset", tessera::sim::set_storage);
  m.impl("set_.source_Tensor", tessera::sim::set_tensor);
  m.impl("_has_compatible_shallow_copy_type", tessera::sim::is_compatible);
  m.impl("record_stream", tessera::sim::record_stream);
  m.impl("_copy_from", tessera::sim::copy_from);
  m.impl("_copy_from_and_resize", tessera::sim::copy_from_and_resize);
  m.impl("_local_scalar_dense", tessera::sim::local_scalar);
}
