// Property: what a slot holds follows from the values that arrive and from the contract, and not
// from the dtype in which they arrive, nor from the way: by a leaf's hook, written by a kernel, put
// off, by a replayed region. Buckets, wires and labels know nothing of either.
//
// One unit has a parameter for each raw dtype and source, all of one shape, and each gets 256, 1
// and -256 times one pattern, which every one of these dtypes holds. So all slots have the same
// bits after each arrival. A further source is a line in kSources.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <atomic>
#include <optional>
#include <regex>
#include <tuple>

#include "base/test_hooks.h"
#include "comm/batch.h"
#include "comm/host_read.h"
#include "grad/region.h"
#include "grad/torch_dtype.h"
#include "grad/weight_gradient.h"
#include "nn/linear.h"
#include "proof.h"
#include "support/plain.h"
#include "support/test.h"
#include "tessera/compile.h"

namespace tessera::test::raw_dtypes_test {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr std::int64_t kRows = 3;
constexpr std::int64_t kColumns = 5;
constexpr std::array kValues = {256.0, 1.0, -256.0};  // a micro-batch each
constexpr std::array kRaw = {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf};

enum class Source {
  kHook,      ///< autograd's own way: a leaf's hook
  kLinear,    ///< nn::linear, deferred where the model does that
  kAtOnce,    ///< a product that may be written into the slot
  kMayWait,   ///< one that is deferred where the model does that
  kCaptured,  ///< as kHook, in a region that is replayed
};
constexpr std::array kSources = {Source::kHook, Source::kLinear, Source::kAtOnce, Source::kMayWait,
                                 Source::kCaptured};

at::Tensor pattern(at::ScalarType dtype) {
  return here(at::tensor({1.0, 2.0, 4.0, -1.0, 0.5}).to(dtype).view({1, kColumns}));
}

/// Products that were written into their slots.
std::atomic<int> written = 0;

/// 0, whose gradient of the weight is `value` times the pattern.
struct Use : torch::autograd::Function<Use> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weight, double value,
                            at::ScalarType raw, Source source) {
    context->save_for_backward({weight});
    context->saved_data["value"] = value;
    context->saved_data["raw"] = raw;
    context->saved_data["source"] = static_cast<std::int64_t>(source);
    return at::zeros({}, weight.options().dtype(at::kFloat));
  }
  static variable_list backward(AutogradContext* context, const variable_list&) {
    const at::ScalarType dtype = context->saved_data["raw"].toScalarType();
    const auto source = static_cast<Source>(context->saved_data["source"].toInt());
    const at::Tensor raw = (pattern(dtype) * context->saved_data["value"].toDouble())
                               .expand({kRows, kColumns})
                               .contiguous();
    variable_list result(4);
    if (source == Source::kHook) {
      result[0] = raw;
      return result;
    }
    using Reads = grad::Product::Reads;
    const grad::Product product{.sizes = raw.sizes().vec(),
                                .dtype = dtype,
                                .reads = {raw},
                                .form = [](const Reads& of) { return of[0].clone(); },
                                .write =
                                    [](const Reads& of, const at::Tensor& slot) {
                                      ++written;
                                      EXPECT_EQ(of[0].scalar_type(), slot.scalar_type());
                                      slot.copy_(of[0]);
                                    }};
    result[0] = grad::weight_gradient(
        context->get_saved_variables()[0], product,
        source == Source::kAtOnce ? grad::WeightGradient::kAtOnce : grad::WeightGradient::kMayWait);
    return result;
  }
};

/// The same in a region, where `value` and the pattern in fp32, `of`, come from outside.
struct UseInRegion : torch::autograd::Function<UseInRegion> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weight,
                            const at::Tensor& value, const at::Tensor& of, at::ScalarType raw) {
    context->save_for_backward({value, of});
    context->saved_data["raw"] = raw;
    return at::zeros({}, weight.options().dtype(at::kFloat));
  }
  static variable_list backward(AutogradContext* context, const variable_list&) {
    const auto saved = context->get_saved_variables();
    variable_list result(4);
    result[0] = (saved[1].to(context->saved_data["raw"].toScalarType()) * saved[0])
                    .expand({kRows, kColumns})
                    .contiguous();
    return result;
  }
};

