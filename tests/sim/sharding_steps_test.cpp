// Effects of a step of fully_shard on a device, except its bits: where the host waits, on which
// thread a backward runs, and what a failure and a destroyed model leave behind.
#include <ATen/ATen.h>
#include <c10/core/AutogradState.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <torch/optim/sgd.h>

#include <array>
#include <exception>
#include <optional>
#include <stdexcept>

#include "comm/group.h"
#include "comm/host_read.h"
#include "comm/stream.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "nn/grouped_linear.h"
#include "sim/ranks.h"
#include "sim/reads.h"
#include "sim/streams.h"
#include "support/plain.h"
#include "support/test.h"
#include "tessera/clip.h"
#include "tessera/optim.h"

namespace tessera::sim::sharding_steps_test {
namespace {

using comm::Stream;
using comm::StreamScope;

constexpr std::int64_t kWidth = 5;

/// By device. What ranks on simulated devices have found has the bits of the CPU's.
using ResultsOf = std::map<std::string, std::vector<at::Tensor>>;
void expect_bits_of_the_cpu(const ResultsOf& results, const std::string& what) {
  for (const char* const device : {"sim", "sim:0"}) {
    ASSERT_EQ(results.at(device).size(), results.at("cpu").size()) << what;
    for (std::size_t i = 0; i < results.at(device).size(); ++i) {
      expect_same_bits(results.at(device)[i], results.at("cpu")[i],
                       concat(what, " on ", device, ", result ", i));
    }
  }
}

at::Tensor input_on(const World& world, int step) {
  return test::input_of(world.rank(), step, kWidth).to(world.device()).mul(1);
}

/// Host waits of the third step: of libtorch, by name, and reads of the library.
struct Waits {
  std::map<std::string, std::int64_t> of_device;
  int reads = 0;
};

struct Step {
  bool clips = false;
  bool keeps = false;
  PrecisionPolicy policy = {};
};

Waits waits_of(const Step& step, int ranks) {
  std::vector<Waits> of_ranks(static_cast<std::size_t>(ranks));
  on_ranks({ranks, "sim"}, [&](World& world) {
    test::ShardedChain model(test::data_mesh(world), 1, 3, kWidth, step.policy);
    if (step.keeps) model.handle.set_reshard_after_backward(false);
    SgdOptions options;
    options.lr = 0.001;
    const auto optimizer = make_sgd(model.handle, options);
    for (int number = 0; number < 3; ++number) {
      const std::array<at::Tensor, 2> inputs{input_on(world, 2 * number),
                                             input_on(world, 2 * number + 1)};
      take_counts();
      const Reads reads;
      for (const at::Tensor& x : inputs) test::backward(test::squares(model.handle.forward(x)));
      if (step.clips) clip_grad_norm(model.handle, 1.0);
      optimizer->step();
      model.handle.zero_grad();
      of_ranks[static_cast<std::size_t>(world.rank())] = {take_counts().waits, reads.count()};
    }
  });
  for (const Waits& one : of_ranks) {
    EXPECT_EQ(one.reads, of_ranks.front().reads);
    EXPECT_EQ(one.of_device, of_ranks.front().of_device);
  }
  return of_ranks.front();
}

// Naive: one read a kept unit, and steps that wait where no number was requested.
TEST(StepOnADevice, TheHostWaitsWhereItIsSaidAlone) {
  for (const PrecisionPolicy& policy : {PrecisionPolicy(), test::in_bfloat16()}) {
    for (const int ranks : {1, 2, 3}) {
      SCOPED_TRACE(concat(ranks, " ranks"));
      const Waits plain = waits_of({.policy = policy}, ranks);
      EXPECT_THAT(plain.of_device, IsEmpty());
      EXPECT_EQ(plain.reads, 0);
      const Waits clipped = waits_of({.clips = true, .policy = policy}, ranks);
      EXPECT_THAT(clipped.of_device, IsEmpty());
      EXPECT_EQ(clipped.reads, 1);
      // Whether what is kept is still the shards': once a forward, for all units.
      const Waits kept = waits_of({.keeps = true, .policy = policy}, ranks);
      EXPECT_THAT(kept.of_device, IsEmpty());
      const bool is_whole = ranks == 1 && !policy.param_dtype;
      EXPECT_EQ(kept.reads, is_whole ? 0 : 2);
    }
  }
}

/// Bytes of the pool after two steps.
std::int64_t pool_bytes(int blocks, std::optional<std::int64_t> in_flight_bytes) {
  std::int64_t bytes = 0;
  on_ranks({2, "sim"}, [&](World& world) {
    ShardOptions root;
    root.in_flight_bytes = in_flight_bytes;
    test::ShardedChain model(test::data_mesh(world), 1, blocks, kWidth, {}, root);
    for (int step = 0; step < 2; ++step) {
      test::backward(test::squares(model.handle.forward(input_on(world, step))));
      model.handle.zero_grad();
    }
    if (world.rank() == 0) bytes = model.handle.unit()->runtime().pool()->total_bytes();
  });
  return bytes;
}

/// Who clears gradients before the next step.
enum class Clears { kHandle, kOptimizerOfTorch, kEachByHand };

/// A rank's device memory, except the pool, whose blocks stay: bytes that are held once gradients
/// are cleared, and the most that a forward needs, step by step.
struct Held {
  std::vector<std::int64_t> cleared;
  std::vector<std::int64_t> forward_peak;
  std::int64_t with_sums = 0;
  std::int64_t sums = 0;  ///< their bytes
};

std::int64_t sums_of(const fsdp::Runtime& runtime,
                     const at::Tensor& (fsdp::Bucket::*which)() const) {
  std::int64_t bytes = 0;
  for (const auto* unit : runtime.units()) {
    for (const auto& bucket : unit->buckets()) {
      const at::Tensor& sums = (*bucket.*which)();
      if (sums.defined()) bytes += static_cast<std::int64_t>(sums.nbytes());
    }
  }
  return bytes;
}

Held held_by_steps(World& world, int replicas, const PrecisionPolicy& policy, Clears clears) {
  test::ShardedChain model(test::data_mesh(world, replicas), 1, 3, kWidth, policy);
  torch::optim::SGD optimizer(model.handle.parameters(), torch::optim::SGDOptions(0.001));
  const int index = world.device().index();
  auto& runtime = model.handle.unit()->runtime();
  const auto outside_pool = [&](std::int64_t bytes) {
    return bytes - runtime.pool()->total_bytes();
  };
  Held held;
  model.handle.forward(input_on(world, 0));  // the pool has its blocks, and there are no sums yet
  for (int step = 0; step < 4; ++step) {
    {
      const at::Tensor x = input_on(world, step);
      at::getDeviceAllocator(world.device().type())->resetPeakStats(world.device().index());
      const at::Tensor loss = test::squares(model.handle.forward(x));
      held.forward_peak.push_back(outside_pool(peak_bytes(index)));
      EXPECT_EQ(sums_of(runtime, &fsdp::Bucket::accumulator), 0);
      EXPECT_EQ(sums_of(runtime, &fsdp::Bucket::final_memory), 0);
      test::backward(loss);
    }
    held.with_sums = outside_pool(live_bytes(index));
    held.sums = sums_of(runtime, &fsdp::Bucket::accumulator) +
                sums_of(runtime, &fsdp::Bucket::final_memory);
    optimizer.step();
    if (clears == Clears::kHandle) model.handle.zero_grad();
    if (clears == Clears::kOptimizerOfTorch) optimizer.zero_grad();
    if (clears == Clears::kEachByHand) {
      for (auto& parameter : model.handle.parameters()) parameter.mutable_grad().reset();
    }
    held.cleared.push_back(outside_pool(live_bytes(index)));
  }
  return held;
}

// Naive: they are held until the next backward begins, with all activations of the forward.
TEST(StepOnADevice, SumsAreGoneBeforeTheNextForward) {
  for (const PrecisionPolicy& policy : {PrecisionPolicy(), test::in_bfloat16()}) {
    for (const auto& [count, copies] :
         std::initializer_list<std::pair<int, int>>{{1, 1}, {2, 1}, {2, 2}, {4, 2}}) {
      for (const Clears clears :
           {Clears::kHandle, Clears::kOptimizerOfTorch, Clears::kEachByHand}) {
        SCOPED_TRACE(concat(count, " ranks, ", copies, " replicas, ", static_cast<int>(clears)));
        on_ranks({count, "sim"}, [&, replicas = copies](World& world) {
          const Held held = held_by_steps(world, replicas, policy, clears);
          EXPECT_GT(held.sums, 0);
          for (std::size_t step = 0; step < held.cleared.size(); ++step) {
            // Otherwise the pool changes in a forward, which takes from it what a backward
            // returned.
            if (!policy.param_dtype) {
              EXPECT_EQ(held.forward_peak[step], held.forward_peak.front()) << step;
            }
            if (clears != Clears::kHandle) continue;
            EXPECT_LE(held.cleared[step] + held.sums, held.with_sums) << step;
          }
        });
      }
    }
  }
}

/// Rows of eight groups times their matrices, as experts do it.
class Grouped : public torch::nn::Module {
 public:
  static constexpr std::int64_t kGroups = 8, kColumns = 128, kRows = kGroups * kColumns;

