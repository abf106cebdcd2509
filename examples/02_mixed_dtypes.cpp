// One unit with parameters of two dtypes: the model of pytorch issue 156784, which FSDP2 refuses.
//
//   build/release/examples/02_mixed_dtypes
//
// Linear(10,20), ReLU, Linear(20,30) in fp32, then Linear(30,10) in bf16. Two ranks train it for
// two epochs as one unit, once more as nested units, and compare both with the plain model on all
// rows, bit for bit.
#include <tessera/tessera.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>

#include <cstdio>
#include <map>

namespace {

constexpr int kRanks = 2;
constexpr double kLr = 0.1;

struct Mixed : torch::nn::Module {
  Mixed() {
    at::manual_seed(3);
    layer1 = register_module("layer1", torch::nn::Linear(10, 20));
    layer2 = register_module("layer2", torch::nn::Linear(20, 30));
    layer3 = register_module("layer3", torch::nn::Linear(30, 10));
    layer3->to(at::kBFloat16);
  }
  at::Tensor forward(const at::Tensor& x) {
    return layer3(layer2(at::relu(layer1(x))).to(at::kBFloat16));
  }
  torch::nn::Linear layer1{nullptr}, layer2{nullptr}, layer3{nullptr};
};

/// The same model with every layer behind a handle of its own.
struct Nested : torch::nn::Module {
  using Layer = tessera::Sharded<torch::nn::LinearImpl>;
  Nested(const Mixed& plain, const tessera::Mesh& mesh, const tessera::PrecisionPolicy& policy) {
    const auto shard = [&](const char* name, const torch::nn::Linear& layer) {
      return register_module(
          name, std::make_shared<Layer>(tessera::fully_shard(layer.ptr(), mesh, policy)));
    };
    layer1 = shard("layer1", plain.layer1);
    layer2 = shard("layer2", plain.layer2);
    layer3 = shard("layer3", plain.layer3);
  }
  at::Tensor forward(const at::Tensor& x) {
    return layer3->forward(layer2->forward(at::relu(layer1->forward(x))).to(at::kBFloat16));
  }
  std::shared_ptr<Layer> layer1, layer2, layer3;
};

at::Tensor rows(int epoch, int rank) {
  return at::cos(at::arange(80, at::TensorOptions().dtype(at::kFloat)).view({8, 10}) * (1 + rank) +
                 epoch);
}

template <class Model>
at::Tensor loss_of(Model& model, int epoch, int rank) {
  return (model.forward(rows(epoch, rank)).to(at::kFloat) - rows(epoch + 7, rank)).pow(2).mean();
}

/// Two epochs on one process: each rank's rows, gradients summed in fp32 in rank order, averaged.
std::map<std::string, at::Tensor> train_plain() {
  Mixed model;
  for (int epoch = 0; epoch < 2; ++epoch) {
    std::map<std::string, at::Tensor> sums;
    for (int rank = 0; rank < kRanks; ++rank) {
      model.zero_grad();
      torch::autograd::backward({loss_of(model, epoch, rank)}, {});
      for (const auto& p : model.named_parameters()) {
        const auto grad = p.value().grad().to(at::kFloat);
        auto& sum = sums[p.key()];
        sum = sum.defined() ? sum + grad : grad;
      }
    }
    const at::NoGradGuard no_grad;
    for (auto& p : model.named_parameters()) {
      p.value().add_(sums.at(p.key()).div(kRanks).to(p.value().scalar_type()), -kLr);
    }
  }
  std::map<std::string, at::Tensor> values;
  for (const auto& p : model.named_parameters()) values[p.key()] = p.value().detach();
  return values;
}

template <class Handle>
void train_and_compare(tessera::World& world, Handle& model, const char* what) {
  const auto optimizer = tessera::make_sgd(model, {kLr, 0.0, 0.0, {}});
  double loss_value = 0;
  for (int epoch = 0; epoch < 2; ++epoch) {
    const auto loss = loss_of(model, epoch, world.rank());
    torch::autograd::backward({loss}, {});
    optimizer->step();
    model.zero_grad();
    loss_value = loss.template item<double>();
  }
  const auto expected = train_plain();
  model.visit_full_parameters([&](const std::string& name, const at::Tensor& value) {
    TESSERA_CHECK(at::equal(value, expected.at(name)), tessera::ErrorKind::kNumeric, what, ": ",
                  name, " differs from the plain model");
  });
  if (world.rank() == 0) {
    std::printf("%-12s loss %.6f, all 6 parameters equal to the plain model's, bit for bit\n", what,
                loss_value);
  }
}

}  // namespace

int main() {
  return tessera::launch(kRanks, [](tessera::World& world) {
    const auto mesh = world.mesh(tessera::MeshShape::dense(1, 1, world.size(), 1, 1));

    // SGD keeps no master copy of bf16 shards: that has to be asked for.
    tessera::PrecisionPolicy policy;
    policy.optimizer.master = tessera::MasterRequest::kNone;

    auto whole = tessera::fully_shard(std::make_shared<Mixed>(), mesh, policy);
    if (world.rank() == 0) std::printf("%s\n", whole.contract_table().c_str());
    train_and_compare(world, whole, "one unit:");

    auto nested =
        tessera::fully_shard(std::make_shared<Nested>(Mixed(), mesh, policy), mesh, policy);
    train_and_compare(world, nested, "nested units:");
  });
}
