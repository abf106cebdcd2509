// expected: Load a dict by tessera::load_state_dict(handle, entries)
#include <tessera/tessera.h>
#include <torch/serialize.h>

struct Net : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x; }
};

void load(tessera::Sharded<Net>& handle) { torch::load(handle, "net.pt"); }