/// A weight for each source and number; which raw dtype a number has turns with `shift`.
struct Weights : torch::nn::Module {
  explicit Weights(std::size_t turned) : shift(turned) {
    for (const auto source : kSources) {
      for (std::size_t i = 0; i < kRaw.size(); ++i) {
        weights.push_back(register_parameter(concat("of", static_cast<int>(source), "_", i),
                                             here(at::ones({kRows, kColumns}))));
      }
    }
  }
  /// Takes a number, so that it is no region itself.
  at::Tensor forward(double value) {
    at::Tensor sum = here(at::zeros({}));
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const Source source = kSources.at(i / kRaw.size());
      const at::ScalarType raw = raw_of(i);
      if (source == Source::kCaptured) continue;
      if (source != Source::kLinear) {
        sum = sum + Use::apply(weights[i], value, raw, source);
        continue;
      }
      const at::Tensor y = nn::linear(pattern(raw), weights[i], {}, raw);
      sum = sum + (y * value).sum().to(at::kFloat);
    }
    const std::vector<at::Tensor> inputs = {sum, here(at::full({}, value)), pattern(at::kFloat)};
    return grad::in_region(
               *this, "captured", inputs,
               [this](const auto& all) { return std::vector<at::Tensor>{captured(all)}; })
        .front();
  }

 private:
  at::ScalarType raw_of(std::size_t i) const { return kRaw.at((i + shift) % kRaw.size()); }
  at::Tensor captured(const std::vector<at::Tensor>& inputs) const {
    at::Tensor sum = inputs[0];
    for (std::size_t i = weights.size() - kRaw.size(); i < weights.size(); ++i) {
      sum = sum + UseInRegion::apply(weights[i], inputs[1], inputs[2], raw_of(i));
    }
    return sum;
  }

 public:
  std::size_t shift;
  std::vector<at::Tensor> weights;
};

enum class Form { kZero1, kZero2, kZero3, kReplicasAtLast };
enum class Own { kUnset, kNone, kBFloat16, kFloat32 };  ///< a leaf's grad_dtype

struct Case {
  int ranks = 1;
  int replicas = 1;
  Own own = Own::kUnset;
  std::optional<DType> accumulate, reduce, compute;
  Form form = Form::kZero3;
  bool defers = false;
  std::size_t shift = 0;
  std::string name = {};
};

constexpr std::array kLayouts = {std::pair(1, 1), std::pair(2, 1), std::pair(3, 1), std::pair(2, 2),
                                 std::pair(4, 2)};
constexpr std::array kOwn = {Own::kUnset, Own::kNone, Own::kBFloat16, Own::kFloat32};
constexpr std::array<std::optional<DType>, 3> kAccumulate = {std::nullopt, DType::kFloat64,
                                                             DType::kBFloat16};
constexpr std::array<std::optional<DType>, 3> kReduce = {std::nullopt, DType::kBFloat16,
                                                         DType::kFloat64};
constexpr std::array kForms = {Form::kZero1, Form::kZero2, Form::kZero3, Form::kReplicasAtLast};
constexpr std::array<std::optional<DType>, 2> kCompute = {std::nullopt, DType::kBFloat16};

Case case_of(const Choice& at) {
  Case c;
  std::tie(c.ranks, c.replicas) = kLayouts.at(at[0]);
  c.own = kOwn.at(at[1]);
  c.accumulate = kAccumulate.at(at[2]);
  c.reduce = kReduce.at(at[3]);
  c.form = kForms.at(at[4]);
  c.compute = kCompute.at(at[5]);
  c.defers = at[6] != 0;
  for (const std::size_t number : at) c.name += concat(c.name.empty() ? "" : ".", number);
  return c;
}

