// fully_shard where a rank computes on several streams: parts of a unit, or one micro-batch while
// another one runs. The user orders what lies between two streams of the program; the library
// orders the unit's memory, slots and sums.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/module.h>

#include <array>
#include <atomic>
#include <exception>

#include "comm/host_read.h"
#include "comm/stream.h"
#include "grad/sink.h"
#include "grad/weight_gradient.h"
#include "sim/ranks.h"
#include "sim/streams.h"
#include "support/plain.h"
#include "support/test.h"

namespace tessera::sim::sharding_streams_test {
namespace {

using comm::EventEnd;
using comm::EventSite;
using comm::Stream;
using comm::StreamScope;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr std::int64_t kWidth = 5;
constexpr int kMicroBatches = 4;  // in a step

/// The user's own order, by no event of the library.
void follow(const Stream& later, const Stream& earlier) {
  if (later && later != earlier) wait_for(later.get(), earlier.get());
}

/// How many products have been written into slots.
std::atomic<int> written = 0;

/// x * w whose weight gradient is deferred where the model does that, and else written into its
/// slot, as by layers of nn.
class MayWait : public torch::autograd::Function<MayWait> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& w) {
    context->save_for_backward({x, w});
    return x * w;
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto saved = context->get_saved_variables();
    using Reads = grad::Product::Reads;
    const grad::Product product{.sizes = saved[1].sizes().vec(),
                                .dtype = grads[0].scalar_type(),
                                .reads = {saved[0], grads[0]},
                                .form = [](const Reads& of) { return (of[1] * of[0]).sum(0); },
                                .write =
                                    [](const Reads& of, const at::Tensor& slot) {
                                      ++written;
                                      at::Tensor out = slot;
                                      at::sum_out(out, of[1] * of[0], {0});
                                    }};
    const at::Tensor of_x = context->needs_input_grad(0) ? grads[0] * saved[1] : at::Tensor();
    return {of_x, grad::weight_gradient(saved[1], product)};
  }
};

/// A unit that computes on two streams at the same time: x a + relu(x b), the second term on
/// `side`. With x = z c before it, a gradient comes after that of b on the stream that came first.
struct Sides : torch::nn::Module {
  explicit Sides(std::uint64_t seed)
      : a(register_parameter("a", test::seeded(seed, {kWidth}))),
        b(register_parameter("b", test::seeded(seed + 1, {kWidth}))),
        c(register_parameter("c", test::seeded(seed + 2, {kWidth}))) {}

  at::Tensor forward(const at::Tensor& z) {
    const at::Tensor x = in_front ? MayWait::apply(z, c) : z;
    if (!two_streams) return MayWait::apply(x, a) + at::relu(x * b);
    const Stream here = Stream::current(x.device());
    follow(side, here);
    at::Tensor other;
    {
      const StreamScope there(side);
      // Alone there: what goes back to x would order the two streams in backward.
      other = at::relu(direct ? MayWait::apply(x.detach(), b) : x.detach() * b);
    }
    const at::Tensor own = MayWait::apply(x, a);
    follow(here, side);
    kept.insert(kept.end(), {x.detach(), other});
    // Else autograd adds to the gradient that both have, in place, once the last one has it.
    return own + (apart ? other.mul(1) : other);
  }

  at::Tensor a, b, c;
  bool two_streams = false;
  bool in_front = false;
  bool apart = false;   ///< no gathers order the streams in backward
  bool direct = false;  ///< products on `side` are written into slots, too
  Stream side;
  std::vector<at::Tensor> kept;  ///< what crosses streams, until both are over
};

