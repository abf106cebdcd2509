// [Note: direct slots]: products written where their gradient will be have the bits of products
// that are copied there, and need no other memory of a weight's size.
//
// The reference is a `grad_dtype` that is the products' own dtype, which rounds nothing and forbids
// direct writes.
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <stdexcept>

#include "dist/held_bytes.h"
#include "nn/grouped_linear.h"
#include "nn/linear.h"
#include "support/plain.h"
#include "support/test.h"

namespace tessera::test::direct_slots_test {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Sizes {
  std::int64_t rows, in, out;
};

/// A linear layer, then experts of both layouts: five groups, of which two have no rows.
class Layer : public torch::nn::Module {
 public:
  Layer(const Sizes& sizes, int uses) : uses_(uses) {
    const auto [rows, in, out] = sizes;
    linear_ = register_module("linear", std::make_shared<nn::Linear>(in, out, nn::Bias::kYes));
    linear_->weight.set_data(seeded(1, {out, in}));
    linear_->bias.set_data(seeded(2, {out}));
    experts_ = register_parameter("experts", seeded(3, {5, out, out}));
    others_ = register_parameter("others", seeded(4, {5, out, in}));
    bias_ = register_parameter("bias", seeded(5, {5, in}));
    offsets_ = {0, 0, rows / 3, rows / 3, rows / 2, rows};
  }
  at::Tensor forward(const at::Tensor& x) {
    if (!recomputes) return body(x);
    return checkpoint([this](const std::vector<at::Tensor>& in) { return body(in[0]); }, {x});
  }
  bool recomputes = false;

 private:
  at::Tensor body(at::Tensor x) {
    for (int i = 0; i < uses_; ++i) {
      x = at::tanh(linear_->forward(x));
      x = at::tanh(nn::grouped_linear(x, {experts_}, offsets_));
      x = nn::grouped_linear(x, {others_, bias_, nn::GroupLayout::kInOut}, offsets_);
    }
    return x;
  }

