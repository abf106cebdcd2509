#include "sim/fallback.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/enum_tag.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sim/guard.h"
#include "sim/hooks.h"
#include "sim/memory.h"
#include "sim/operations.h"
#include "sim/sim.h"
#include "sim/simulator.h"

namespace tessera::sim {
namespace {

bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().is_privateuseone();
}

template <std::size_t N>
bool is_one_of(std::string_view name, const std::array<std::string_view, N>& names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// "add_" of "add_.Tensor".
std::string_view base_name(std::string_view name) { return name.substr(0, name.find('.')); }

/// The operations, except elementwise ones, that CUDA lets take a number on the host.
bool takes_numbers_of_host(const c10::OperatorHandle& operation, std::string_view name) {
  constexpr std::array<std::string_view, 8> kNames{"masked_fill",  "masked_fill_", "where",
                                                   "fill_",        "index_fill",   "index_fill_",
                                                   "floor_divide", "floor_divide_"};
  return operation.hasTag(at::Tag::pointwise) || is_one_of(base_name(name), kNames);
}

/// Those whose indices may lie on the host: CUDA's own kernels upload them.
bool takes_indices_of_host(std::string_view name) {
  constexpr std::array<std::string_view, 5> kNames{"index", "index_put", "index_put_",
                                                   "_index_put_impl_", "_unsafe_index"};
  return is_one_of(base_name(name), kNames);
}

/// One call, on the caller's thread.
class Call {
 public:
  Call(const c10::OperatorHandle& operation, torch::jit::Stack& stack)
      : operation_(operation),
        stack_(stack),
        name_(short_name(operation)),
        begin_(stack.size() - operation.schema().arguments().size()) {}

  void run() {
    collect();
    refuse();
    draw();
    const bool host_waits = host_reads();
    const c10::DeviceGuard on(device());
    const c10::Stream stream = current_stream(device().index());
    const Access access = launch(stream, name_, accessed_);
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      operation_.callBoxed(&stack_);
    }
    give_results(access);
    if (uploads_) wait_on_host(stream, "blocking upload");
    if (host_waits) wait_on_host(stream, name_);
  }

 private:
  struct Given {
    at::Tensor original, alias;
    c10::Storage storage;  ///< the alias's, when it was given
  };

  const std::vector<c10::Argument>& arguments() const { return operation_.schema().arguments(); }
  c10::IValue& argument(std::size_t i) { return stack_[begin_ + i]; }
  c10::Device device() const { return sim::device(device_.value_or(current_device())); }

  void collect() {
    for (std::size_t i = 0; i < arguments().size(); ++i) {
      const auto* alias = arguments()[i].alias_info();
      const bool written = alias != nullptr && alias->isWrite();
      c10::IValue& value = argument(i);
      if (value.isTensor()) {
        value = given(value.toTensor(), written);
      } else if (value.isTensorList()) {
        std::vector<at::Tensor> all = value.toTensorVector();
        for (at::Tensor& tensor : all) tensor = given(tensor, written);
        value = std::move(all);
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> all;
        for (const auto& tensor : value.toOptionalTensorVector()) {
          all.push_back(tensor ? std::optional(given(*tensor, written)) : std::nullopt);
        }
        value = std::move(all);
      } else if (value.isDevice() && value.toDevice().is_privateuseone()) {
        if (!device_ && value.toDevice().has_index()) device_ = value.toDevice().index();
        value = c10::Device(c10::kCPU);
      }
    }
  }

  at::Tensor given(const at::Tensor& tensor, bool written) {
    if (!tensor.defined()) return tensor;
    if (!on_device(tensor)) {
      of_host_.push_back(tensor);
      return tensor;
    }
    const c10::DeviceIndex index = tensor.device().index();
    TORCH_CHECK(!device_ || *device_ == index, "sim: ", name_,
                ": found tensors on sim:", static_cast<int>(device_.value_or(0)),
                " and sim:", static_cast<int>(index),
                ", expected all on one device; copy them there first");
    device_ = index;
    accessed_.push_back({tensor, written});
    for (const Given& other : given_) {
      if (other.original.is_same(tensor)) return other.alias;
    }
    at::Tensor alias = alias_of(tensor);
    given_.push_back({tensor, alias, alias.storage()});
    return alias;
  }

  /// Tensors of one storage stay tensors of one storage.
  at::Tensor alias_of(const at::Tensor& tensor) {
    for (const Given& other : given_) {
      if (tensor.numel() > 0 && other.original.numel() > 0 &&
          other.original.storage().unsafeGetStorageImpl() ==
              tensor.storage().unsafeGetStorageImpl()) {
        return cpu_view(tensor, other.storage);
      }
    }
    return as_cpu(tensor);
  }

  static at::Tensor cpu_view(const at::Tensor& tensor, const c10::Storage& storage) {
    auto view = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                      tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      view.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    return view;
  }
  friend at::Tensor tessera::sim::as_cpu(const at::Tensor& tensor);

  void refuse() {
    if (given_.empty()) return;
    for (const at::Tensor& tensor : of_host_) {
      if (takes_indices_of_host(name_)) {
        uploads_ = true;
        continue;
      }
      // ATen's own form of a number that was given as one.
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) continue;
      TORCH_CHECK(tensor.dim() == 0 && takes_numbers_of_host(operation_, name_), "sim: ", name_,
                  ": found a tensor of the host ", tensor.sizes(), " with one on ", device(),
                  ", expected all on one device as CUDA does; copy it there first");
    }
  }

