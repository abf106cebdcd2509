// expected: template <> struct tessera::ForwardSignature<MyImpl>
#include <tessera/tessera.h>

struct Net : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x; }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& y) { return x + y; }
};

void shard(const tessera::Mesh& mesh) { tessera::fully_shard(std::make_shared<Net>(), mesh); }
