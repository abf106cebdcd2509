// A program that can be stopped at any time and resumes, on any number of ranks.
//
//   build/release/examples/03_save_and_resume [RANKS [FOLDER]]
//
// The first run trains 20 steps on 2 ranks and leaves a checkpoint; each later one, with the same
// FOLDER and as many ranks as it likes, begins where the last one ended. What it finds is compared
// with what was saved: the loss on the same rows, bit for bit. At the end rank 0 takes model and
// optimizer state in whole form, as a program with a file format of its own would, and loads them
// into another model.
#include <c10/core/GradMode.h>
#include <tessera/tessera.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

constexpr int kSteps = 20;  // of a run

struct Mlp : torch::nn::Module {
  explicit Mlp(int seed) {
    at::manual_seed(static_cast<std::uint64_t>(seed));
    first = register_module("first", torch::nn::Linear(16, 64));
    second = register_module("second", torch::nn::Linear(64, 4));
  }
  at::Tensor forward(const at::Tensor& x) { return second(at::tanh(first(x))); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};

at::Tensor inputs(std::int64_t step, int rank) {
  const auto t = at::arange(32 * 16, at::TensorOptions().dtype(at::kFloat)).view({32, 16});
  return at::sin(t * (1.7 + 0.3 * rank) + static_cast<double>(step));
}

template <class Handle>
at::Tensor loss_of(Handle& model, const at::Tensor& x) {
  const auto target =
      at::sin(at::arange(16 * 4, at::TensorOptions().dtype(at::kFloat))).view({16, 4}) * 0.3;
  return (model.forward(x) - at::mm(x, target)).pow(2).mean();
}

/// On rows that are the same on every rank and in every run, with all digits.
template <class Handle>
std::string validate(Handle& model) {
  const at::NoGradGuard no_grad;
  char text[64];
  std::snprintf(text, sizeof(text), "%.17g", loss_of(model, inputs(-1, 0)).template item<double>());
  return text;
}

void train(tessera::World& world, const std::string& folder) {
  const auto mesh = world.mesh(tessera::MeshShape::dense(1, 1, world.size(), 1, 1));
  auto model = tessera::fully_shard(std::make_shared<Mlp>(1), mesh);
  tessera::AdamWOptions options;
  options.weight_decay = 0.0;
  const auto optimizer = tessera::make_adamw(model, options);

  // 1. Resume, where there is something to continue from. Every rank reads what it owns.
  std::int64_t done = 0;
  if (tessera::has_checkpoint(world, folder)) {
    const auto loaded = tessera::load_checkpoint(model, *optimizer, folder);
    done = loaded.step;
    const auto& saved = std::get<std::string>(loaded.user.at("validation"));
    const auto found = validate(model);
    TESSERA_CHECK(found == saved, tessera::ErrorKind::kNumeric, "validation: found ", found,
                  ", expected ", saved, " as when it was saved");
    if (world.rank() == 0) {
      std::printf("resumed %s of %d rank(s) on %d: validation %s, as it was saved\n",
                  loaded.path.c_str(), static_cast<int>(loaded.world_size), world.size(),
                  found.c_str());
    }
  }

  // 2. Train. A learning rate that changes follows from the step: the optimizer's state has none.
  for (const auto end = done + kSteps; done < end;) {
    ++done;
    optimizer->set_lr(1e-2 / (1.0 + static_cast<double>(done) / 100.0));
    torch::autograd::backward({loss_of(model, inputs(done, world.rank()))}, {});
    tessera::clip_grad_norm(model, 1.0);
    optimizer->step();
    model.zero_grad();
  }
  const auto after = validate(model);
  TESSERA_CHECK(std::stod(after) < 0.1, tessera::ErrorKind::kNumeric, "validation: found ", after,
                " after step ", done, ", expected below 0.1");

  // 3. Save: parameters, buffers, optimizer state, and a few values of your own.
  tessera::SaveOptions saving;
  saving.user = {{"epoch", done / kSteps}, {"validation", after}};
  saving.keep_latest_k = 2;
  tessera::save_checkpoint(model, *optimizer, folder, done, saving);

  // 4. The same in whole form. state_dict() could go to rank 0 alone (kFullOnRankZero) and into a
  // file; here another model takes it.
  const auto parameters = tessera::state_dict(model, tessera::StateDictKind::kFull);
  const auto state = tessera::optimizer_state_dict(model, *optimizer);
  auto copy = tessera::fully_shard(std::make_shared<Mlp>(2), mesh);
  const auto copy_optimizer = tessera::make_adamw(copy, options);
  tessera::load_state_dict(copy, parameters);
  tessera::load_optimizer_state_dict(copy, *copy_optimizer, state);
  TESSERA_CHECK(validate(copy) == after, tessera::ErrorKind::kNumeric,
                "a copy: found another validation loss than ", after);
  if (world.rank() == 0) {
    std::printf("step %d: validation %s, saved in %s/step-%d; %s keeps of %s:",
                static_cast<int>(done), after.c_str(), folder.c_str(), static_cast<int>(done),
                state.optimizer.c_str(), state.parameters.front().parameter.c_str());
    for (const auto& [name, values] : state.parameters.front().kept) {
      std::printf(" %s", name.c_str());
    }
    std::printf(" after %d updates\n", static_cast<int>(state.parameters.front().steps));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 2;
  const std::string folder = argc > 2 ? argv[2] : "03_save_and_resume.checkpoint";
  return tessera::launch(ranks, [&](tessera::World& world) { train(world, folder); });
}
