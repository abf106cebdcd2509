// expected: Save the dict of tessera::state_dict(handle, tessera::StateDictKind::kFull)
#include <tessera/tessera.h>
#include <torch/serialize.h>

struct Net : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x; }
};

void save(const tessera::Sharded<Net>& handle) { torch::save(handle, "net.pt"); }
