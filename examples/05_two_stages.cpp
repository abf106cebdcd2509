// A pipeline of your own: a model in two parts on two ranks, which work on different micro-batches
// at the same time.
//
//   build/release/examples/05_two_stages
//
// The ranks learn a fixed map from random inputs, each with its own half of the model and an
// optimizer over it; the rank of the last stage prints the loss, which falls below 0.01.
#include <tessera/pipeline.h>
#include <tessera/tessera.h>
#include <torch/nn/modules/linear.h>

#include <cmath>
#include <cstdio>

namespace {

constexpr std::int64_t kRows = 16;  // of a micro-batch
constexpr std::int64_t kWidth = 64;
constexpr int kMicroBatches = 4;

struct First : torch::nn::Module {
  First() { linear = register_module("linear", torch::nn::Linear(16, kWidth)); }
  at::Tensor forward(const at::Tensor& x) { return at::tanh(linear(x)); }
  torch::nn::Linear linear{nullptr};
};

struct Second : torch::nn::Module {
  Second() { linear = register_module("linear", torch::nn::Linear(kWidth, 4)); }
  at::Tensor forward(const at::Tensor& h) { return linear(h); }
  torch::nn::Linear linear{nullptr};
};

/// Rows that depend on step and micro-batch: every rank knows them, each uses what it needs.
at::Tensor rows(int step, std::int64_t micro_batch) {
  const auto t = at::arange(kRows * 16, at::TensorOptions().dtype(at::kFloat)).view({kRows, 16});
  return at::sin(t * (1.7 + 0.3 * static_cast<double>(micro_batch)) + step);
}

/// Trains this rank's part; returns the last loss where it is known, else 0.
template <class Handle>
double train(tessera::Pipeline& pipeline, Handle& part) {
  // What the first stage gives to the second one; a gradient of it travels back.
  const tessera::pipeline::BoundaryTensor hidden{{kRows, kWidth}, at::kFloat};
  pipeline.set_stages({tessera::make_stage(part, {hidden}, {hidden})}, &part);

  tessera::AdamWOptions options;
  options.lr = 1e-2;
  options.weight_decay = 0.0;
  const auto optimizer = tessera::make_adamw(part, options);

  const auto target =
      at::sin(at::arange(16 * 4, at::TensorOptions().dtype(at::kFloat))).view({16, 4}) * 0.3;
  double last = 0;
  for (int step = 0; step < 200; ++step) {
    const auto losses = pipeline.step(
        [&](std::int64_t micro_batch) {
          return tessera::Pipeline::Tensors{rows(step, micro_batch)};
        },
        [&](std::int64_t micro_batch, const tessera::Pipeline::Tensors& outputs) {
          const auto wanted = at::mm(rows(step, micro_batch), target);
          return (outputs[0] - wanted).pow(2).mean() / kMicroBatches;
        });
    optimizer->step();
    part.zero_grad();
    last = 0;
    for (const auto& loss : losses) last += loss.template item<double>();
    if (pipeline.has_last() && step % 50 == 0) std::printf("step %3d  loss %.4f\n", step, last);
  }
  return last;
}

}  // namespace

int main() {
  return tessera::launch(2, [](tessera::World& world) {
    // 1. Two stages of one rank each.
    const auto mesh = world.mesh(tessera::MeshShape::dense(2, 1, 1, 1, 1));

    // 2. The schedule says which stages this rank has, and what it computes when.
    tessera::PipelineOptions options;
    options.schedule = "1F1B";
    options.micro_batches = kMicroBatches;
    tessera::Pipeline pipeline(mesh, options);

    // 3. Only this rank's part of the model is made.
    at::manual_seed(1);
    double last = 0;
    if (pipeline.has_first()) {
      auto part = tessera::fully_shard(std::make_shared<First>(), mesh);
      train(pipeline, part);
    } else {
      auto part = tessera::fully_shard(std::make_shared<Second>(), mesh);
      last = train(pipeline, part);
      std::printf("final loss %.4f (expected below 0.01)\n", last);
    }
    TESSERA_CHECK(std::isfinite(last) && last < 0.01, tessera::ErrorKind::kNumeric,
                  "the loss did not fall: ", last);
  });
}
