// A checkpoint of adapters as every reader takes it: another text than ours is refused before
// anything is written. What is written is W + alpha / rank * B A, in any parts.

#include <fstream>

#include "base/hash.h"
#include "dist/training_run.h"
#include "io/checkpoint_folder.h"
#include "models/adapters.h"
#include "support/test.h"
#include "train/hf/hf_export.h"
#include "train/hf/weights.h"
#include "train/parallelize.h"

namespace tessera::test::lora_source_test {
namespace {

namespace fs = std::filesystem;

const std::string kLayer = "model.layers.0.self_attn.q_proj";

class LoraSource : public ::testing::Test {
 protected:
  void SetUp() override {
    train_on({}, with_steps(adapters_run(folder_), 2), folder_ / "run");
    checkpoint_ = folder_ / "run/checkpoint/step-2";
  }

  train::ModelSource opened() const {
    train::ModelConfig model;
    model.path = checkpoint_.string();
    return train::open_model(model);
  }
  /// Gives the manifest another text, with its own hash.
  void alter(const std::function<void(CheckpointManifest&)>& change) const {
    const auto checkpoint = CheckpointFolder::open(checkpoint_);
    auto manifest = checkpoint.manifest();
    manifest.tensors = checkpoint.tensors();
    change(manifest);
    write_manifest(checkpoint_, std::move(manifest));
  }
  /// Says of an adapter's bytes that they are integers, in the file and in the manifest.
  void make_integers(const std::string& adapter) const {
    const std::string key = "model/" + adapter;
    const fs::path file = checkpoint_ / "rank_0.safetensors";
    std::string bytes = read_file(file);
    const auto dtype = bytes.find("F32", bytes.find(key));
    ASSERT_NE(dtype, std::string::npos);
    bytes.replace(dtype, 3, "I32");
    std::ofstream(file, std::ios::binary) << bytes;
    alter([&](CheckpointManifest& manifest) {
      manifest.files["rank_0.safetensors"].xxh3_128 = Hash128Stream().add(bytes).digest();
      manifest.tensors[key].dtype = DType::kInt32;
    });
  }
  /// Returns the refusals of each reader of adapters.
  std::vector<std::string> refusals() const {
    const train::ModelSource source = opened();
    const auto of = [&](const auto& read) { return error_of(ErrorKind::kFormat, read); };
    return {of([&] { train::plan_export(source, {}); }),
            of([&] { train::plan_adapter_export(source, {}); }),
            of([&] { train::resolve_model(source, {}, {}, train::Purpose::kInference); })};
  }

  TemporaryFolder folder_;
  fs::path checkpoint_;
};

TEST_F(LoraSource, AnAdapterThatIsMissingIsFoundBeforeAnythingIsWritten) {
  alter([](auto& manifest) { manifest.tensors.erase("model/" + models::adapter_b(kLayer)); });
  for (const auto& message : refusals()) {
    EXPECT_THAT(message, Says("found no tensor " + models::adapter_b(kLayer)));
  }
}

// B A has the same shape at any rank, and alpha / rank another value.
TEST_F(LoraSource, AnotherRankThanThatOfTheTensorsIsRefused) {
  alter([](auto& manifest) { manifest.lora->rank = 2; });
  for (const auto& message : refusals()) {
    EXPECT_THAT(message, Says(models::adapter_a(kLayer) + ": found shape", "[3, 16]", "expected",
                              "[2, 16]"));
  }
}

TEST_F(LoraSource, AdaptersThatAreNotFloat32AreRefused) {
  make_integers(models::adapter_a(kLayer));
  for (const auto& message : refusals()) {
    EXPECT_THAT(message, Says("adapter " + models::adapter_a(kLayer) +
                              ": found dtype int32, expected float32"));
  }
}

TEST_F(LoraSource, AFreezeListIsRefusedSinceItWouldBeWithoutEffect) {
  train::ModelConfig model;
  model.path = checkpoint_.string();
  model.freeze = std::vector<std::string>{};  // [] would train all
  EXPECT_REFUSED(kConfig, train::open_model(model),
                 "model.freeze: found a list for a checkpoint of adapters");
}

TEST_F(LoraSource, TheManifestsLayersAreNamesOfTheModelInItsOrder) {
  const auto refused = [&](const std::function<void(CheckpointLora&)>& change) {
    CheckpointLora before;
    alter([&](auto& manifest) { before = *manifest.lora, change(*manifest.lora); });
    const auto message = error_of(ErrorKind::kFormat, [&] { opened(); });
    alter([&](auto& manifest) { manifest.lora = before; });
    EXPECT_THAT(message, Says("step-2/manifest.json"));
    return message;
  };
  EXPECT_THAT(refused([](auto& lora) { lora.layers = {"q_proj"}; }),
              Says("lora: found the layer 'q_proj', expected a linear layer"));
  EXPECT_THAT(refused([](auto& lora) { lora.layers.back() = "model.layers.*.mlp.down_proj"; }),
              Says("found the layer 'model.layers.*.mlp.down_proj'"));
  EXPECT_THAT(refused([](auto& lora) { std::swap(lora.layers[0], lora.layers[1]); }),
              Says("in the model's order"));
  EXPECT_THAT(refused([](auto& lora) { lora.layers.push_back(lora.layers.back()); }),
              Says("found 6 layers", "each of 5 once"));
  EXPECT_THAT(refused([](auto& lora) { lora.rank = 4096; }), Says("found 4096, expected at most"));
  EXPECT_NO_THROW(opened());
}

TEST_F(LoraSource, MergedElementsInAnyPartsAreThoseOfTheWholeSum) {
  const train::ModelSource source = opened();
  const auto merged = train::merged_elements(source);
  for (const std::string& layer : source.lora.layers) {
    SCOPED_TRACE(layer);
    const std::string name = layer + ".weight";
    const auto whole = [&](const TensorSource& folder, const std::string& tensor) {
      const auto& info = *folder.find(tensor);
      return train::read_elements(folder, tensor, 0, info.numel()).view(info.shape).to(at::kDouble);
    };
    const at::Tensor base = whole(*source.folder, name);
    const at::Tensor delta = at::mm(whole(*source.adapters, models::adapter_b(layer)),
                                    whole(*source.adapters, models::adapter_a(layer))) *
                             (6.0 / 3.0);
    ASSERT_GT(delta.abs().max().item<double>(), 1e-4);
    const at::Tensor found = merged(name, 0, base.numel());
    // Three products, their sum, the scale and the last sum: six roundings of the largest value.
    const double bound = 6 * 0x1p-24 * (base.abs() + delta.abs()).max().item<double>();
    EXPECT_LE((found.view_as(base) - (base + delta)).abs().max().item<double>(), bound);
    for (std::int64_t begin = 0; begin < base.numel(); begin += 37) {
      const std::int64_t end = std::min(begin + 37, base.numel());
      // Another layer between: what is kept of one must not serve the next.
      merged(source.lora.layers.front() + ".weight", 0, 1);
      EXPECT_LE((merged(name, begin, end) - found.slice(0, begin, end)).abs().max().item<double>(),
                bound);
    }
  }
}

}  // namespace
}  // namespace tessera::test::lora_source_test