/// No sum may be narrower than the wire.
bool is_valid(const Choice& at) {
  return kAccumulate.at(at[2]) != DType::kBFloat16 || kReduce.at(at[3]) == DType::kBFloat16;
}

/// The observations of one rank.
struct Seen {
  std::map<std::string, std::vector<at::Tensor>> slots;  ///< by parameter, after each arrival
  Tensors gradients;
  std::vector<std::string> issued;  ///< every collective: label, bytes, dtypes
  std::string contracts;
  DType accumulate = DType::kFloat32;
};

thread_local Seen* seen_here = nullptr;

std::shared_ptr<Weights> module_of(const Case& c) {
  auto module = std::make_shared<Weights>(c.shift);
  for (at::Tensor& weight : module->weights) {
    if (c.own == Own::kNone) weight.set_grad_dtype(std::nullopt);
    if (c.own == Own::kBFloat16) weight.set_grad_dtype(at::kBFloat16);
    if (c.own == Own::kFloat32) weight.set_grad_dtype(at::kFloat);
  }
  return module;
}

void step(const Case& c, Sharded<Weights>& handle) {
  handle.set_reshard_after_forward(c.form == Form::kZero3);
  handle.set_defer_weight_gradients(c.defers);
  for (std::size_t i = 0; i < kValues.size(); ++i) {
    const bool is_last = i + 1 == kValues.size();
    handle.set_requires_gradient_sync(is_last || c.form != Form::kZero1);
    handle.set_requires_replica_reduce(is_last || c.form != Form::kReplicasAtLast);
    backward(handle.forward(kValues.at(i)));
    if (c.defers) handle.run_weight_gradients();
  }
}

/// Each micro-batch of a step was, on CPUs.
void expect_replayed(const ReplayCalls& now, const ReplayCalls& before, const std::string& name) {
  const bool replays = device_here().is_cpu();  // elsewhere all is eager, and a log line says so
  EXPECT_EQ(now.replayed - before.replayed, replays ? std::ssize(kValues) : 0) << name;
  EXPECT_EQ(now.recorded, before.recorded);
  if (!replays) return;
  for (const auto& [why, count] : now.eager) {
    EXPECT_EQ(why, "the first call, which makes what later ones find") << count;
  }
}

std::vector<Seen> run(const Case& c) {
  PrecisionPolicy policy;
  policy.param_dtype = c.compute;
  policy.accumulate_dtype = c.accumulate;
  policy.reduce_dtype = c.reduce;
  policy.cast_forward_inputs = false;
  std::vector<Seen> of_ranks(static_cast<std::size_t>(c.ranks));
  const test_hooks::Set arrivals(test_hooks::after_accept,
                                 [](const GradContract& contract, const at::Tensor& slot) {
                                   if (seen_here != nullptr)
                                     seen_here->slots[contract.name].push_back(slot.clone());
                                 });
  const test_hooks::Set collectives(test_hooks::before_issue, [&](int rank, const auto& batch) {
    comm::Batch named = batch;  // models are numbered as they are sharded
    named.label.controls = std::regex_replace(named.label.controls, std::regex("model \\d+"), "");
    comm::Entry entry;
    comm::describe(named, 0, entry);
    of_ranks.at(static_cast<std::size_t>(rank))
        .issued.push_back(concat(to_string(entry), " ", entry.fingerprint));
  });
  ranks(c.ranks).run([&](World& world) {
    Seen& seen = of_ranks.at(static_cast<std::size_t>(world.rank()));
    seen_here = &seen;
    const auto module = module_of(c);
    auto handle = fully_shard(module, data_mesh(world, c.replicas), policy);
    compile(handle, {.mode = CompileMode::kReplay});
    step(c, handle);  // eager, recorded, compared
    step(c, handle);  // compared, replayed
    handle.zero_grad();
    seen = {};
    const ReplayCalls before = replay_calls(handle);
    step(c, handle);
    expect_replayed(replay_calls(handle), before, c.name);
    seen.gradients = whole_gradients(handle);
    for (auto& [name, gradient] : seen.gradients) gradient = comm::read_on_host(gradient, name);
    for (auto& [name, slots] : seen.slots) slots = comm::read_on_host(slots, name);
    for (const auto& view : handle.shards()) {
      seen.contracts += concat(view.contract->name, to_string(view.contract->accumulate),
                               to_string(view.contract->reduce), to_string(view.contract->final));
      seen.accumulate = view.contract->accumulate;
    }
    seen_here = nullptr;
  });
  return of_ranks;
}

