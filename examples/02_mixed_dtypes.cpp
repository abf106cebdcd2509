// One unit with parameters of two dtypes: the program of pytorch issue 156784, which FSDP2 refuses.
//
//   build/release/examples/02_mixed_dtypes
//
// Linear(10,20), ReLU, Linear(20,30), ReLU in fp32, then Linear(30,10) in bf16; mean squared error,
// SGD, a learning rate that falls. Two ranks train it as one unit and as nested units, each with
// the dtypes as stored and with a precision policy that computes in bf16, and compare all four with
// the plain model, PyTorch's SGD and StepLR on all rows, bit for bit.
#include <tessera/tessera.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/functional/linear.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <string>

namespace {

constexpr int kRanks = 2;
constexpr int kEpochs = 4;
constexpr double kLr = 0.1;
// C++'s schedulers change nothing at their first step: epochs 0 and 1 have the first rate.
constexpr unsigned kStepSize = 1;
constexpr double kGamma = 0.5;

struct Mixed : torch::nn::Module {
  Mixed() {
    at::manual_seed(3);
    layer1 = register_module("layer1", torch::nn::Linear(10, 20));
    layer2 = register_module("layer2", torch::nn::Linear(20, 30));
    layer3 = register_module("layer3", torch::nn::Linear(30, 10));
    layer3->to(at::kBFloat16);
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = at::relu(layer1(x));
    y = at::relu(layer2(y));
    return layer3(y.to(at::kBFloat16)).to(at::kFloat);
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
    auto y = at::relu(layer1->forward(x));
    y = at::relu(layer2->forward(y));
    return layer3->forward(y.to(at::kBFloat16)).to(at::kFloat);
  }
  std::shared_ptr<Layer> layer1, layer2, layer3;
};

/// Whether the dtypes are those of storage or bf16 everywhere.
enum class Compute { kAsStored, kBFloat16 };

/// The plain model with its parameters cast on the way, which is what the policy says.
at::Tensor plain_forward(Mixed& model, const at::Tensor& x, Compute compute) {
  if (compute == Compute::kAsStored) return model.forward(x);
  const auto through = [](const torch::nn::Linear& layer, const at::Tensor& y) {
    return torch::nn::functional::linear(y, layer->weight.to(at::kBFloat16),
                                         layer->bias.to(at::kBFloat16));
  };
  auto y = at::relu(through(model.layer1, x.to(at::kBFloat16)));
  y = at::relu(through(model.layer2, y));
  return through(model.layer3, y).to(at::kFloat);
}

at::Tensor rows(int epoch, int rank) {
  return at::cos(at::arange(80, at::TensorOptions().dtype(at::kFloat)).view({8, 10}) * (1 + rank) +
                 epoch);
}

at::Tensor loss_of(const at::Tensor& output, int epoch, int rank) {
  return at::mse_loss(output, rows(epoch + 7, rank));
}

struct Trained {
  std::map<std::string, at::Tensor> values;
  double lr = 0;  ///< after the last epoch
};

/// All epochs on one process: each rank's rows, gradients summed in fp32 in rank order, averaged.
Trained train_plain(Compute compute) {
  Mixed model;
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(kLr));
  torch::optim::StepLR scheduler(optimizer, kStepSize, kGamma);
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    std::map<std::string, at::Tensor> sums;
    for (int rank = 0; rank < kRanks; ++rank) {
      model.zero_grad();
      const auto output = plain_forward(model, rows(epoch, rank), compute);
      torch::autograd::backward({loss_of(output, epoch, rank)}, {});
      for (const auto& p : model.named_parameters()) {
        const auto grad = p.value().grad().to(at::kFloat);
        auto& sum = sums[p.key()];
        sum = sum.defined() ? sum + grad : grad;
      }
    }
    for (auto& p : model.named_parameters()) {
      p.value().mutable_grad() = sums.at(p.key()).div(kRanks).to(p.value().scalar_type());
    }
    optimizer.step();
    scheduler.step();
  }
  Trained trained;
  for (const auto& p : model.named_parameters()) trained.values[p.key()] = p.value().detach();
  trained.lr = optimizer.param_groups().front().options().get_lr();
  return trained;
}

bool same_bits(const at::Tensor& one, const at::Tensor& other) {
  return one.scalar_type() == other.scalar_type() && one.sizes() == other.sizes() &&
         std::memcmp(one.contiguous().const_data_ptr(), other.contiguous().const_data_ptr(),
                     one.nbytes()) == 0;
}

template <class Handle>
void train_and_compare(tessera::World& world, Handle& model, Compute compute, const char* what) {
  const auto optimizer = tessera::make_sgd(model, {kLr, 0.0, 0.0, {}});
  torch::optim::StepLR scheduler(*optimizer, kStepSize, kGamma);
  double loss_value = 0;
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    const auto loss = loss_of(model.forward(rows(epoch, world.rank())), epoch, world.rank());
    torch::autograd::backward({loss}, {});
    optimizer->step();
    model.zero_grad();
    scheduler.step();
    loss_value = loss.template item<double>();
  }
  const auto expected = train_plain(compute);
  TESSERA_CHECK(optimizer->lr() == expected.lr && expected.lr < kLr, tessera::ErrorKind::kNumeric,
                what, ": found the learning rate ", optimizer->lr(), ", expected ", expected.lr,
                " below ", kLr);
  model.visit_full_parameters([&](const std::string& name, const at::Tensor& value) {
    TESSERA_CHECK(same_bits(value, expected.values.at(name)), tessera::ErrorKind::kNumeric, what,
                  ": ", name, " differs from the plain model");
  });
  if (world.rank() == 0) {
    std::printf("%-24s loss %.6f, all 6 parameters equal to the plain model's, bit for bit\n", what,
                loss_value);
  }
}

}  // namespace

int main() {
  return tessera::launch(kRanks, [](tessera::World& world) {
    const auto mesh = world.mesh(tessera::MeshShape::dense(1, 1, world.size(), 1, 1));

    for (const auto compute : {Compute::kAsStored, Compute::kBFloat16}) {
      const bool narrow = compute == Compute::kBFloat16;
      tessera::PrecisionPolicy policy;
      if (narrow) policy.param_dtype = tessera::DType::kBFloat16;
      // SGD keeps no master copy of bf16 shards: that has to be asked for.
      policy.optimizer.master = tessera::MasterRequest::kNone;

      auto whole = tessera::fully_shard(std::make_shared<Mixed>(), mesh, policy);
      if (world.rank() == 0) std::printf("%s\n", whole.contract_table().c_str());
      train_and_compare(world, whole, compute, narrow ? "one unit, in bf16:" : "one unit:");

      auto nested =
          tessera::fully_shard(std::make_shared<Nested>(Mixed(), mesh, policy), mesh, policy);
      train_and_compare(world, nested, compute,
                        narrow ? "nested units, in bf16:" : "nested units:");
    }
  });
}