  int uses_;
  std::shared_ptr<nn::Linear> linear_;
  at::Tensor experts_, others_, bias_;
  nn::GroupOffsets offsets_;
};

enum class Way { kDirect, kCopied };

PrecisionPolicy policy_of(Way way, std::optional<DType> compute, std::optional<DType> accumulate) {
  PrecisionPolicy policy;
  policy.param_dtype = compute;
  policy.accumulate_dtype = accumulate;
  if (accumulate == DType::kBFloat16) policy.reduce_dtype = accumulate;
  if (way == Way::kDirect) return policy;
  PrecisionRule rule;
  rule.match = {"*"};
  rule.grad_dtype = compute.value_or(DType::kFloat32);
  policy.rules = {rule};
  return policy;
}

/// kAutocast: backwards run inside it, where products have another dtype than the slots.
enum class Schedule { kSynced, kTogether, kDeferred, kRecomputed, kAutocast };

class Autocast {
 public:
  explicit Autocast(bool is_on) : before_(at::autocast::is_autocast_enabled(at::kCPU)) {
    at::autocast::set_autocast_enabled(at::kCPU, is_on);
  }
  ~Autocast() { at::autocast::set_autocast_enabled(at::kCPU, before_); }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  bool before_;
};

Tensors gradients(World& world, const Sizes& sizes, const PrecisionPolicy& policy,
                  Schedule schedule, int uses = 1) {
  auto module = std::make_shared<Layer>(sizes, uses);
  module->recomputes = schedule == Schedule::kRecomputed;
  auto handle = fully_shard(module, data_mesh(world), policy);
  handle.set_defer_weight_gradients(schedule == Schedule::kDeferred);
  const Autocast around(schedule == Schedule::kAutocast);
  const bool together = schedule == Schedule::kTogether || schedule == Schedule::kAutocast;
  for (int i = 0; i < 3; ++i) {
    handle.set_requires_gradient_sync(i == 2 || !together);
    const auto seed = static_cast<std::uint64_t>(100 + 10 * i + world.rank());
    backward(squares(handle.forward(seeded(seed, {sizes.rows, sizes.in}))));
  }
  if (schedule == Schedule::kDeferred) handle.run_weight_gradients();
  return whole_gradients(handle);
}

// Naive: an out of other strides, with which the library takes another way through its product, or
// a product that adds to the slot. At 512 summands these give other bits; rows of sizes that are no
// multiples of 16 bytes go another way than those that are.
TEST(DirectSlots, HaveTheBitsOfProductsThatAreCopied) {
  using Dtypes = std::pair<std::optional<DType>, std::optional<DType>>;
  const auto dtypes = {Dtypes{}, Dtypes{DType::kFloat64, {}},
                       Dtypes{DType::kBFloat16, DType::kBFloat16}};
  for (const int count : {1, 2}) {
    ranks(count).run([&](World& world) {
      at::set_num_threads(1);  // else threads of products wait for each other when other work runs
      for (const Sizes& sizes :
           {Sizes{512, 48, 80}, Sizes{33, 17, 5}, Sizes{6, 1, 8}, Sizes{1, 8, 1}, Sizes{0, 4, 4}}) {
        for (const auto& [compute, accumulate] : dtypes) {
          for (const auto schedule : {Schedule::kSynced, Schedule::kTogether, Schedule::kDeferred,
                                      Schedule::kRecomputed, Schedule::kAutocast}) {
            const auto run = [&](Way way) {
              return gradients(world, sizes, policy_of(way, compute, accumulate), schedule);
            };
            expect_same(run(Way::kDirect), run(Way::kCopied),
                        concat(sizes.rows, " rows, ", sizes.in, " to ", sizes.out, ", compute ",
                               compute ? to_string(*compute) : "as stored", ", schedule ",
                               static_cast<int>(schedule)));
          }
        }
      }
    });
  }
}

// Naive: the first of three uses goes to the slot, and autograd adds up the two others: (b + c) + a
// in the place of (a + b) + c.
TEST_ON_RANKS(DirectSlots, UsesThatAutogradAddsUpAreLeftToIt, 2) {
  for (const auto schedule : {Schedule::kSynced, Schedule::kTogether}) {
    const auto run = [&](Way way) {
      return gradients(world, {64, 24, 24}, policy_of(way, {}, {}), schedule, /*uses=*/3);
    };
    expect_same(run(Way::kDirect), run(Way::kCopied));
  }
}

/// Returns the most bytes that `act` takes on top of what exists.
template <class Act>
std::int64_t most_bytes(const Act& act) {
  HeldBytes counter;
  const std::int64_t before = counter.restart();
  act();
  return counter.most() - before;
}

// Naive: a product, then a copy. Later ones are products, then additions: there the counter sees
// what it does not see before.
TEST(DirectSlots, NothingOfTheSizeOfAWeightIsMade) {
  constexpr Sizes kSizes{6, 128, 128};
  constexpr std::int64_t kExperts = 5 * 128 * 128 * 4;  // the largest
  constexpr std::int64_t kLinear = 128 * 128 * 4;       // the smallest
  for (const int count : {1, 2}) {
    for (const Schedule schedule :
         {Schedule::kTogether, Schedule::kDeferred, Schedule::kRecomputed}) {
      ranks(count).run([&](World& world) {
        at::set_num_threads(1);
        auto module = std::make_shared<Layer>(kSizes, 1);
        module->recomputes = schedule == Schedule::kRecomputed;
        auto handle = fully_shard(module, data_mesh(world));
        handle.set_reshard_after_forward(false);
        handle.set_reshard_after_backward(false);
        const bool defers = schedule == Schedule::kDeferred;
        handle.set_defer_weight_gradients(defers);
        const auto pass = [&](bool syncs) {
          handle.set_requires_gradient_sync(syncs);
          const at::Tensor loss = squares(handle.forward(seeded(9, {kSizes.rows, kSizes.in})));
          return most_bytes([&] {
            backward(loss);
            if (defers) handle.run_weight_gradients();
          });
        };
        for (int step = 0; step < 3; ++step) {  // memory of steps is made in the first ones
          const std::int64_t first = pass(false);
          const std::int64_t later = pass(true);
          handle.zero_grad();
          if (step < 2) continue;
          EXPECT_LT(first, kLinear / 2) << count << ", " << static_cast<int>(schedule);
          EXPECT_GE(later, kExperts) << count << ", " << static_cast<int>(schedule);
        }
      });
    }
  }
}

/// x * w. Its kernel may throw when half of the slot is written; then the gradient goes through
/// autograd.
struct TakesAnotherWay : torch::autograd::Function<TakesAnotherWay> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& w,
                            bool throws) {
    context->save_for_backward({x, w});
    context->saved_data["throws"] = throws;
    return x * w;
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = context->get_saved_variables();
    using Reads = grad::Product::Reads;
    const bool throws = context->saved_data["throws"].toBool();
    const grad::Product product{.sizes = saved[1].sizes().vec(),
                                .dtype = at::kFloat,
                                .reads = {grads[0], saved[0]},
                                .form = [](const Reads& of) { return (of[0] * of[1]).sum(0); },
                                .write =
                                    [throws](const Reads& of, const at::Tensor& slot) {
                                      slot.narrow(0, 0, 2).fill_(1e30);
                                      if (throws) throw std::runtime_error("the kernel went wrong");
                                      at::Tensor out = slot;
                                      at::sum_out(out, of[0] * of[1], {0});
                                    }};
    variable_list result(3);
    try {
      result[1] = grad::weight_gradient(saved[1], product);
    } catch (const std::runtime_error&) {
      result[1] = product.formed();
    }
    return result;
  }
};

struct Scaled : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return TakesAnotherWay::apply(x, weight, throws); }
  at::Tensor weight = register_parameter("weight", seeded(1, {5}));
  bool throws = false;
};

// Naive: a slot that counts as filled from the moment it is shared; what comes is added to what the
// kernel left.
TEST(DirectSlots, AfterAKernelThatThrewTheSlotIsAsItWas) {
  for (const int count : {1, 2}) {
    ranks(count).run([](World& world) {
      const auto module = std::make_shared<Scaled>();
      auto handle = fully_shard(module, data_mesh(world));
      std::vector<Tensors> found;
      for (const bool throws : {false, true}) {
        module->throws = throws;
        for (int i = 0; i < 2; ++i) {
          handle.set_requires_gradient_sync(i == 1);
          backward(squares(handle.forward(input_of(world.rank(), i, 5))));
        }
        found.push_back(whole_gradients(handle));
        handle.zero_grad();
      }
      expect_same(found[1], found[0]);
    });
  }
}

}  // namespace
}  // namespace tessera::test::direct_slots_test
