#include "nn/parameter.h"

#include <ATen/ops/empty.h>

#include <cstring>
#include <string>

#include "comm/torch_compat.h"
#include "tessera/error.h"

namespace tessera::nn {
namespace {

constexpr const char* kNoData =
    "parameter has no data yet: shard, load or initialize it before it is used";

}  // namespace

at::Tensor empty_parameter(at::IntArrayRef sizes) {
  at::Tensor parameter = at::empty({0}, at::kFloat);
  parameter.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  if (parameter.numel() > 0) {
    parameter.storage()
        .unsafeGetStorageImpl()
        ->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(kNoData));
  }
  parameter.set_requires_grad(true);
  return parameter;
}

bool has_data(const at::Tensor& tensor) {
  return tensor.numel() == 0 || tensor.storage().nbytes() > 0;
}

void materialize(const torch::nn::Module& module) {
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& parameter = item.value();
    if (has_data(parameter)) continue;
    const auto bytes = static_cast<std::size_t>(parameter.numel()) * parameter.dtype().itemsize();
    at::DataPtr data = c10::GetAllocator(c10::DeviceType::CPU)->allocate(bytes);
    std::memset(data.get(), 0, bytes);
    c10::StorageImpl* storage = parameter.storage().unsafeGetStorageImpl();
    compat::clear_access_error(*storage);
    storage->set_data_ptr_noswap(std::move(data));
    storage->set_nbytes(bytes);
  }
}

void tie(const at::Tensor& alias, const at::Tensor& owner) {
  TESSERA_CHECK(alias.sizes() == owner.sizes() && alias.scalar_type() == owner.scalar_type(),
                ErrorKind::kContract, "tie: found ", alias.sizes(), " ", alias.scalar_type(),
                ", expected ", owner.sizes(), " ", owner.scalar_type(), " as the tied weight");
  alias.unsafeGetTensorImpl()->set_storage_keep_dtype(owner.storage());
}

}  // namespace tessera::nn
