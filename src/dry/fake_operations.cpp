#include "dry/fake_operations.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text/printable.h"
#include "dry/device_tensors.h"
#include "dry/fake_device.h"
#include "dry/size_rules.h"
#include "tessera/error.h"

namespace tessera::dry {
namespace {

using Arguments = std::vector<c10::Argument>;

/// Whether a tensor that a thread makes has no values. Whole numbers and bytes are rows, counts and
/// messages, and a few numbers in fp64 are sums for the host: these have values.
bool is_made_fake(at::ScalarType dtype, std::int64_t numel) {
  constexpr std::int64_t kMostOfHost = 1 << 12;
  if (dtype == at::kDouble) return numel > kMostOfHost;
  const bool is_of_model = at::isFloatingType(dtype) || dtype == at::kShort;
  return is_of_model && numel > 1;
}

template <class Use>
void for_tensors(const c10::IValue& value, Use&& use) {
  if (value.isTensor()) {
    use(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& each : value.toTensorVector()) use(each);
  } else if (value.isOptionalTensorList()) {
    for (const auto& each : value.toOptionalTensorVector())
      if (each) use(*each);
  }
}

bool any_is_fake(c10::ArrayRef<c10::IValue> arguments) {
  bool any = false;
  for (const auto& each : arguments)
    for_tensors(each, [&](const at::Tensor& tensor) { any = any || is_fake(tensor); });
  return any;
}

at::Tensor meta_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_meta()) return tensor;
  auto meta =
      at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return meta;
}

c10::IValue meta_of(const c10::IValue& value) {
  if (value.isTensor()) return meta_of(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> all;
    for (const at::Tensor& each : value.toTensorVector()) all.push_back(meta_of(each));
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> all;
    for (const auto& each : value.toOptionalTensorVector()) {
      all.push_back(each ? std::optional(meta_of(*each)) : std::nullopt);
    }
    return all;
  }
  if (value.isDevice()) return c10::Device(c10::kMeta);
  return value;
}

/// Returns the element of a result that the host may read: the value that passes a check.
double hoped_for(std::string_view operation) {
  constexpr std::array<std::string_view, 4> kFaults{"aten::any", "aten::isnan", "aten::isinf",
                                                    "aten::ne"};
  return std::ranges::find(kFaults, operation) != kFaults.end() ? 0.0 : 1.0;
}

/// The results of one operation.
class Results {
 public:
  Results(std::string_view operation, bool are_of_device)
      : operation_(operation), are_of_device_(are_of_device) {}

  at::Tensor of(const at::Tensor& meta) const {
    if (!meta.defined()) return meta;
    const auto counts = count();
    const auto options = meta.options().device(c10::kCPU);
    if (meta.numel() == 1) {
      return named(
          at::empty_strided(meta.sizes(), meta.strides(), options).fill_(hoped_for(operation_)));
    }
    const FakeMemoryScope memory;
    return named(at::empty_strided(meta.sizes(), meta.strides(), options));
  }

  /// Returns the experts that tokens choose, each equally often.
  at::Tensor even_choice(const at::Tensor& values, std::int64_t choices) const {
    const std::int64_t columns = values.size(-1), rows = values.numel() / columns;
    const auto counts = count();
    at::Tensor chosen = at::empty({rows, choices}, at::kLong);
    auto* next = chosen.mutable_data_ptr<std::int64_t>();
    for (std::int64_t i = 0; i < rows * choices; ++i) next[i] = i % columns;
    std::vector<std::int64_t> sizes = values.sizes().vec();
    sizes.back() = choices;
    return named(chosen.view(sizes));
  }

 private:
  std::optional<CountScope> count() const {
    return are_of_device_ ? std::optional<CountScope>(std::in_place, Counts::kDevice)
                          : std::nullopt;
  }
  at::Tensor named(const at::Tensor& tensor) const {
    return are_of_device_ ? under_fake_device(tensor) : tensor;
  }

  std::string_view operation_;
  bool are_of_device_;
};

/// Returns the index of the argument that a result is, where an operation writes into one; -1 for
/// none.
std::ptrdiff_t argument_of(const c10::Argument& result, const Arguments& arguments) {
  if (result.alias_info() == nullptr) return -1;
  const auto found = std::ranges::find_if(arguments, [&](const c10::Argument& argument) {
    return argument.alias_info() != nullptr && argument.alias_info()->isWrite() &&
           argument.alias_info()->beforeSets() == result.alias_info()->beforeSets();
  });
  return found == arguments.end() ? -1 : found - arguments.begin();
}

/// Gives an argument the sizes that the operation has given to its meta tensor.
void take_sizes(const at::Tensor& tensor, const at::Tensor& meta) {
  if (!tensor.defined() || tensor.sizes() == meta.sizes()) return;
  auto* impl = tensor.unsafeGetTensorImpl();
  const at::Tensor fresh = Results("", is_of_fake_device(tensor)).of(meta);
  impl->set_storage_keep_dtype(fresh.storage());
  impl->set_sizes_and_strides(fresh.sizes(), fresh.strides());
}

