#include "dry/fake_device.h"

#include <ATen/core/Tensor.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <utility>

namespace tessera::dry {
namespace {

const c10::Device kDevice(kFakeDevice, 0);

thread_local c10::StreamId t_stream = 0;

c10::Stream stream_of(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }

/// A single device, whose streams are numbers and whose events have all passed.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kFakeDevice; }
  c10::Device exchangeDevice(c10::Device /*device*/) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device /*device*/) const override {}
  void uncheckedSetDevice(c10::Device /*device*/) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device /*device*/) const override { return stream_of(t_stream); }
  c10::Stream getDefaultStream(c10::Device /*device*/) const override { return stream_of(0); }
  c10::Stream getNewStream(c10::Device /*device*/, int /*priority*/ = 0) const override {
    static std::atomic<c10::StreamId> made{0};
    return stream_of(++made);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high*/ = false) const override {
    return getNewStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(std::exchange(t_stream, stream.id()));
  }
  bool queryStream(const c10::Stream& /*stream*/) const override { return true; }
  void synchronizeStream(const c10::Stream& /*stream*/) const override {}
  void synchronizeDevice(c10::DeviceIndex /*index*/) const override {}

  void record(void** /*event*/, const c10::Stream& /*stream*/, c10::DeviceIndex /*index*/,
              c10::EventFlag /*flag*/) const override {}
  void block(void* /*event*/, const c10::Stream& /*stream*/) const override {}
  bool queryEvent(void* /*event*/) const override { return true; }
  void synchronizeEvent(void* /*event*/) const override {}
  void destroyEvent(void* /*event*/, c10::DeviceIndex /*index*/) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr& /*data*/,
                             const c10::Stream& /*stream*/) const override {}
};

/// Allows set_data() with data of the device for a parameter that was made on the host, as for
/// CUDA.
bool is_compatible(const at::Tensor& /*self*/, const at::Tensor& /*other*/) { return true; }

/// Is never called in a dry run, which handles operations before the device.
void has_no_kernel(const c10::OperatorHandle& operation, c10::Stack* /*stack*/) {
  TORCH_CHECK(false, "dry run: found ", c10::toString(operation.operator_name()),
              " on a fake tensor, outside of a dry run");
}

/// Operations for which GPUs have a kernel. libtorch makes them from others where a device has
/// none.
constexpr std::array kOfGpus{"silu_backward",     "mish_backward",     "native_channel_shuffle",
                             "native_layer_norm", "native_group_norm", "_fused_rms_norm"};

void register_operations() {
  const auto library_for = [](c10::DispatchKey key) {
    return new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  };
  auto* const forever = library_for(kFakeDeviceKey);
  for (const char* name : kOfGpus) {
    forever->impl(name, torch::CppFunction::makeFromBoxedFunction<&has_no_kernel>());
  }
  forever->impl("_has_compatible_shallow_copy_type", is_compatible);
  library_for(c10::DispatchKey::AutogradMAIA)
      ->impl("_has_compatible_shallow_copy_type", is_compatible);
}

}  // namespace

c10::Device fake_device() {
  static const bool told = [] {
    static const c10::impl::DeviceGuardImplRegistrar registrar(kFakeDevice, new Guard);
    register_operations();
    return true;
  }();
  static_cast<void>(told);
  return kDevice;
}

}  // namespace tessera::dry
