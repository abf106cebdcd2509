// Each place in fully_shard that orders two streams, where nothing else orders them: the next
// collective, or memory that comes and goes, does it by chance in most programs.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/module.h>

#include <optional>

#include "base/test_hooks.h"
#include "comm/stream.h"
#include "grad/sink.h"
#include "grad/weight_gradient.h"
#include "sim/ranks.h"
#include "sim/streams.h"
#include "support/plain.h"
#include "support/test.h"

namespace tessera::sim::sharding_events_test {
namespace {

using comm::EventEnd;
using comm::EventSite;
using comm::Stream;
using comm::StreamScope;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr std::int64_t kWidth = 5;

struct Scale : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x * weight; }
  at::Tensor weight = register_parameter("weight", test::seeded(3, {kWidth}));
};

/// A unit that its model calls twice.
struct Twice : torch::nn::Module {
  explicit Twice(const Mesh& mesh)
      : scale(register_module("scale", std::make_shared<Sharded<Scale>>(
                                           fully_shard(std::make_shared<Scale>(), mesh)))) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = scale->forward(x);
    const StreamScope there(side);
    kept = {scale->forward(other)};
    return y;
  }
  std::shared_ptr<Sharded<Scale>> scale;
  Stream side;
  at::Tensor other;
  std::vector<at::Tensor> kept;
};

at::Tensor input_on(const World& world, int step) {
  return test::input_of(world.rank(), step, kWidth).to(world.device()).mul(1);
}

/// x * w, whose weight gradient is formed on a separate stream while there is one. Only the slot
/// into which it is written knows what is launched there.
class FormsAside : public torch::autograd::Function<FormsAside> {
 public:
  static inline Stream aside;
  static inline std::vector<at::Tensor> kept;  ///< what is read there
  static inline std::function<void()> before = [] {};

  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& w) {
    context->save_for_backward({x, w});
    return x * w;
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    before();
    const auto saved = context->get_saved_variables();
    using Reads = grad::Product::Reads;
    const grad::Product product{.sizes = saved[1].sizes().vec(),
                                .dtype = grads[0].scalar_type(),
                                .reads = {saved[0], grads[0]},
                                .form = [](const Reads& of) { return (of[1] * of[0]).sum(0); },
                                .write =
                                    [](const Reads& of, const at::Tensor& slot) {
                                      at::Tensor out = slot;
                                      at::sum_out(out, of[1] * of[0], {0});
                                    }};
    if (!aside) return {at::Tensor(), grad::weight_gradient(saved[1], product)};
    kept.insert(kept.end(), {saved[0], grads[0]});
    wait_for(aside.get(), Stream::current(aside.device()).get());
    const StreamScope there(aside);
    return {at::Tensor(), grad::weight_gradient(saved[1], product)};
  }
};

/// x b a: in backward the gradient of b comes last.
struct Products : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return FormsAside::apply(x, b) * a; }
  at::Tensor a = register_parameter("a", test::seeded(4, {kWidth}));
  at::Tensor b = register_parameter("b", test::seeded(5, {kWidth}));
};

/// x a + x b, the second term on another stream; its gradient comes last.
struct Sides : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const Stream here = Stream::current(x.device());
    wait_for(side.get(), here.get());
    {
      const StreamScope there(side);
      other = FormsAside::apply(x, b);
    }
    const at::Tensor own = FormsAside::apply(x, a);
    wait_for(here.get(), side.get());
    return own + other;
  }
  at::Tensor a = register_parameter("a", test::seeded(4, {kWidth}));
  at::Tensor b = register_parameter("b", test::seeded(5, {kWidth}));
  Stream side;
  at::Tensor other;  // until both streams are over
};

/// Memory of each size that a bucket may have is written on the current stream, and let go.
void use_free_memory(const World& world) {
  std::vector<at::Tensor> all;
  for (std::int64_t numel = 1; numel <= 128; ++numel) {
    all.push_back(at::full({numel}, 1.0, at::TensorOptions().device(world.device())));
  }
}

/// Two streams read what one gather has made, and one of them reshards the unit.
void read_on_two_streams(World& world) {
  const auto twice = std::make_shared<Twice>(test::data_mesh(world));
  auto model = fully_shard(twice, test::data_mesh(world));
  model.set_reshard_after_forward(false);
  const Stream main = Stream::current(world.device());
  twice->side = Stream::make(world.device());
  const at::NoGradGuard no_grad;
  const at::Tensor x = input_on(world, 0);
  twice->other = input_on(world, 1);
  wait_for(twice->side.get(), main.get());
  model.forward(x);
  twice->scale->reshard();
  twice->scale->unshard();
  wait_for(main.get(), twice->side.get());
}

