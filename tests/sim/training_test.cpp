// Training on the simulated device: the bits of the CPU, forward, backward and update, on default
// and side streams, of one rank and of two that are threads.
#include <ATen/ATen.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <barrier>
#include <cmath>
#include <thread>

#include "sim/streams.h"
#include "support/test.h"

namespace tessera::sim::training_test {
namespace {

using Tensors = std::vector<at::Tensor>;

/// Sets up a rank's thread: autograd has one thread a device, on which ranks would mix.
struct OwnBackward {
  OwnBackward() { c10::AutogradState::get_tls_state().set_multithreading_enabled(false); }
  ~OwnBackward() { c10::AutogradState::get_tls_state().set_multithreading_enabled(true); }
};

struct Model {
  Tensors weights;
  std::function<at::Tensor(const Tensors& weights, const at::Tensor& x)> loss;
  at::Tensor x;
};

Model mlp() {
  return {{drawn(1, {32, 16}), drawn(2, {32}), drawn(3, {4, 32})},
          [](const Tensors& w, const at::Tensor& x) {
            const at::Tensor hidden = at::silu(at::linear(x, w[0], w[1]));
            return at::cross_entropy_loss(at::linear(hidden, w[2]),
                                          x.select(1, 0).to(at::kLong).remainder(4), {},
                                          at::Reduction::Sum, -100);
          },
          drawn(4, {8, 16})};
}

/// Causal attention with a norm before and a residual: softmax, masks, views and transposes.
Model attention() {
  const auto loss = [](const Tensors& w, const at::Tensor& x) {
    const std::int64_t rows = x.size(0), positions = x.size(1), heads = 2;
    const at::Tensor scale = at::rsqrt(x.pow(2).mean(-1, true) + 1e-6);
    const Tensors parts = at::linear(x * scale * w[0], w[1]).chunk(3, -1);
    const auto by_head = [&](const at::Tensor& part) {
      return part.view({rows, positions, heads, -1}).transpose(1, 2);
    };
    const at::Tensor q = by_head(parts[0]), k = by_head(parts[1]), v = by_head(parts[2]);
    const at::Tensor behind =
        at::ones({positions, positions}, x.options().dtype(at::kBool)).triu(1);
    const at::Tensor scores = at::matmul(q, k.transpose(2, 3)) / std::sqrt(8.0);
    const at::Tensor weights = at::softmax(scores.masked_fill(behind, -INFINITY), -1);
    const at::Tensor mixed = at::matmul(weights, v).transpose(1, 2).reshape(x.sizes());
    return (x + at::linear(mixed, w[2])).pow(2).sum();
  };
  return {
      {drawn(1, {16}).abs(), drawn(2, {48, 16}), drawn(3, {16, 16})}, loss, drawn(4, {3, 7, 16})};
}

/// Losses of three steps, then the last gradients, the weights and both moments, on the device.
Tensors train(const Model& model, const at::Device& device) {
  Tensors weights, first, second, steps, results;
  for (const at::Tensor& weight : model.weights) {
    weights.push_back(weight.to(device).clone().requires_grad_(true));
    first.push_back(at::zeros_like(weight, at::TensorOptions(device)));
    second.push_back(at::zeros_like(first.back()));
    steps.push_back(at::zeros({}, at::TensorOptions(at::kFloat).device(device)));
  }
  const at::Tensor x = model.x.to(device);
  Tensors grads;
  for (int step = 0; step < 3; ++step) {
    const at::Tensor loss = model.loss(weights, x);
    results.push_back(loss.detach());
    torch::autograd::backward({loss}, {});
    Tensors values;
    grads.clear();
    for (at::Tensor& weight : weights) {
      grads.push_back(weight.grad());
      values.push_back(weight.detach());
      weight.mutable_grad() = at::Tensor();
    }
    for (const at::Tensor& number : steps) number.add_(1);
    at::_fused_adamw_(values, grads, first, second, {}, steps, 1e-2, 0.9, 0.95, 0.1, 1e-8,
                      /*amsgrad=*/false, /*maximize=*/false);
  }
  for (const Tensors& each : {grads, weights, first, second}) {
    for (const at::Tensor& tensor : each) results.push_back(tensor.detach());
  }
  return results;
}

void expect_same(const Tensors& found, const Tensors& expected, const std::string& what) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    expect_same_bits(found[i], expected[i], what + ", result " + std::to_string(i));
  }
}

TEST(Training, HasTheBitsOfTheCpu) {
  for (const Model& model : {mlp(), attention()}) {
    const Tensors expected = train(model, at::kCPU);
    expect_same(train(model, device(0)), expected, "autograd's own threads");
    const OwnBackward own;
    expect_same(train(model, device(1)), expected, "on this thread");
    const Tensors aside = run_on(new_stream(2), [&] {
      Tensors results = train(model, device(2));
      for (at::Tensor& result : results) result = result.cpu();
      return results;
    });
    expect_same(aside, expected, "on a side stream");
  }
}