  /// Refuses an operation that draws from the device's generator, or gives it one whose numbers
  /// follow from its state.
  void draw() {
    if (!operation_.hasTag(at::Tag::nondeterministic_seeded) || draws_nothing()) return;
    const auto generator = draw_from(device().index());
    TORCH_CHECK(generator, "sim: ", name_, ": draws from the generator of ", device(),
                ", expected numbers that are drawn on the host: ranks and layouts agree on those");
    for (std::size_t i = 0; i < arguments().size(); ++i) {
      if (arguments()[i].name() != "generator") continue;
      argument(i) = *generator;
      return;
    }
    TORCH_CHECK(false, "sim: ", name_, ": takes no generator, so its draws cannot be simulated");
  }
  bool draws_nothing() {
    for (std::size_t i = 0; i < arguments().size(); ++i) {
      if (arguments()[i].name() == "dropout_p") return argument(i).toDouble() == 0.0;
    }
    return false;
  }

  /// Whether CUDA's kernel makes the host wait: for a value, or for the size of what it makes.
  bool host_reads() {
    if (operation_.hasTag(at::Tag::data_dependent_output)) return true;
    // Its fast kernel takes bfloat16 alone; what replaces it loops over offsets on the host.
    if (name_ == "_grouped_mm") return accessed_[0].tensor.scalar_type() != at::kBFloat16;
    if (name_ == "_index_put_impl_") {
      const auto is_mask = [](const TensorAccess& each) {
        return each.tensor.scalar_type() == at::kBool || each.tensor.scalar_type() == at::kByte;
      };
      // Behind itself and the indices come the values, which may be numbers of the host.
      const auto are_of_host = [&](const at::Tensor& one) {
        return one.is_same(argument(2).toTensor());
      };
      const bool without_values = std::any_of(of_host_.begin(), of_host_.end(), are_of_host);
      return std::any_of(accessed_.begin() + 1, accessed_.end() - (without_values ? 0 : 1),
                         is_mask);
    }
    if (!operation_.hasTag(at::Tag::dynamic_output_shape)) return false;
    for (std::size_t i = 0; i < arguments().size(); ++i) {
      if (arguments()[i].name() == "output_size") return argument(i).isNone();
    }
    return true;
  }

  void give_results(const Access& access) {
    for (const Given& each : given_) take_back(each, access);
    const std::size_t results = operation_.schema().returns().size();
    for (std::size_t i = stack_.size() - results; i < stack_.size(); ++i) {
      c10::IValue& value = stack_[i];
      if (value.isTensor()) {
        value = result(value.toTensor(), access);
      } else if (value.isTensorList()) {
        std::vector<at::Tensor> all = value.toTensorVector();
        for (at::Tensor& tensor : all) tensor = result(tensor, access);
        value = std::move(all);
      }
    }
  }

  /// A result that was given to be written to may have got another size.
  void take_back(const Given& each, const Access& access) {
    const bool same_memory =
        each.alias.storage().unsafeGetStorageImpl() == each.storage.unsafeGetStorageImpl();
    TORCH_CHECK(same_memory, "sim: ", name_, " replaces the memory of its argument: not simulated");
    if (each.original.sizes() == each.alias.sizes()) return;
    resize_to(each.original, each.alias.sizes());
    note_result(access, each.original);
    as_cpu(each.original).copy_(each.alias);
  }

  at::Tensor result(const at::Tensor& of_cpu, const Access& access) {
    if (!of_cpu.defined()) return of_cpu;
    for (const Given& each : given_) {
      if (each.alias.is_same(of_cpu)) return each.original;
    }
    for (const Given& each : given_) {
      TORCH_CHECK(each.storage.unsafeGetStorageImpl() != of_cpu.storage().unsafeGetStorageImpl(),
                  "sim: ", name_, ": makes a view that is not simulated; add it to operations.cpp");
    }
    const at::Tensor dense = of_cpu.is_non_overlapping_and_dense() ? of_cpu : of_cpu.contiguous();
    at::Tensor made = new_tensor(dense.sizes(), dense.strides(), dense.scalar_type(), device());
    note_result(access, made);
    if (made.numel() > 0) {
      std::memcpy(for_kernels(made.mutable_data_ptr()), dense.const_data_ptr(), dense.nbytes());
    }
    return made;
  }

  const c10::OperatorHandle& operation_;
  torch::jit::Stack& stack_;
  const std::string name_;
  const std::size_t begin_;
  std::optional<c10::DeviceIndex> device_;
  std::vector<Given> given_;
  std::vector<at::Tensor> of_host_;
  std::vector<TensorAccess> accessed_;
  bool uploads_ = false;
};

}  // namespace

std::string short_name(const c10::OperatorHandle& operation) {
  const c10::OperatorName& full = operation.operator_name();
  const std::size_t space = full.name.find("::");
  std::string name = full.name.substr(space == std::string::npos ? 0 : space + 2);
  if (!full.overload_name.empty()) name += "." + full.overload_name;
  return name;
}

at::Tensor as_cpu(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  }
  tensor.const_data_ptr();  // memory that was taken away says so
  const c10::Storage& storage = tensor.storage();
  const c10::Storage same(c10::Storage::use_byte_size_t{}, storage.nbytes(),
                          at::DataPtr(for_kernels(storage.data()), at::kCPU),
                          /*allocator=*/nullptr, /*resizable=*/false);
  return Call::cpu_view(tensor, same);
}

void run_on_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  Call(operation, *stack).run();
}

}  // namespace tessera::sim

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&tessera::sim::run_on_cpu>());
}