  explicit Grouped(const at::Device& where)
      : weight(register_parameter("weight", test::seeded(1, {kGroups, kColumns, kColumns}))),
        ends_((at::arange(1, kGroups + 1, at::kInt) * kColumns).to(where)) {}
  at::Tensor forward(const at::Tensor& x) {
    return nn::grouped_linear(x, {weight}, nn::RowGroups{{}, ends_});
  }
  at::Tensor weight;

 private:
  at::Tensor ends_;
};

// The product of its weights and the gradient of its rows, which have one size here, never exist at
// the same time. Naive: they do until the product is added to its sum, after the node that makes
// both.
TEST(StepOnADevice, AGroupedProductIsGoneBeforeItsRowsGradientIsMade) {
  on_ranks({1, "sim"}, [](World& world) {
    constexpr std::int64_t kBytes = 2 * Grouped::kRows * Grouped::kColumns;  // of each of the two
    auto model = fully_shard(std::make_shared<Grouped>(world.device()), test::data_mesh(world),
                             test::in_bfloat16());
    model.set_requires_gradient_sync(false);
    const at::Tensor x = drawn(2, {Grouped::kRows, Grouped::kColumns}, at::kBFloat16)
                             .to(world.device())
                             .requires_grad_(true);
    const at::Tensor grad = at::ones_like(x).detach();
    for (int step = 0; step < 2; ++step) {
      x.mutable_grad().reset();
      const at::Tensor y = model.forward(x);
      at::getDeviceAllocator(world.device().type())->resetPeakStats(world.device().index());
      const std::int64_t before = live_bytes(world.device().index());
      y.backward(grad);
      if (step == 0) continue;  // the pool has its blocks, and the sum is there
      const std::int64_t rest = peak_bytes(world.device().index()) - before;
      EXPECT_GE(rest, kBytes);
      EXPECT_LT(rest, kBytes + kBytes / 2);
    }
  });
}

// Clears one bucket, and one parameter of a bucket: the values of others stay.
TEST(StepOnADevice, SumsOfWhatIsClearedGoAndOthersContinue) {
  for (const int ranks : {1, 2}) {
    ResultsOf results;
    for (const std::string device : {"cpu", "sim", "sim:0"}) {
      on_ranks({ranks, device}, [&](World& world) {
        test::ShardedChain model(test::data_mesh(world), 1, 2, kWidth);
        std::vector<at::Tensor> mine;
        const auto step = [&](int number) {
          test::backward(test::squares(model.handle.forward(input_on(world, number))));
          for (const auto& [name, grad] : test::whole_gradients(model.handle)) mine.push_back(grad);
        };
        const auto clear = [&](const std::string& part) {
          for (const auto& view : model.handle.shards()) {
            if (view.contract->name.find(part) != std::string::npos)
              view.shard.mutable_grad().reset();
          }
        };
        step(0);
        model.chain->handles[0]->zero_grad();
        const auto& of_cleared = *model.chain->handles[0]->unit()->buckets().front();
        const auto& of_other = *model.chain->handles[1]->unit()->buckets().front();
        EXPECT_EQ(of_cleared.accumulator().defined(), world.device().is_cpu());
        EXPECT_TRUE(of_other.accumulator().defined());
        step(1);
        clear("block1.a");
        model.handle.forward(input_on(world, 2));
        EXPECT_TRUE(of_other.accumulator().defined()) << "what the other one has shown is in it";
        step(3);
        clear("block1.");
        step(4);
        auto read = comm::read_on_host(mine, "results");
        if (world.rank() == 0) results[device] = std::move(read);
      });
      settle();
    }
    expect_bits_of_the_cpu(results, concat(ranks, " ranks"));
  }
}

// Naive: libtorch says which devices do not go together, and not of what.
TEST(StepOnADevice, ParametersOfAnotherDeviceAreRefusedByName) {
  const auto refusal = [](const std::string& device, const c10::Device& found) {
    std::string text;
    on_ranks({1, device}, [&](World& world) {
      const auto chain = std::make_shared<test::Chain>(1, 1, kWidth);
      chain->scale.set_data(chain->scale.detach().to(found));
      text = thrown_by([&] { fully_shard(chain, test::data_mesh(world)); });
    });
    settle();
    return text;
  };
  EXPECT_THAT(refusal("sim:0", device(1)),
              Says("parameter scale: found it on sim:1, expected sim:0 or cpu"));
  EXPECT_THAT(refusal("cpu", device(0)),
              Says("parameter scale: found it on sim:0, expected cpu, as its World"));
  EXPECT_EQ(refusal("sim:0", c10::kCPU), "");
  EXPECT_EQ(refusal("sim:0", device(0)), "");
}

// Naive: a number of bytes, which is all units of a small model and less than one of a large one.
TEST(StepOnADevice, ReductionsOfTwoUnitsAreUnderWay) {
  EXPECT_EQ(pool_bytes(5, {}), pool_bytes(10, {}));
  EXPECT_LT(pool_bytes(10, 1), pool_bytes(10, {}));
  EXPECT_LT(pool_bytes(5, std::int64_t{1} << 20), pool_bytes(10, std::int64_t{1} << 20));
}

// Naive: the compute stream waits wherever the host takes a buffer back.
TEST(StepOnADevice, ABackwardContinuesDuringItsReductions) {
  for (const PrecisionPolicy& policy : {PrecisionPolicy(), test::in_bfloat16()}) {
    on_ranks({2, "sim"}, [&](World& world) {
      test::ShardedChain model(test::data_mesh(world), 1, 2, kWidth, policy);
      model.handle.set_reshard_after_forward(false);  // backwards gather nothing
      model.handle.set_reshard_after_backward(false);
      const auto backward_of = [&](int number, bool is_last) {
        model.handle.set_is_last_backward(is_last);
        const at::Tensor loss = test::squares(model.handle.forward(input_on(world, number)));
        std::optional<HeldStream> held;
        const auto* const group = model.handle.unit()->buckets().front()->groups().reduce;
        if (!is_last) held.emplace(group->stream().get());
        test::backward(loss);
        comm::Event end;
        end.record(Stream::current(world.device()), comm::EventSite::kHostRead);
        EXPECT_TRUE(is_last || end.done());
      };
      backward_of(0, /*is_last=*/true);
      backward_of(1, /*is_last=*/false);
      backward_of(2, /*is_last=*/true);
    });
  }
}

// A thread of the user's own has autograd's threads on until its World is told of it.
TEST(StepOnADevice, ABackwardOnAnotherThreadIsRefused) {
  for (const int ranks : {1, 2}) {
    test::RankBarrier meeting(ranks);
    on_ranks({ranks, "sim"}, [&](World& world) {
      test::RankBarrier::Seat seat(meeting);
      test::ShardedChain model(test::data_mesh(world), 1, 2, kWidth);
      const at::Tensor loss = test::squares(model.handle.forward(input_on(world, 0)));
      seat.wait();  // no rank recovers while others are in their forward
      auto& state = c10::AutogradState::get_tls_state();
      state.set_multithreading_enabled(true);
      const std::string refusal = thrown_by([&] { test::backward(loss); });
      EXPECT_THAT(refusal, Says("call World::attach_thread()"));
      world.attach_thread();
      if (ranks > 1) world.recover();
      model.handle.zero_grad();
      test::backward(test::squares(model.handle.forward(input_on(world, 0))));
      EXPECT_EQ(test::whole_gradients(model.handle).size(), 5U);
    });
  }
}

enum class Fails { kForward, kBackward, kInFlight };

class ThrowsInBackward : public torch::autograd::Function<ThrowsInBackward> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) {
    return x * 1.0;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 torch::autograd::variable_list /*grads*/) {
    throw std::runtime_error("the user's backward went wrong");
  }
};

