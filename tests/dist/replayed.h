// One model twice, eager and with replays: the same calls on both give the same bits.
#pragma once

#include "grad/region.h"
#include "nn/linear.h"
#include "nn/mlp.h"
#include "nn/rms_norm.h"
#include "support/plain.h"
#include "tessera/compile.h"
#include "tessera/trainable.h"

namespace tessera::test {

using Several = std::vector<at::Tensor>;

/// The parameters and tables that a layer's regions compute with.
class Part : public torch::nn::Module {
 public:
  static constexpr std::int64_t kWidth = 16;

  Part(std::uint64_t seed, at::ScalarType dtype)
      : weight(register_parameter("weight", seeded(seed, {kWidth, kWidth}, dtype) * 0.2)),
        bias(register_parameter("bias", seeded(seed + 1, {kWidth}, dtype))),
        norm(register_parameter("norm", seeded(seed + 2, {kWidth}, dtype) * 0.1 + 1.0)),
        table(register_buffer("table", seeded(seed + 3, {kWidth}))),
        sums(register_buffer("sums", at::ones({kWidth}))) {}

  /// body(inputs) as a region where regions are replayed.
  Several region(const Several& inputs, const grad::RegionBody& body,
                 const std::string& name = "") {
    return grad::in_region(grad::regions_here(), shared_from_this(), name, inputs,
                           [this, body](const Several& all) {
                             ++bodies;
                             return body(all);
                           });
  }
  /// A layer as models have them: norm, product, gate, product, the sum with what came.
  at::Tensor layer(const at::Tensor& x) const {
    const at::Tensor gate = nn::linear(nn::rms_norm(x, norm, 1e-6), weight, bias);
    return x + nn::linear(nn::swiglu(gate, x), weight);
  }

  /// The memory of another one's, as a tensor of its own.
  void tie(const Part& other) {
    weight = other.weight.detach().set_requires_grad(true);
    parameters_["weight"] = weight;
  }

  at::Tensor weight, bias, norm, table, sums;
  at::Tensor kept;  ///< of the last call, where a body says so
  int bodies = 0;   ///< that ran
  bool throws = false;
};

/// A scale, two parts and another scale; a test says what forward makes of them.
class Model : public torch::nn::Module {
 public:
  using Run = std::function<Several(Model&, const Several&)>;

  explicit Model(Run body, at::ScalarType dtype = at::kFloat)
      : run(std::move(body)),
        before(register_parameter("before", seeded(1, {Part::kWidth}, dtype) + 1.0)),
        after(register_parameter("after", seeded(2, {Part::kWidth}, dtype) + 1.0)) {
    for (std::uint64_t i = 0; i < 2; ++i) {
      parts.push_back(
          register_module(concat("part", i), std::make_shared<Part>(10 + 10 * i, dtype)));
    }
  }
  Several forward(const Several& inputs) {
    ++calls;
    return run(*this, inputs);
  }

  Run run;
  at::Tensor before, after;
  std::vector<std::shared_ptr<Part>> parts;
  int calls = 0;
};

/// The region between two scales, so that its argument has a history and its results are used.
inline Model::Run around(const std::function<Several(Part&, const Several&)>& body) {
  return [body](Model& model, const Several& inputs) {
    Several all = inputs;
    all[0] = all[0] * model.before + model.before;
    Part& part = *model.parts[0];
    auto results = part.region(all, [&part, body](const Several& in) { return body(part, in); });
    results[0] = results[0] * model.after;
    return results;
  };
}

inline Model::Run one_layer() {
  return around([](Part& part, const Several& in) { return Several{part.layer(in[0])}; });
}

struct TwinOptions {
  PrecisionPolicy policy = {};
  at::ScalarType dtype = at::kFloat;
  std::function<void(Model&)> prepare = {};  ///< before it is sharded
  std::function<ShardOptions(Model&)> options = {};
};

/// The outcome of a call: results, then gradients of inputs, undefined where there is none.
inline Several run_one(Sharded<Model>& handle, const Several& inputs) {
  Several own;
  for (const at::Tensor& input : inputs) {
    own.push_back(input.defined() ? input.detach().set_requires_grad(input.requires_grad())
                                  : input);
  }
  const auto results = handle.forward(own);
  at::Tensor loss;
  Several left;
  for (const at::Tensor& result : results) {
    left.push_back(result.detach().clone());
    if (!result.requires_grad()) continue;
    const auto addend = squares(result);
    loss = loss.defined() ? loss + addend : addend;
  }
  if (loss.defined()) backward(loss);
  for (const at::Tensor& input : own) {
    left.push_back(input.defined() && input.requires_grad() ? input.grad() : at::Tensor());
  }
  return left;
}

inline void expect_same_bits(const Several& found, const Several& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(found[i].defined(), expected[i].defined()) << i;
    if (!expected[i].defined()) continue;
    EXPECT_TRUE(same_bits(found[i], expected[i])) << i;
    EXPECT_TRUE(at::isfinite(expected[i]).all().item<bool>()) << i << " tells nothing";
  }
}

