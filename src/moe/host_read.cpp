#include "moe/host_read.h"

#include <ATen/ops/cat.h>
#include <ATen/record_function.h>

#include "tessera/error.h"

namespace tessera::moe {

std::vector<at::Tensor> read_on_host(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> flat;
  flat.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    TESSERA_INVARIANT(tensor.scalar_type() == at::kLong, "a read of ", tensor.scalar_type());
    flat.push_back(tensor.reshape({-1}));
  }
  const at::Tensor together = at::cat(flat);
  RECORD_USER_SCOPE("tessera::host_read");
  const at::Tensor read = together.to(at::kCPU);
  std::vector<at::Tensor> result;
  result.reserve(tensors.size());
  std::int64_t begin = 0;
  for (const at::Tensor& tensor : tensors) {
    result.push_back(read.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
    begin += tensor.numel();
  }
  return result;
}

at::Tensor to_device(const at::Tensor& on_host, at::Device device) {
  return on_host.to(device, on_host.scalar_type(), /*non_blocking=*/true);
}

}  // namespace tessera::moe