/// Returns the results of two steps after a failure of rank 0.
std::vector<at::Tensor> results_after(Fails fails, World& world, const PrecisionPolicy& policy) {
  test::ShardedChain model(test::data_mesh(world), 1, 3, kWidth, policy);
  const auto step = [&](int number, const std::function<void()>& inside) {
    model.chain->blocks[1]->before = inside;
    at::Tensor y = model.handle.forward(input_on(world, number));
    if (inside && fails != Fails::kForward) y = ThrowsInBackward::apply(y);
    test::backward(test::squares(y));
  };
  step(0, {});
  model.handle.zero_grad();
  if (fails == Fails::kInFlight) {
    // Reductions for which no caller has waited.
    model.handle.set_is_last_backward(false);
    step(1, {});
    model.handle.set_is_last_backward(true);
  }
  const std::function<void()> failure = [&] {
    if (fails == Fails::kForward) throw std::runtime_error("the user's forward went wrong");
  };
  const bool is_mine = world.rank() == 0;
  thrown_by([&] { step(2, is_mine ? failure : std::function<void()>()); });
  if (world.size() > 1) world.recover();
  model.handle.zero_grad();
  std::vector<at::Tensor> results;
  for (const int number : {3, 4}) {
    step(number, {});
    for (const auto& [name, grad] : test::whole_gradients(model.handle)) results.push_back(grad);
    model.handle.zero_grad();
  }
  return comm::read_on_host(results, "results");
}