void run_by_shape(const c10::OperatorHandle& operation, c10::Stack* stack) {
  const auto& schema = operation.schema();
  const auto& name = operation.operator_name().name;
  if (schema.returns().empty()) return torch::jit::drop(*stack, schema.arguments().size());
  if (name == "aten::_local_scalar_dense") {  // on a view of a larger tensor
    torch::jit::drop(*stack, 1);
    return stack->push_back(c10::Scalar(hoped_for(name)));
  }
  const SizeRule rule = size_rule(operation);
  TESSERA_CHECK(
      rule != nullptr || operation.hasKernelForDispatchKey(c10::DispatchKey::Meta),
      ErrorKind::kUsage, "dry run: found ", c10::toString(operation.operator_name()),
      ", whose results' sizes follow from values, expected one whose sizes follow from sizes");
  const std::size_t count = schema.arguments().size();
  const Results results(name, names_fake_device(operation, *stack));
  const std::vector<c10::IValue> arguments(stack->end() - static_cast<std::ptrdiff_t>(count),
                                           stack->end());
  torch::jit::drop(*stack, count);
  c10::Stack metas;
  for (const auto& each : arguments) metas.push_back(meta_of(each));
  const c10::Stack before = metas;
  rule != nullptr ? rule(metas) : operation.callBoxed(&metas);
  for (std::size_t i = 0; i < count; ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias == nullptr || !alias->isWrite() || !arguments[i].isTensor()) continue;
    take_sizes(arguments[i].toTensor(), before[i].toTensor());
  }
  const auto& returns = schema.returns();
  for (std::size_t i = 0; i < returns.size(); ++i) {
    const c10::IValue& made = metas[i];
    if (const auto at = argument_of(returns[i], schema.arguments()); at >= 0) {
      stack->push_back(arguments[static_cast<std::size_t>(at)]);
    } else if (made.isTensor()) {
      const bool chooses = name == "aten::topk" && i == 1;
      stack->push_back(chooses ? results.even_choice(arguments[0].toTensor(), arguments[1].toInt())
                               : results.of(made.toTensor()));
    } else if (made.isTensorList()) {
      c10::List<at::Tensor> all;
      for (const at::Tensor& each : made.toTensorVector()) all.push_back(results.of(each));
      stack->push_back(all);
    } else {
      stack->push_back(made);
    }
  }
}

/// Whether the operation makes a new tensor that has no values here.
bool makes_fake(const c10::OperatorHandle& operation, const c10::Stack& stack) {
  const auto& schema = operation.schema();
  const auto& name = operation.operator_name().name;
  if (name != "aten::empty" && name != "aten::empty_strided") return false;
  const auto& sizes = torch::jit::peek(stack, 0, schema.arguments().size());
  std::int64_t numel = 1;
  for (const auto size : sizes.toIntVector()) numel *= size;
  at::ScalarType dtype = at::kFloat;
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& value = torch::jit::peek(stack, i, schema.arguments().size());
    if (schema.arguments()[i].name() == "dtype" && value.isInt()) dtype = value.toScalarType();
    if (schema.arguments()[i].name() == "device" && value.isDevice() &&
        !value.toDevice().is_cpu() && value.toDevice().type() != kFakeDevice) {
      return false;
    }
  }
  return is_made_fake(dtype, numel);
}

/// Drops pinning: the fake device reads no memory of the host.
void unpin(const c10::FunctionSchema& schema, c10::Stack& stack) {
  const std::size_t count = schema.arguments().size();
  for (std::size_t i = 0; i < count; ++i) {
    if (schema.arguments()[i].name() == "pin_memory") stack[stack.size() - count + i] = {};
  }
}

}  // namespace

bool computes_elements(const c10::OperatorHandle& operation) {
  return operation.hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
         operation.operator_name().name == "aten::copy_";  // on every device, by pointers
}

void FakeOperations::run(const c10::OperatorHandle& operation, c10::DispatchKeySet below,
                         c10::Stack* stack) {
  const auto& schema = operation.schema();
  const bool of_device = names_fake_device(operation, *stack);
  if (of_device && operation.operator_name().name == "aten::record_stream") {
    return torch::jit::drop(*stack, schema.arguments().size());
  }
  // GPUs have a kernel for it, though the CPU has none.
  const bool is_of_gpus = of_device && size_rule(operation) != nullptr;
  const bool is_one = computes_elements(operation) || is_of_gpus;
  if (!is_view(schema) && !is_one) {
    return operation.redispatchBoxed(below, stack);  // the operations that it calls come here
  }
  const c10::impl::ExcludeDispatchKeyGuard once(kernels::kWatchKey);
  unpin(schema, *stack);
  const auto run_as_ever = [&] {
    return of_device ? run_on_memory(operation, stack) : operation.redispatchBoxed(below, stack);
  };
  if (is_view(schema)) return run_as_ever();
  if (makes_fake(operation, *stack)) {
    const FakeMemoryScope memory;
    return run_as_ever();
  }
  const auto arguments = torch::jit::last(*stack, schema.arguments().size());
  if (!any_is_fake(arguments)) return run_as_ever();
  run_by_shape(operation, stack);
}

}  // namespace tessera::dry