/// All parameters alike, and the sum where nothing loses it.
void check(const Case& c, const Seen& seen) {
  const auto& first = seen.slots.begin()->second;
  EXPECT_EQ(seen.slots.size(), kSources.size() * kRaw.size()) << c.name;
  EXPECT_EQ(first.size(), kValues.size()) << c.name;
  for (const auto& [name, slots] : seen.slots) {
    ASSERT_EQ(slots.size(), first.size()) << c.name << " " << name;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      EXPECT_TRUE(same_bits(slots[i], first[i])) << c.name << " " << name << ", arrival " << i;
    }
  }
  EXPECT_EQ(first[0].scalar_type(), to_scalar_type(seen.accumulate));
  EXPECT_TRUE(at::equal(first[0][0].to(at::kDouble), pattern(at::kDouble)[0] * kValues[0]));
  for (const auto& [name, gradient] : seen.gradients) {
    EXPECT_TRUE(same_bits(gradient, seen.gradients.begin()->second)) << c.name << " " << name;
    if (seen.accumulate == DType::kBFloat16) continue;  // 256 + 1 is 256 there
    EXPECT_TRUE(at::equal(gradient[0].to(at::kDouble), pattern(at::kDouble)[0]))
        << c.name << " " << name << ": " << gradient[0];
  }
}

void expect_equal(const Case& c, const Seen& found, const Seen& expected) {
  EXPECT_EQ(found.issued, expected.issued) << c.name << ": what is sent knows the raw dtype";
  EXPECT_EQ(found.contracts, expected.contracts) << c.name;
  for (const auto& [name, slots] : expected.slots) {
    for (std::size_t i = 0; i < slots.size(); ++i) {
      EXPECT_TRUE(same_bits(found.slots.at(name).at(i), slots[i])) << c.name << " " << name;
    }
  }
  expect_same(found.gradients, expected.gradients, c.name);
}

// Naive: a first gradient that is copied, a raw dtype that picks a bucket, a kernel that writes
// what should have been rounded.
TEST(RawDtypes, SlotsHaveTheSameBitsForAnyArrival) {
  const std::vector<std::size_t> sizes = {kLayouts.size(),
                                          kOwn.size(),
                                          kAccumulate.size(),
                                          kReduce.size(),
                                          kForms.size(),
                                          kCompute.size(),
                                          2};
  for (const Choice& choice : cases(sizes, is_valid, 20)) {
    Case c = case_of(choice);
    std::vector<Seen> expected;
    for (c.shift = 0; c.shift < kRaw.size(); ++c.shift) {
      SCOPED_TRACE(concat(c.name, ", turned by ", c.shift));
      written = 0;
      auto found = run(c);
      for (const Seen& seen : found) check(c, seen);
      const bool may_be_written = c.own == Own::kUnset || c.own == Own::kNone;
      EXPECT_EQ(written > 0, may_be_written) << written;
      if (expected.empty()) {
        expected = std::move(found);
        continue;
      }
      for (std::size_t rank = 0; rank < found.size(); ++rank) {
        expect_equal(c, found[rank], expected[rank]);
      }
    }
  }
}

}  // namespace
}  // namespace tessera::test::raw_dtypes_test