TEST(StepOnADevice, AfterARecoveryStreamsAndPoolsAreRight) {
  for (const PrecisionPolicy& policy : {PrecisionPolicy(), test::in_bfloat16()}) {
    for (const Fails fails : {Fails::kForward, Fails::kBackward, Fails::kInFlight}) {
      for (const int ranks : {1, 2, 3}) {
        ResultsOf results;
        for (const std::string device : {"cpu", "sim", "sim:0"}) {
          on_ranks({ranks, device}, [&](World& world) {
            const StreamScope here(Stream::make(world.device()));
            auto mine = results_after(fails, world, policy);
            if (world.rank() == 0) results[device] = std::move(mine);
          });
          settle();
        }
        expect_bits_of_the_cpu(results, concat(ranks, " ranks"));
      }
    }
  }
}

/// Tensors of each size that a bucket may have, written where they are made and dropped.
void use_free_memory(const World& world) {
  std::vector<at::Tensor> all;
  for (std::int64_t numel = 1; numel < 64; ++numel) {
    all.push_back(at::full({numel}, 1.0, at::TensorOptions().device(world.device())));
  }
}

/// Reductions for which no caller waits, a failure, and the next use of the sums' memory.
void fail_during_reductions(World& world) {
  test::ShardedChain model(test::data_mesh(world), 1, 3, kWidth);
  const auto run = [&](int number) {
    test::backward(test::squares(model.handle.forward(input_on(world, number))));
  };
  run(0);
  model.handle.zero_grad();
  model.handle.set_is_last_backward(false);
  run(1);
  model.chain->blocks[1]->before = [] { throw std::runtime_error("the user's went wrong"); };
  thrown_by([&] { run(2); });
  world.recover();
  model.handle.zero_grad();
  use_free_memory(world);
  comm::barrier(world.control(), "end of the test");
}

