#include "dry/device_tensors.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "dry/fake_device.h"
#include "dry/memory_count.h"

namespace tessera::dry {
namespace {

/// Returns the same memory under another device's name, which keeps it alive. A storage of the host
/// may grow later. Also accepts a storage whose memory was freed: it has views and no address.
c10::Storage storage_under(c10::Device device, const c10::Storage& storage) {
  auto* const kept = new c10::Storage(storage);
  const auto forget = [](void* of) { delete static_cast<c10::Storage*>(of); };
  auto* const allocator = device.is_cpu() ? c10::GetAllocator(c10::kCPU) : nullptr;
  return {c10::Storage::use_byte_size_t{}, storage.nbytes(),
          at::DataPtr(storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get(), kept,
                      forget, device),
          allocator, /*resizable=*/allocator != nullptr};
}

at::Tensor tensor_over(c10::Storage storage, c10::DispatchKey key, const at::Tensor& as) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                         c10::DispatchKeySet(key), as.dtype());
  auto* const impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(as.sizes(), as.strides(), as.storage_offset());
  if (as.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return tensor;
}

bool same_storage(const c10::Storage& one, const c10::Storage& other) {
  return one.unsafeGetStorageImpl() == other.unsafeGetStorageImpl();
}

enum class Reads : std::uint8_t { kSizes, kElements };

/// One call of an operation.
class OnMemory {
 public:
  explicit OnMemory(Reads reads) : reads_(reads) {}

  void give(c10::IValue& value) {
    if (value.isTensor()) {
      value = alias(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> all = value.toTensorVector();
      for (at::Tensor& each : all) each = alias(each);
      value = std::move(all);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> all;
      for (const auto& each : value.toOptionalTensorVector()) {
        all.push_back(each ? std::optional(alias(*each)) : std::nullopt);
      }
      value = std::move(all);
    } else if (value.isDevice() && value.toDevice().type() == kFakeDevice) {
      value = c10::Device(c10::kCPU);
    }
  }

  void take(c10::IValue& value) const {
    if (value.isTensor()) {
      value = result(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> all = value.toTensorVector();
      for (at::Tensor& each : all) each = result(each);
      value = std::move(all);
    }
  }

  /// Sets the sizes of arguments that the operation has resized.
  void take_sizes() const {
    for (const Given& each : given_) {
      if (each.original.sizes() == each.alias.sizes()) continue;
      auto* const impl = each.original.unsafeGetTensorImpl();
      impl->set_storage_keep_dtype(storage_under(fake_device(), each.alias.storage()));
      impl->set_sizes_and_strides(each.alias.sizes(), each.alias.strides());
    }
  }

 private:
  struct Given {
    at::Tensor original, alias;
  };

  at::Tensor alias(const at::Tensor& tensor) {
    if (!is_of_fake_device(tensor)) {
      of_host_.push_back(tensor);
      return tensor;
    }
    for (const Given& other : given_) {
      if (other.original.is_same(tensor)) return other.alias;
    }
    if (reads_ == Reads::kElements) tensor.const_data_ptr();  // throws where the memory was freed
    const auto sibling = std::ranges::find_if(given_, [&](const Given& other) {
      return same_storage(other.original.storage(), tensor.storage());
    });
    at::Tensor made =
        tensor_over(sibling != given_.end() ? sibling->alias.storage()
                                            : storage_under(c10::kCPU, tensor.storage()),
                    c10::DispatchKey::CPU, tensor);
    given_.push_back({tensor, made});
    return made;
  }

  at::Tensor result(const at::Tensor& of_cpu) const {
    const auto is_same = [&](const at::Tensor& each) { return each.is_same(of_cpu); };
    if (!of_cpu.defined() || std::ranges::any_of(of_host_, is_same)) return of_cpu;
    for (const Given& each : given_) {
      if (each.alias.is_same(of_cpu)) return each.original;
    }
    for (const Given& each : given_) {
      if (!same_storage(each.alias.storage(), of_cpu.storage())) continue;
      return tensor_over(each.original.storage(), kFakeDeviceKey, of_cpu);
    }
    return under_fake_device(of_cpu);
  }

  const Reads reads_;
  std::vector<Given> given_;
  std::vector<at::Tensor> of_host_;
};

/// Whether the operation's results are on the host, for any arguments.
bool leaves_device(const c10::OperatorHandle& operation) {
  return operation.operator_name().name == "aten::_local_scalar_dense";
}

/// Runs aten::set_(self, Storage source, storage_offset, size, stride), both on the device.
void set_storage(c10::Stack& stack) {
  const auto arguments = torch::jit::last(stack, 5);
  at::Tensor self = arguments[0].toTensor();
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(arguments[1].toStorage());
  impl->set_sizes_and_strides(arguments[3].toIntVector(), arguments[4].toIntVector(),
                              arguments[2].toInt());
  torch::jit::drop(stack, 5);
  stack.emplace_back(std::move(self));
}

}  // namespace

bool is_view(const c10::FunctionSchema& schema) {
  return std::ranges::any_of(schema.returns(), [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  });
}

bool is_of_fake_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kFakeDevice;
}

bool names_fake_device(const c10::OperatorHandle& operation, const c10::Stack& stack) {
  const auto arguments = torch::jit::last(stack, operation.schema().arguments().size());
  return std::ranges::any_of(arguments, [](const c10::IValue& value) {
    if (value.isTensor()) return is_of_fake_device(value.toTensor());
    if (value.isDevice()) return value.toDevice().type() == kFakeDevice;
    if (value.isTensorList()) return std::ranges::any_of(value.toTensorVector(), is_of_fake_device);
    if (!value.isOptionalTensorList()) return false;
    return std::ranges::any_of(value.toOptionalTensorVector(),
                               [](const auto& each) { return each && is_of_fake_device(*each); });
  });
}

at::Tensor under_fake_device(const at::Tensor& of_cpu) {
  return tensor_over(storage_under(fake_device(), of_cpu.storage()), kFakeDeviceKey, of_cpu);
}

void run_on_memory(const c10::OperatorHandle& operation, c10::Stack* stack) {
  if (operation.operator_name() ==
      c10::OperatorName("aten::set_", "source_Storage_storage_offset")) {
    return set_storage(*stack);
  }
  const CountScope of_device(Counts::kDevice);
  OnMemory call(is_view(operation.schema()) ? Reads::kSizes : Reads::kElements);
  const auto begin = stack->size() - operation.schema().arguments().size();
  for (std::size_t i = begin; i < stack->size(); ++i) call.give((*stack)[i]);
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    operation.callBoxed(stack);
  }
  call.take_sizes();
  if (leaves_device(operation)) return;
  for (std::size_t i = stack->size() - operation.schema().returns().size(); i < stack->size();
       ++i) {
    call.take((*stack)[i]);
  }
}

}  // namespace tessera::dry
