// A fault of a folder or a batch is reported before the first step, on two ranks, with its name.

#include <cstring>
#include <nlohmann/json.hpp>

#include "golden/layouts.h"
#include "golden/model_folder.h"
#include "support/temporary_folder.h"

namespace tessera::golden::errors_test {
namespace {

constexpr const char* kTensor = "model.layers.1.mlp.up_proj.weight";
const Layout kTwoRanks{.ranks = 2};

StoredTensor& tensor_of(std::vector<StoredTensor>& tensors, const std::string& name) {
  const auto found = std::find_if(tensors.begin(), tensors.end(),
                                  [&](const auto& tensor) { return tensor.spec.name == name; });
  if (found == tensors.end()) throw std::runtime_error("no tensor " + name);
  return *found;
}

/// Returns what gradients and train both say of the folder.
std::string error_of_folder(const std::filesystem::path& folder, ErrorKind kind) {
  const auto& reference = Reference::of("qwen3-fp32");
  const auto message =
      error_of(kind, [&] { run_gradients(folder, kTwoRanks, reference.batches()); });
  auto config = training_config(reference, OptimizerKind::kSgd, kTwoRanks);
  config.model.path = folder;
  EXPECT_EQ(error_of(kind, [&] { run_training(config, kTwoRanks); }), message);
  return message;
}

std::string error_of_change(const std::function<void(std::vector<StoredTensor>&)>& change) {
  return error_of_folder(changed_folder("qwen3-fp32", change), ErrorKind::kFormat);
}

TEST(GoldenErrors, UnchangedFolderIsAccepted) {
  const auto folder = changed_folder("qwen3-fp32", [](auto&) {});
  EXPECT_GT(run_gradients(folder, kTwoRanks, Reference::of("qwen3-fp32").batches()).loss, 0);
}

TEST(GoldenErrors, MissingTensorIsNamed) {
  EXPECT_THAT(error_of_change([](auto& tensors) {
                std::erase_if(tensors,
                              [](const auto& tensor) { return tensor.spec.name == kTensor; });
              }),
              Says(kTensor, "no tensor", "config.json"));
}

TEST(GoldenErrors, ExtraTensorIsNamed) {
  EXPECT_THAT(error_of_change([](auto& tensors) {
                auto extra = tensor_of(tensors, kTensor);
                extra.spec.name =
                    "model.layers.4.mlp.up_proj.weight";  // the config has layers 0 to 3
                tensors.push_back(extra);
              }),
              Says("model.layers.4.mlp.up_proj.weight", "config.json"));
}

// Naive: the last reader decides which of two different weights was meant.
TEST(GoldenErrors, ATiedHeadThatIsStoredInAnotherDtypeIsNamedWithBoth) {
  const auto with_head = [](DType dtype) {
    return changed_folder("llama-fp32", [dtype](auto& tensors) {
      auto head = tensor_of(tensors, "model.embed_tokens.weight");
      head.spec.name = "lm_head.weight";
      head.spec.dtype = dtype;
      head.bytes.resize(head.bytes.size() / 4 * static_cast<std::size_t>(size_of(dtype)));
      tensors.push_back(head);
    });
  };
  const auto& reference = Reference::of("llama-fp32");
  EXPECT_GT(run_gradients(with_head(DType::kFloat32), kTwoRanks, reference.batches()).loss, 0);
  EXPECT_REFUSED(kContract,
                 run_gradients(with_head(DType::kBFloat16), kTwoRanks, reference.batches()),
                 "lm_head.weight: found bfloat16", "expected float32", "model.embed_tokens.weight");
}

// transformers takes such a head for one of its own; taking the embedding would be another model.
TEST(GoldenErrors, ATiedHeadWithOtherValuesIsNamed) {
  const auto folder = changed_folder("llama-fp32", [](auto& tensors) {
    auto head = tensor_of(tensors, "model.embed_tokens.weight");
    head.spec.name = "lm_head.weight";
    head.bytes.back() ^= std::byte{1};  // the sign or exponent of the last element, little endian
    tensors.push_back(head);
  });
  EXPECT_THAT(error_of_folder(folder, ErrorKind::kFormat),
              Says("lm_head.weight: found other values", "model.embed_tokens.weight",
                   "tie_word_embeddings"));
}

TEST(GoldenErrors, WeightsThatAreNotFiniteEndGradientsWithAnError) {
  const auto folder = changed_folder("llama-fp32", [](auto& tensors) {
    auto& bytes = tensor_of(tensors, "model.norm.weight").bytes;
    bytes[2] = std::byte{0xc0};
    bytes[3] = std::byte{0x7f};
  });
  const auto& reference = Reference::of("llama-fp32");
  EXPECT_REFUSED(kNumeric, run_gradients(folder, kTwoRanks, reference.batches()), "found loss nan",
                 "expected finite values");
}

TEST(GoldenErrors, WrongShapeIsNamedWithBothShapes) {
  EXPECT_THAT(error_of_change([](auto& tensors) {
                auto& shape = tensor_of(tensors, kTensor).spec.shape;
                std::swap(shape[0], shape[1]);
              }),
              Says(kTensor, "[32, 80]", "[80, 32]"));
}

// 2^36 elements a weight: no machine that runs this could allocate them before it looked.
TEST(GoldenErrors, SizesThatTheFilesDoNotHaveAreFoundBeforeTheyAreAllocated) {
  const auto folder = changed_folder("qwen3-fp32", [](auto&) {});
  auto config = nlohmann::json::parse(read_file(folder / "config.json"));
  config["intermediate_size"] = std::int64_t{1} << 31;
  write_model(folder, config.dump(), read_model(folder), 1);
  EXPECT_THAT(error_of_folder(folder, ErrorKind::kFormat), Says("2147483648"));
}

TEST(GoldenErrors, IntegerWeightIsNamedWithItsDtype) {
  EXPECT_THAT(error_of_folder(changed_folder("qwen3-fp32",
                                             [](auto& tensors) {
                                               tensor_of(tensors, kTensor).spec.dtype =
                                                   DType::kInt32;
                                             }),
                              ErrorKind::kFormat),
              Says(kTensor, "int32"));
}

/// A file of batches like the reference's, changed.
std::filesystem::path batches(
    const std::function<void(const std::string& name, std::int64_t* values, std::int64_t count)>&
        change) {
  const SafetensorsFile file(Reference::of("qwen3-fp32").batches());
  const auto path = temporary_path("batches.safetensors");
  const std::vector<std::string> names{"input_ids", "labels", "steps/input_ids", "steps/labels"};
  std::vector<TensorSpec> specs;
  for (const auto& name : names) specs.push_back({name, DType::kInt64, file.info(name).shape});
  SafetensorsWriter writer(path, specs);
  for (const auto& name : names) {
    const at::Tensor values = read_tensor(file, name);
    change(name, values.mutable_data_ptr<std::int64_t>(), values.numel());
    writer.write(name, std::as_bytes(std::span(values.const_data_ptr<std::int64_t>(),
                                               static_cast<std::size_t>(values.numel()))));
  }
  writer.finish();
  return path;
}

std::string error_of_gradients(const std::filesystem::path& batch) {
  return error_of(ErrorKind::kFormat,
                  [&] { run_gradients(data_folder("qwen3-fp32"), kTwoRanks, batch.string()); });
}

std::string error_of_training(const std::filesystem::path& batch) {
  auto config = training_config(Reference::of("qwen3-fp32"), OptimizerKind::kSgd, kTwoRanks);
  config.data.path = {batch.string()};
  return error_of(ErrorKind::kFormat, [&] { run_training(config, kTwoRanks); });
}

TEST(GoldenErrors, BatchWithoutAnUnmaskedTargetIsNamed) {
  const auto path = batches([](const std::string& name, std::int64_t* values, std::int64_t count) {
    if (name.ends_with("labels")) std::fill(values, values + count, -100);
  });
  EXPECT_THAT(error_of_gradients(path), Says(path.string(), "no unmasked target"));
  EXPECT_THAT(error_of_training(path), Says(path.string(), "no unmasked target in steps/labels"));
}

TEST(GoldenErrors, TokenOutsideTheVocabularyIsNamedWithItsPlace) {
  const auto path = batches([](const std::string& name, std::int64_t* values, std::int64_t count) {
    if (name.ends_with("input_ids")) values[count - 1] = 128;  // the last token of the last row
  });
  EXPECT_THAT(error_of_gradients(path), Says("128", "row 1, column 23", "0 to 127"));
  EXPECT_THAT(error_of_training(path), Says("128", "row 1, column 23", "steps/input_ids"));
}

TEST(GoldenErrors, LabelOutsideTheVocabularyIsNamed) {
  const auto path = batches([](const std::string& name, std::int64_t* values, std::int64_t) {
    if (name.ends_with("labels")) values[1] = -1;
  });
  EXPECT_THAT(error_of_gradients(path), Says("label -1", "column 1"));
  EXPECT_THAT(error_of_training(path), Says("label -1", "column 1"));
}

}  // namespace
}  // namespace tessera::golden::errors_test