// Naive: lost reductions are not waited for, and their memory is free.
TEST(StepOnADevice, SumsOfAFailedStepAreFreedBehindItsReductions) {
  try {
    on_ranks({2, "sim"}, fail_during_reductions);
  } catch (const std::exception&) {  // the race
  }
  settle();
  EXPECT_THAT(take_races(), IsEmpty());
}

// Naive: the shard is cast for the wire on the group's stream while its owner writes to it.
TEST(StepOnADevice, ShardsMayBeWrittenOnceAGatherHasBegun) {
  for (const PrecisionPolicy& policy : {PrecisionPolicy(), test::in_bfloat16()}) {
    ResultsOf results;
    for (const std::string device : {"cpu", "sim", "sim:0"}) {
      on_ranks({2, device}, [&](World& world) {
        test::ShardedChain model(test::data_mesh(world), 1, 2, kWidth, policy);
        std::vector<at::Tensor> losses;
        for (int step = 0; step < 2; ++step) {
          const auto gathering = model.handle.unshard_async();
          {
            const at::NoGradGuard no_grad;
            for (const auto& parameter : model.handle.parameters()) parameter.mul_(1.5);
          }
          losses.push_back(test::squares(model.handle.forward(input_on(world, step))).detach());
        }
        auto read = comm::read_on_host(losses, "losses");
        if (world.rank() == 0) results[device] = std::move(read);
      });
      settle();
    }
    expect_bits_of_the_cpu(results, "losses");
  }
}