struct Tower : torch::nn::Module {
  Tower() {
    for (std::uint64_t i = 0; i < 3; ++i) {
      sides.push_back(register_module("part" + std::to_string(i), std::make_shared<Sides>(10 * i)));
    }
  }
  void shard(const Mesh& mesh, const PrecisionPolicy& policy) {
    for (std::size_t i = 0; i < sides.size(); ++i) {
      handles.push_back(std::make_shared<Sharded<Sides>>(fully_shard(sides[i], mesh, policy)));
      replace_module("part" + std::to_string(i), handles.back());
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = direct ? MayWait::apply(x, scale) : x * scale;
    for (const auto& handle : handles) y = handle->forward(y) + y;
    return y;
  }
  at::Tensor scale = register_parameter("scale", test::seeded(100, {kWidth}) + 1.0);
  std::vector<std::shared_ptr<Sides>> sides;
  std::vector<std::shared_ptr<Sharded<Sides>>> handles;
  bool direct = false;
};

struct Case {
  std::string name;
  int ranks = 2;
  int replicas = 1;
  bool two_streams = false;  ///< parts of each unit on a stream of their own
  bool in_front = false;     ///< and one in front of these
  bool alternates = false;   ///< every other micro-batch on a stream of its own
  bool keeps = false;        ///< units stay unsharded after backward
  bool stays = false;        ///< and after forward
  bool at_last = false;      ///< micro-batches are reduced together
  bool in_flight = false;    ///< they are reduced each, and waited for at the last
  bool defers = false;       ///< weight gradients are formed on another stream
  bool direct = false;       ///< no gradient comes but by a product that is written into its slot
  PrecisionPolicy policy = {};
};

std::vector<at::Tensor> results_of(World& world, const Case& c) {
  const auto tower = std::make_shared<Tower>();
  const Mesh mesh = test::data_mesh(world, c.replicas);
  tower->shard(mesh, c.policy);
  auto handle = fully_shard(tower, mesh, c.policy);
  if (c.keeps || c.stays) handle.set_reshard_after_backward(false);
  if (c.stays) handle.set_reshard_after_forward(false);
  tower->direct = c.direct;
  for (const auto& sides : tower->sides) {
    sides->two_streams = c.two_streams;
    sides->in_front = c.in_front;
    sides->apart = c.in_front || c.stays;
    sides->direct = c.direct;
    sides->side = Stream::make(world.device());
  }
  const Stream main = Stream::current(world.device());
  const std::array<Stream, 2> streams{main, c.alternates ? Stream::make(world.device()) : main};
  const Stream forming = Stream::make(world.device());
  std::vector<at::Tensor> results;
  for (int step = 0; step < 2; ++step) {
    std::vector<at::Tensor> inputs;  // before: the host waits for an upload
    for (int i = 0; i < kMicroBatches; ++i) {
      const at::Tensor x = test::input_of(world.rank(), kMicroBatches * step + i, kWidth);
      inputs.push_back(x.to(world.device()));
    }
    std::vector<at::Tensor> kept;  // until the streams are one behind the other again
    handle.set_defer_weight_gradients(c.defers);
    for (int i = 0; i < kMicroBatches; ++i) {
      const bool is_last = i == kMicroBatches - 1;
      handle.set_requires_gradient_sync(!c.at_last || is_last);
      handle.set_is_last_backward(!c.in_flight || is_last);
      const StreamScope here(streams.at(static_cast<std::size_t>(i % 2)));
      const at::Tensor x = inputs[static_cast<std::size_t>(i)].mul(1);
      const at::Tensor loss = test::squares(handle.forward(x));
      kept.insert(kept.end(), {x, loss});
      results.push_back(loss.detach());
      test::backward(loss);
    }
    if (c.defers) {
      const StreamScope here(c.alternates ? streams[1] : forming);
      handle.run_weight_gradients();
      if (!c.alternates) follow(main, forming);
    }
    follow(main, streams[1]);
    for (const auto& [name, grad] : test::whole_gradients(handle)) results.push_back(grad);
    for (const auto& parameter : handle.parameters()) {
      const at::NoGradGuard no_grad;
      if (parameter.grad().defined()) parameter.sub_(parameter.grad(), 0.001);
    }
    handle.zero_grad();
    follow(streams[1], main);
    for (const auto& sides : tower->sides) {
      follow(main, sides->side);
      follow(sides->side, main);
      sides->kept.clear();
    }
  }
  for (const auto& [name, value] : test::whole_parameters(handle)) results.push_back(value);
  return comm::read_on_host(results, "results");
}

std::vector<std::vector<at::Tensor>> results_of_ranks(const Case& c, const std::string& device) {
  std::vector<std::vector<at::Tensor>> of_ranks(static_cast<std::size_t>(c.ranks));
  on_ranks({c.ranks, device}, [&](World& world) {
    of_ranks[static_cast<std::size_t>(world.rank())] = results_of(world, c);
  });
  return of_ranks;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto& policy : {PrecisionPolicy(), test::in_bfloat16()}) {
    for (const auto& [ranks, replicas] :
         std::initializer_list<std::pair<int, int>>{{1, 1}, {2, 1}, {4, 2}}) {
      const Case base{
          .name = concat(ranks, " ranks"), .ranks = ranks, .replicas = replicas, .policy = policy};
      const auto add = [&](const std::string& name, const auto& change) {
        Case c = base;
        c.name = concat(name, ", ", base.name);
        change(c);
        all.push_back(c);
      };
      add("parts on two streams", [](Case& c) { c.two_streams = true; });
      add("micro-batches", [](Case& c) { c.alternates = true; });
      add("micro-batches, kept", [](Case& c) { c.alternates = c.keeps = true; });
      add("both, reduced at last",
          [](Case& c) { c.two_streams = c.alternates = c.at_last = true; });
      add("a part in front, parts on two streams",
          [](Case& c) { c.in_front = c.two_streams = true; });
      // A gather, or memory that is returned, would order the streams.
      add("both, never resharded, reduced at last",
          [](Case& c) { c.two_streams = c.alternates = c.stays = c.at_last = true; });
      add("both, in flight", [](Case& c) { c.two_streams = c.alternates = c.in_flight = true; });
      add("deferred", [](Case& c) { c.two_streams = c.defers = true; });
      add("deferred micro-batches", [](Case& c) { c.alternates = c.defers = true; });
      add("direct", [](Case& c) { c.two_streams = c.direct = true; });
      add("direct micro-batches", [](Case& c) { c.two_streams = c.direct = c.alternates = true; });
      // Kept: memory that a backward returns would be taken for slots, ordered after all that it
      // did.
      add("direct, deferred",
          [](Case& c) { c.two_streams = c.direct = c.defers = c.keeps = true; });
    }
  }
  return all;
}

