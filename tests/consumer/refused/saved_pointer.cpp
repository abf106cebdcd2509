// expected: tessera::save_checkpoint(handle, optimizer, folder)
#include <tessera/tessera.h>
#include <torch/serialize.h>

struct Net : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x; }
};

void save(const std::shared_ptr<tessera::Sharded<Net>>& handle) { torch::save(handle, "net.pt"); }