enum class Leaves { kSums, kSharded, kGathered };

/// A step on another stream than the model was made on, and what it leaves: memory that the first
/// stream had before, and has again.
void train_and_leave(World& world, Leaves leaves) {
  std::optional<test::ShardedChain> model(std::in_place, test::data_mesh(world), 1, 3, kWidth);
  const Stream main = Stream::current(world.device());
  const Stream training = Stream::make(world.device());
  wait_for(training.get(), main.get());
  std::vector<at::Tensor> kept;
  {
    const StreamScope here(training);
    kept.push_back(input_on(world, 0));
    const at::Tensor loss = test::squares(model->handle.forward(kept.back()));
    {
      const StreamScope there(main);
      use_free_memory(world);
    }
    test::backward(loss);
    const at::NoGradGuard no_grad;
    for (const auto& parameter : model->handle.parameters()) {
      parameter.sub_(parameter.grad(), 0.001);
    }
    model->handle.zero_grad();
    if (leaves == Leaves::kGathered) model->handle.unshard();
    if (leaves != Leaves::kSums) model.reset();
  }
  use_free_memory(world);
  wait_for(main.get(), training.get());
}

// Naive: what the allocator gets back it hands out on the stream that it was made on, which knows
// nothing of where the model was trained.
TEST(StepOnADevice, WhatAModelLeavesIsFreedBehindItsLastUse) {
  for (const Leaves leaves : {Leaves::kSums, Leaves::kSharded, Leaves::kGathered}) {
    on_ranks({2, "sim"}, [&](World& world) { train_and_leave(world, leaves); });
  }
}

TEST(StepOnADevice, EachEventOfMemoryThatComesAndGoesIsNeeded) {
  for (const comm::EventSite site : {comm::EventSite::kPoolMade, comm::EventSite::kPoolFree}) {
    for (const comm::EventEnd end : {comm::EventEnd::kRecord, comm::EventEnd::kBlock}) {
      const auto left_out = without(site, end);
      try {
        on_ranks({1, "sim"}, [](World& world) { train_and_leave(world, Leaves::kSums); });
      } catch (const std::exception&) {  // the race
      }
      settle();
      EXPECT_THAT(take_races(), Not(IsEmpty()))
          << to_string(site) << (end == comm::EventEnd::kRecord ? ", record" : ", block");
    }
  }
}

}  // namespace
}  // namespace tessera::sim::sharding_steps_test