/// Gradients that wait for others are dropped on another stream than they came on.
void drop_on_another_stream(World& world) {
  auto model = std::make_optional(fully_shard(std::make_shared<Scale>(), test::data_mesh(world)));
  const Stream main = Stream::current(world.device()), side = Stream::make(world.device());
  const at::Tensor x = input_on(world, 0);
  wait_for(side.get(), main.get());
  model->set_requires_gradient_sync(false);
  {
    const StreamScope there(side);
    test::backward(test::squares(model->forward(x)));
  }
  model.reset();
  use_free_memory(world);
  wait_for(main.get(), side.get());
}

/// A step on one stream, of which another one clears the sums, or all there is.
void clear_on_another_stream(World& world, bool all) {
  auto model = std::make_optional(fully_shard(std::make_shared<Scale>(), test::data_mesh(world)));
  const Stream main = Stream::current(world.device()), side = Stream::make(world.device());
  const at::Tensor x = input_on(world, 0);
  wait_for(side.get(), main.get());
  {
    const StreamScope there(side);
    test::backward(test::squares(model->forward(x)));
  }
  all ? model.reset() : model->zero_grad();
  use_free_memory(world);
  wait_for(main.get(), side.get());
}

/// Adds a gradient, on a stream that had added others before, to one that a third stream has
/// written.
void add_to_what_was_written_aside(World& world) {
  auto model = fully_shard(std::make_shared<Products>(), test::data_mesh(world));
  // Memory that is returned would order the streams.
  model.set_reshard_after_forward(false);
  model.set_reshard_after_backward(false);
  const Stream main = Stream::current(world.device());
  const at::Tensor inputs[] = {input_on(world, 0), input_on(world, 1)};
  model.set_requires_gradient_sync(false);
  FormsAside::aside = Stream::make(world.device());
  test::backward(test::squares(model.forward(inputs[0])));
  const Stream aside = std::exchange(FormsAside::aside, Stream());
  model.set_requires_gradient_sync(true);
  test::backward(test::squares(model.forward(inputs[1])));
  wait_for(main.get(), aside.get());
  FormsAside::kept.clear();
}

/// The first gradient of a bucket takes memory that its stream has just used, and the next one is
/// written on a stream that knows nothing of that.
void add_on_another_stream(World& world) {
  const auto sides = std::make_shared<Sides>();
  auto model = fully_shard(sides, test::data_mesh(world));
  const Stream main = Stream::current(world.device());
  sides->side = Stream::make(world.device());
  const at::Tensor x = input_on(world, 0);
  FormsAside::before = [&] {
    if (Stream::current(world.device()) == main) use_free_memory(world);
  };
  test::backward(test::squares(model.forward(x)));
  wait_for(main.get(), sides->side.get());
}

void expect_needed(int ranks, const std::function<void(World&)>& program, EventSite site) {
  for (const std::string device : {"sim", "sim:0"}) {
    const Where where{ranks, device};
    EXPECT_EQ(race_on_ranks(where, program), "") << shown(where);
    for (const EventEnd end : {EventEnd::kRecord, EventEnd::kBlock}) {
      const auto left_out = without(site, end);
      EXPECT_NE(race_on_ranks(where, program), "")
          << shown(where) << ", without " << to_string(site);
    }
  }
}

TEST(EventsOfAUnit, WhatTwoStreamsReadIsFreedBehindBoth) {
  expect_needed(2, read_on_two_streams, EventSite::kGather);
}

// With several ranks the unit's memory, which is returned, too, orders the streams.
TEST(EventsOfAUnit, WhatWaitsIsDroppedBehindTheStreamThatAddedIt) {
  expect_needed(1, drop_on_another_stream, EventSite::kAccept);
}

TEST(EventsOfAUnit, SlotsAreWrittenBehindWhatTheirMemoryWas) {
  expect_needed(1, add_on_another_stream, EventSite::kAccept);
  FormsAside::before = [] {};
}

TEST(EventsOfAUnit, WhatWasWrittenAsideIsAddedToAfterIt) {
  expect_needed(1, add_to_what_was_written_aside, EventSite::kAccept);
}

// Naive: of several ranks the allocator has the sums while a group is still at work on them.
TEST(EventsOfAUnit, SumsAreFreedBehindTheStreamThatFormedThem) {
  for (const int ranks : {1, 2}) {
    for (const bool all : {false, true}) {
      SCOPED_TRACE(all);
      expect_needed(
          ranks, [&](World& world) { clear_on_another_stream(world, all); }, EventSite::kAccept);
    }
  }
}

}  // namespace
}  // namespace tessera::sim::sharding_events_test