// Values that a step makes on one stream and reads on another, each way with events.
TEST(Training, PassesBetweenStreamsWithEvents) {
  const OwnBackward own;
  const at::Tensor first = drawn(1, {16, 16}), second = drawn(3, {16, 16}), x = drawn(2, {4, 16});
  const auto run = [&](const at::Device& where, bool streams, bool waits) {
    const at::Tensor w = first.to(where).clone().requires_grad_(true);
    const at::Tensor other = second.to(where).clone().requires_grad_(true);
    const at::Tensor input = x.to(where);
    std::optional<c10::Stream> compute, side;
    if (streams) {
      compute = current(0);
      side = new_stream(0);
    }
    const auto order = [&](const auto& waiting, const auto& before) {
      if (streams && waits) wait_for(*waiting, *before);
    };
    const at::Tensor hidden = at::linear(input, w).relu();
    order(side, compute);
    at::Tensor total;
    {
      const c10::OptionalStreamGuard here(side);
      total = at::linear(hidden, other).pow(2).sum();
    }
    order(compute, side);
    const at::Tensor loss = total * 2;
    torch::autograd::backward({loss}, {});
    return Tensors{loss.detach(), w.grad(), other.grad()};
  };
  const Tensors expected = run(at::kCPU, false, false);
  EXPECT_EQ(race_of([&] { expect_same(run(device(0), true, true), expected, "two streams"); }), "");
  EXPECT_NE(race_of([&] { run(device(0), true, /*waits=*/false); }), "");
}

// Hooks and nodes of a device's graph run where backward was called, once multithreading is off.
TEST(Training, BackwardStaysOnItsThread) {
  struct Where : torch::autograd::Function<Where> {
    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                              std::int64_t place) {
      context->saved_data["place"] = place;
      return x.clone();
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   const torch::autograd::variable_list& grads) {
      *reinterpret_cast<std::thread::id*>(context->saved_data["place"].toInt()) =
          std::this_thread::get_id();
      return {grads[0], at::Tensor()};
    }
  };
  const auto thread_of_backward = [] {
    std::thread::id id;
    const at::Tensor leaf = at::ones({2}, on(0)).requires_grad_(true);
    torch::autograd::backward({Where::apply(leaf, reinterpret_cast<std::int64_t>(&id)).sum()}, {});
    return id;
  };
  EXPECT_NE(thread_of_backward(), std::this_thread::get_id());
  const OwnBackward own;
  EXPECT_EQ(thread_of_backward(), std::this_thread::get_id());
}

/// Two ranks as threads: gradients are added over both in rank order, by tensor operations on each
/// rank's stream behind the other's event. Whether rank 1 records that event behind its backward.
std::vector<Tensors> train_two_ranks(int devices, bool records, std::vector<std::string>* races) {
  const Tensors whole = mlp().weights;
  Tensors grads[2];
  c10::Event ready[2] = {c10::Event(c10::DeviceType::PrivateUse1),
                         c10::Event(c10::DeviceType::PrivateUse1)};
  std::barrier meet(2);
  std::vector<Tensors> results(2);
  const auto serve = [&](int rank) {
    const RankScope scope(rank);
    const OwnBackward own;
    const int index = rank % devices;
    const c10::DeviceGuard mine(device(index));
    const c10::StreamGuard stream(new_stream(index));
    const Model model = mlp();
    Tensors weights;
    for (const at::Tensor& weight : whole) {
      weights.push_back(weight.to(device(index)).requires_grad_(true));
    }
    const at::Tensor x = model.x.narrow(0, 4 * rank, 4).to(device(index));
    torch::autograd::backward({model.loss(weights, x)}, {});
    for (at::Tensor& weight : weights) grads[rank].push_back(weight.grad());
    if (records || rank == 0) ready[rank].record(current(index));
    meet.arrive_and_wait();
    // A copy between devices runs on the source's current stream of this thread.
    const int other = (1 - rank) % devices;
    ready[1 - rank].block(current(other));
    ready[1 - rank].block(current(index));
    try {
      for (std::size_t i = 0; i < weights.size(); ++i) {
        const at::Tensor first = grads[0][i].to(device(index)),
                         second = grads[1][i].to(device(index));
        results[static_cast<std::size_t>(rank)].push_back((first + second).cpu());
      }
    } catch (const Race&) {
    }
    guard().synchronizeDevice(static_cast<c10::DeviceIndex>(index));
    meet.arrive_and_wait();
    meet.arrive_and_wait();
  };
  std::thread one([&] { serve(0); }), two([&] { serve(1); });
  one.join();
  two.join();
  for (Tensors& each : grads) each.clear();
  settle();
  *races = take_races();
  return results;
}

TEST(Training, TwoRanksAsThreadsAddTheirGradients) {
  const Model model = mlp();
  Tensors expected;
  for (int rank = 0; rank < 2; ++rank) {
    Tensors weights;
    for (const at::Tensor& weight : model.weights) {
      weights.push_back(weight.clone().requires_grad_(true));
    }
    torch::autograd::backward({model.loss(weights, model.x.narrow(0, 4 * rank, 4))}, {});
    for (std::size_t i = 0; i < weights.size(); ++i) {
      if (rank == 0) {
        expected.push_back(weights[i].grad());
      } else {
        expected[i] = expected[i] + weights[i].grad();
      }
    }
  }
  for (const int devices : {1, 2}) {
    std::vector<std::string> races;
    for (const Tensors& found : train_two_ranks(devices, /*records=*/true, &races)) {
      expect_same(found, expected, std::to_string(devices) + " devices");
    }
    EXPECT_TRUE(races.empty());
    train_two_ranks(devices, /*records=*/false, &races);
    EXPECT_FALSE(races.empty()) << "rank 0 reads gradients of rank 1";
  }
}

}  // namespace
}  // namespace tessera::sim::training_test
