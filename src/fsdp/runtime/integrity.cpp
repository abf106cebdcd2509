#include "fsdp/runtime/integrity.h"

#include "fsdp/runtime/unit.h"
#include "grad/leaf.h"
#include "grad/torch_dtype.h"
#include "tessera/error.h"

namespace tessera::fsdp {
namespace {

/// The expected place of a tensor's elements.
struct Home {
  const c10::StorageImpl* storage;
  std::int64_t offset;
  DType dtype;
};

bool is_at(const at::Tensor& tensor, const Home& home) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  return impl->unsafe_storage().unsafeGetStorageImpl() == home.storage &&
         impl->storage_offset() == home.offset &&
         tensor.scalar_type() == to_scalar_type(home.dtype);
}

/// Returns the version counter; 0 for inference tensors, which have none.
std::uint32_t counter_of(const at::Tensor& tensor) {
  const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? counter.current_version() : 0;
}

[[noreturn]] void report(const Parameter& parameter, std::string_view which,
                         const at::Tensor& found, const Home& home) {
  const bool same = found.scalar_type() == to_scalar_type(home.dtype);
  throw Error(
      ErrorKind::kUsage,
      concat("parameter ", parameter.contract.name, ": found ", which, " in ",
             same ? "other memory" : concat("the dtype ", c10::toString(found.scalar_type())),
             ", expected ", to_string(home.dtype), " where fully_shard put it; it was replaced by ",
             "to(), set_data or torch::load: copy values into handle.parameters() with copy_, and ",
             "choose dtypes by PrecisionPolicy, or change them before fully_shard"));
}

}  // namespace

void check_integrity(const Unit& unit) {
  for (const auto& parameter : unit.parameters()) {
    const auto& bucket = *unit.buckets()[parameter->bucket];
    const auto& placed = parameter->placed();
    const auto owned = bucket.plan().owned(placed, bucket.rank());
    const Home shard{bucket.shard().unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl(),
                     owned.empty() ? 0 : bucket.plan().offset_in_slice(placed, bucket.rank()),
                     bucket.plan().key.storage};
    if (!is_at(parameter->shard, shard)) report(*parameter, "its shard", parameter->shard, shard);
    const Home whole{bucket.unsharded().storage(), placed.offset, bucket.plan().key.compute};
    for (const auto& leaf : parameter->leaves) {
      if (!is_at(leaf->tensor, whole)) {
        report(*parameter, "the module's tensor", leaf->tensor, whole);
      }
      // libtorch's register_hook clears all hooks but its own.
      TESSERA_CHECK(grad::find_leaf(leaf->tensor) != nullptr, ErrorKind::kUsage, "parameter ",
                    parameter->contract.name,
                    ": found that register_hook on the module's tensor has replaced the hook by "
                    "which its gradients reach the reduction, expected none on it; make the module "
                    "again, and change gradients on handle.parameters() after backward");
    }
  }
  if (!unit.buffers_are_cast()) return;
  for (const auto& buffer : unit.buffers) {
    TESSERA_CHECK(
        buffer.tensor.scalar_type() == to_scalar_type(buffer.contract.compute), ErrorKind::kUsage,
        "buffer ", buffer.contract.name, ": found dtype ",
        c10::toString(buffer.tensor.scalar_type()), ", expected ",
        to_string(buffer.contract.compute), " (", buffer.contract.reason(BufferField::kCompute),
        "); choose dtypes by PrecisionPolicy or before fully_shard, and call set_loaded() "
        "after loading");
  }
}

void note_versions(const Unit& unit) {
  for (const auto& parameter : unit.parameters()) {
    for (const auto& leaf : parameter->leaves) leaf->gathered_version = counter_of(leaf->tensor);
  }
}

void require_unwritten(const Unit& unit) {
  for (const auto& parameter : unit.parameters()) {
    for (const auto& leaf : parameter->leaves) {
      TESSERA_CHECK(
          counter_of(leaf->tensor) == leaf->gathered_version, ErrorKind::kUsage, "unit ",
          unit.shown_name(), ": found that the module's tensor of parameter ",
          parameter->contract.name,
          " was changed in place while it was unsharded, expected it as it was gathered: the "
          "change goes with the memory; change handle.parameters() between steps, and compute "
          "with a changed copy in forward");
    }
  }
}

void require_gradient_here(const at::Tensor& gradient, const at::Tensor& shard,
                           std::string_view parameter) {
  TESSERA_CHECK(gradient.device() == shard.device(), ErrorKind::kUsage, "gradient of ", parameter,
                ": found it on ", gradient.device().str(), ", expected ", shard.device().str(),
                " where its shard is; move it there before it is assigned");
}

void check_trainable(const Unit& unit) {
  for (const auto& parameter : unit.parameters()) {
    const bool expected = parameter->contract.trainable;
    TESSERA_CHECK(
        parameter->shard.requires_grad() == expected, ErrorKind::kUsage, "parameter ",
        parameter->contract.name, ": found requires_grad ", expected ? "off" : "on",
        " on its shard, expected ", expected ? "on" : "off",
        " as when it was sharded, since requires_grad_() on a shard changes nothing of ",
        "what is gathered and reduced; call set_trainable(handle, changes, optimizers) on ",
        "every rank, or requires_grad_() before fully_shard");
  }
}

}  // namespace tessera::fsdp