class Twins {
 public:
  Twins(const Mesh& mesh, const Model::Run& run, const TwinOptions& options = {})
      : eager(sharded(mesh, run, options)), replayed(sharded(mesh, run, options)) {
    compile(replayed, {.mode = CompileMode::kReplay});
    for (auto* handle : {&eager, &replayed}) optimizers_.push_back(make_sgd(*handle, sgd(1e-4)));
  }

  /// `act` on both, which leave the same.
  void both(const std::function<Several(Sharded<Model>&)>& act) {
    const auto expected = act(eager), found = act(replayed);
    expect_same_bits(found, expected);
  }
  /// That in each step, with an update behind it.
  void steps(int count, const std::function<Several(Sharded<Model>&, int step)>& act) {
    for (int step = 0; step < count; ++step) {
      SCOPED_TRACE(concat("step ", step));
      both([&](Sharded<Model>& handle) { return act(handle, step); });
      update();
    }
  }
  /// One micro-batch.
  void run(const Several& inputs) {
    both([&](Sharded<Model>& handle) { return run_one(handle, inputs); });
  }
  /// One sum, then an update.
  void step(const std::vector<Several>& micro_batches) {
    for (std::size_t i = 0; i < micro_batches.size(); ++i) {
      for (auto* handle : {&eager, &replayed}) {
        handle->set_requires_gradient_sync(i + 1 == micro_batches.size());
      }
      SCOPED_TRACE(concat("micro-batch ", i));
      run(micro_batches[i]);
    }
    update();
  }
  void update() {
    expect_same(whole_gradients(replayed), whole_gradients(eager), "gradients");
    for (const auto& optimizer : optimizers_) optimizer->step();
    for (auto* handle : {&eager, &replayed}) handle->zero_grad();
    const auto found = replayed.named_buffers(), expected = eager.named_buffers();
    for (const auto& buffer : expected) {
      EXPECT_TRUE(same_bits(found[buffer.key()], buffer.value())) << buffer.key();
    }
  }
  void change(const std::vector<TrainableChange>& changes) {
    set_trainable(eager, changes, {optimizers_[0].get()});
    set_trainable(replayed, changes, {optimizers_[1].get()});
  }
  Model& of_eager() { return *eager.module(); }
  Model& of_replayed() { return *replayed.module(); }
  ReplayCalls calls() const { return replay_calls(replayed); }

 private:
  static Sharded<Model> sharded(const Mesh& mesh, const Model::Run& run,
                                const TwinOptions& options) {
    const auto model = std::make_shared<Model>(run, options.dtype);
    if (options.prepare) options.prepare(*model);
    return fully_shard(model, mesh, options.policy,
                       options.options ? options.options(*model) : ShardOptions());
  }

 public:
  Sharded<Model> eager, replayed;

 private:
  std::vector<std::unique_ptr<Optimizer>> optimizers_;
};

inline at::Tensor rows(std::uint64_t seed, std::int64_t count = 3) {
  return seeded(seed, {count, Part::kWidth});
}

constexpr auto kFirst = "the first call, which makes what later ones find";

/// Why calls were eager, but for the first ones.
inline std::vector<std::string> reasons(const ReplayCalls& calls) {
  std::vector<std::string> all;
  for (const auto& [why, count] : calls.eager) {
    if (why != kFirst) all.push_back(why);
  }
  return all;
}

}  // namespace tessera::test