// Naive: a reduction that is ordered only after the stream from which it is issued, and memory that
// is returned with only the event of the stream that returns it.
TEST(StreamsOfARank, AreOrderedWhereTheyMeetInTheUnitsMemory) {
  for (const Case& c : cases()) {
    const auto expected = results_of_ranks(c, "cpu");
    for (const char* const device : {"sim", "sim:0"}) {
      const auto found = results_of_ranks(c, device);
      for (std::size_t rank = 0; rank < found.size(); ++rank) {
        ASSERT_EQ(found[rank].size(), expected[rank].size());
        for (std::size_t i = 0; i < found[rank].size(); ++i) {
          expect_same_bits(found[rank][i], expected[rank][i],
                           concat(c.name, " on ", device, ", rank ", rank, ", result ", i));
        }
      }
      settle();
    }
  }
}

/// Each of `site` left out is found in cases of which `is_meant` says so.
void expect_found(EventSite site, const std::function<bool(const Case&)>& is_meant) {
  for (const EventEnd end : {EventEnd::kRecord, EventEnd::kBlock}) {
    const auto left_out = without(site, end);
    bool is_found = false;
    for (const Case& c : cases()) {
      if (is_found || c.ranks == 4 || !is_meant(c)) continue;
      try {
        results_of_ranks(c, "sim");
      } catch (const std::exception&) {  // the race, or that the other rank has left
      }
      settle();
      is_found = !take_races().empty();
    }
    EXPECT_TRUE(is_found) << to_string(site) << (end == EventEnd::kRecord ? ", record" : ", block");
  }
}

TEST(StreamsOfARank, EachEventThatIsLeftOutIsFound) {
  for (const EventSite site :
       {EventSite::kGather, EventSite::kAccept, EventSite::kDeferred, EventSite::kReduced}) {
    expect_found(site, [](const Case&) { return true; });
  }
}

// Only kAccept orders the reduction after a kernel that has written into a slot; for gradients that
// are formed later, only kDeferred.
TEST(StreamsOfARank, EachEventThatIsLeftOutOfDirectSlotsIsFound) {
  const auto in_float32 = [](const Case& c) { return c.direct && !c.policy.param_dtype; };
  expect_found(EventSite::kAccept, in_float32);
  expect_found(EventSite::kDeferred, in_float32);
  // All that arrives first in a step that reduces each micro-batch is written: 3 units of 2, and 1.
  for (Case c : cases()) {
    if (!in_float32(c) || c.alternates || c.ranks != 2) continue;
    written = 0;
    results_of_ranks(c, "sim");
    EXPECT_EQ(written, 2 * (c.defers ? 1 : kMicroBatches) * 7 * c.ranks) << c.name;
  }
}

}  // namespace
}  // namespace tessera::sim::sharding_streams_test
