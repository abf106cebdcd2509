// What one action of a schedule costs in addition to its computing: stages of one addition over 16 numbers,
// on one rank or on several over Gloo.
//
//   build/release/bench/pipeline_actions [KIND=ZBV] [ranks=1] [micro-batches=8] [steps=200]
//
// Prints the median and the 10th and 90th percentile over steps, in microseconds of one F or B (an I
// with its W counts as a B) of a rank.
#include <ATen/ATen.h>
#include <tessera/pipeline.h>
#include <tessera/world.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

using tessera::pipeline::Tensors;

double at_share(const std::vector<double>& sorted, double share) {
  return sorted[static_cast<std::size_t>(share * static_cast<double>(sorted.size() - 1))];
}

void measure(tessera::World& world, const tessera::PipelineOptions& options, int steps) {
  const auto mesh = world.mesh(tessera::MeshShape::dense(world.size(), 1, 1, 1, 1));
  tessera::Pipeline pipeline(mesh, options);
  const tessera::pipeline::BoundaryTensor border{{16}, at::kFloat};
  std::vector<std::shared_ptr<tessera::pipeline::Stage>> stages;
  for (std::size_t i = 0; i < pipeline.stages().size(); ++i) {
    const auto weight = at::ones({16}).requires_grad_();
    stages.push_back(
        tessera::make_stage([weight](const Tensors& inputs) { return Tensors{inputs[0] + weight}; },
                            {border}, {border}));
  }
  pipeline.set_stages(stages);
  const auto x = at::ones({16});
  // F and B: an I and a W count as two.
  const bool halves = options.schedule.starts_with("Z") || options.schedule == "DualPipeV";
  const auto actions = static_cast<double>(stages.size()) * options.micro_batches * 2.0;
  std::vector<double> times;
  for (int step = 0; step < steps; ++step) {
    const auto begin = std::chrono::steady_clock::now();
    pipeline.step([&](std::int64_t) { return Tensors{x}; },
                  [](std::int64_t, const Tensors& outputs) { return outputs[0].square().sum(); });
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - begin;
    if (step >= steps / 10) times.push_back(time.count() / actions);
  }
  std::ranges::sort(times);
  if (world.rank() != 0) return;
  std::printf("%s, %d ranks, %d micro-batches: %.1f us an F or B (p10 %.1f, p90 %.1f)%s\n",
              options.schedule.c_str(), world.size(), options.micro_batches, at_share(times, 0.5),
              at_share(times, 0.1), at_share(times, 0.9), halves ? "; I and W count as one B" : "");
}

}  // namespace

int main(int count, char** arguments) {
  tessera::PipelineOptions options;
  options.schedule = count > 1 ? arguments[1] : "ZBV";
  const int ranks = count > 2 ? std::atoi(arguments[2]) : 1;
  options.micro_batches = count > 3 ? std::atoi(arguments[3]) : 8;
  const int steps = count > 4 ? std::atoi(arguments[4]) : 200;
  return tessera::launch(ranks, [&](tessera::World& world) { measure(world, options, steps); });
}
