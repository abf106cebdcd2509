// Lists whose backwards or weight gradients leave the order of the micro-batches, over sharded
// stages: in whole numbers the sums of the same micro-batches in order, exactly.

#include <fstream>
#include <mutex>

#include "dist/staged.h"
#include "support/temporary_folder.h"
#include "tessera/pipeline.h"

namespace tessera::test::pipeline_any_order_test {
namespace {

constexpr std::int64_t kWidth = 4;
constexpr int kStages = 2;
constexpr int kDataRanks = 2;
constexpr int kMicroBatches = 3;
constexpr int kSteps = 2;

at::Tensor signs(std::uint64_t seed, std::int64_t rows) {
  return at::sign(seeded(seed, {rows, kWidth}));
}

/// One 1 or -1 a row, and a bias of these: a weight whose gradient may be deferred, and one whose
/// gradient comes at once.
std::shared_ptr<nn::Linear> line(int stage) {
  const at::NoGradGuard no_grad;
  auto made = std::make_shared<nn::Linear>(kWidth, kWidth, nn::Bias::kYes);
  made->weight.set_data(at::roll(here(at::eye(kWidth)), stage + 1, 0) *
                        (stage % 2 == 0 ? 1.0 : -1.0));
  made->bias.set_data(signs(50 + static_cast<std::uint64_t>(stage), 1).view({kWidth}));
  return made;
}

/// The lines of some stages, each a unit.
class Lines : public torch::nn::Module {
 public:
  Lines(const Mesh& mesh, const std::vector<int>& stages) {
    for (const int stage : stages) {
      lines_[stage] =
          register_module(concat("line", stage),
                          std::make_shared<Sharded<nn::Linear>>(fully_shard(line(stage), mesh)));
    }
  }
  at::Tensor run(int stage, const at::Tensor& x) { return lines_.at(stage)->forward(x); }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x;
    for (const auto& [stage, handle] : lines_) y = handle->forward(y);
    return y;
  }

 private:
  std::map<int, std::shared_ptr<Sharded<nn::Linear>>> lines_;
};

at::Tensor input(int data_rank, int step, std::int64_t micro_batch) {
  return signs(1000 + static_cast<std::uint64_t>(100 * step + 10 * micro_batch + data_rank), 2);
}

/// Linear, so that no number grows fast.
at::Tensor loss_of(const at::Tensor& y, std::int64_t micro_batch) {
  return (y * signs(2000 + static_cast<std::uint64_t>(micro_batch), 2)).sum();
}

/// By step and name, of the whole model.
struct Result {
  std::map<int, Tensors> gradients, weights;
};

/// Quarters below 2^16: sums of these are exact in fp32 in every order. Gradients of the first step
/// are halves (the mean of two data ranks) and weights after it, so gradients of the second one are
/// quarters.
void expect_exact(const Tensors& tensors) {
  for (const auto& [name, tensor] : tensors) {
    EXPECT_TRUE(tensor.mul(4).eq(tensor.mul(4).round()).all().item<bool>()) << name;
    EXPECT_LT(tensor.abs().max().item<double>(), 1 << 16) << name;
  }
}

/// Steps by a learning rate of 1, which keeps the numbers whole.
void take(ShardedBase& handle, int step, int data_rank, std::mutex& mutex, Result& result) {
  auto gradients = whole_gradients(handle);
  make_sgd(handle, sgd(1.0))->step();
  auto weights = whole_parameters(handle);
  handle.zero_grad();
  if (data_rank != 0) return;
  const std::lock_guard lock(mutex);
  result.gradients[step].merge(gradients);
  result.weights[step].merge(weights);
}

Result run_in_order() {
  Result result;
  std::mutex mutex;
  ranks(kDataRanks).run([&](World& world) {
    const auto mesh = world.mesh(MeshShape::dense(1, 1, kDataRanks, 1, 1));
    auto lines = fully_shard(std::make_shared<Lines>(mesh, std::vector<int>{0, 1}), mesh);
    for (int step = 0; step < kSteps; ++step) {
      for (int k = 0; k < kMicroBatches; ++k) {
        lines.set_requires_gradient_sync(k + 1 == kMicroBatches);
        backward(loss_of(lines.forward(input(world.rank(), step, k)), k));
      }
      take(lines, step, world.rank(), mutex, result);
    }
  });
  return result;
}

Result run_list(const PipelineOptions& options) {
  Result result;
  std::mutex mutex;
  ranks(kStages * kDataRanks).run([&](World& world) {
    const auto mesh = world.mesh(MeshShape::dense(kStages, 1, kDataRanks, 1, 1));
    Pipeline pipeline(mesh, options);
    auto lines = fully_shard(std::make_shared<Lines>(mesh, pipeline.stages()), mesh);
    const std::vector<pipeline::BoundaryTensor> border{{{2, kWidth}, at::kFloat}};
    const int stage = pipeline.stages().front();
    pipeline.set_stages(
        {make_stage(
            [&lines, stage](const pipeline::Tensors& inputs) {
              return pipeline::Tensors{lines.call(&Lines::run, stage, inputs.at(0))};
            },
            border, border)},
        &lines);
    const int data_rank = mesh.coordinate(axis::kShard);
    for (int step = 0; step < kSteps; ++step) {
      pipeline.step([&](std::int64_t k) { return pipeline::Tensors{input(data_rank, step, k)}; },
                    [](std::int64_t k, const pipeline::Tensors& outputs) {
                      return loss_of(outputs.at(0), k);
                    });
      take(lines, step, data_rank, mutex, result);
    }
  });
  return result;
}

/// A row a rank.
struct List {
  const char* what;
  const char* rows;
};

constexpr List kLists[] = {
    {"backwards in reverse",
     "0F0,0F1,0F2,0B2,0B1,0B0\n"
     "1F0,1F1,1F2,1B2,1B1,1B0\n"},
    {"weight gradients in other orders",
     "0F0,0F1,0F2,0I0,0I1,0I2,0W1,0W2,0W0\n"
     "1F0,1I0,1F1,1I1,1W1,1F2,1I2,1W2,1W0\n"},
    {"inputs' gradients in reverse, weights' in order, and some of both at once",
     "0F0,0F1,0F2,0I2,0B1,0I0,0W0,0W2\n"
     "1F0,1F1,1F2,1I2,1I1,1I0,1W0,1W1,1W2\n"},
};

TEST(PipelineOfHandlesInAnyOrder, HasTheSumsOfTheMicroBatchesInOrder) {
  const Result expected = run_in_order();
  for (int step = 0; step < kSteps; ++step) {
    expect_exact(expected.gradients.at(step));
    expect_exact(expected.weights.at(step));
  }
  const TemporaryFolder folder;
  PipelineOptions options;
  options.micro_batches = kMicroBatches;
  options.schedule_file = (folder.path() / "own.csv").string();
  for (const List& list : kLists) {
    std::ofstream(options.schedule_file) << list.rows;
    for (const auto reshard : {StepReshard::kStep, StepReshard::kMicroBatch}) {
      for (const bool sync_every : {false, true}) {
        SCOPED_TRACE(concat(list.what, reshard == StepReshard::kStep ? "" : ", gathered each time",
                            sync_every ? ", reduced after each micro-batch" : ""));
        options.reshard = reshard;
        options.sync_every_micro_batch = sync_every;
        const Result found = run_list(options);
        for (int step = 0; step < kSteps; ++step) {
          SCOPED_TRACE(concat("step ", step));
          expect_same(found.gradients.at(step), expected.gradients.at(step), "gradients");
          expect_same(found.weights.at(step), expected.weights.at(step), "weights");
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera::test::pipeline_any_order_test
