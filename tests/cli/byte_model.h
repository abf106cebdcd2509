// A Hugging Face folder of a small byte model with drawn weights.
#pragma once

#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "base/random.h"
#include "io/safetensors.h"
#include "models/description.h"

namespace tessera::cli {

inline models::ModelSpec byte_spec() {
  models::ModelSpec spec;
  spec.vocab_size = 260;  // three ids that stand for nothing
  spec.hidden_size = 32;
  spec.num_hidden_layers = 2;
  spec.num_attention_heads = 4;
  spec.num_key_value_heads = 2;
  spec.head_dim = 8;
  spec.intermediate_size = 48;
  spec.max_position_embeddings = 64;
  spec.initializer_range = 0.3;  // far from uniform: a text that changes
  spec.tessera_tokenizer = "bytes";
  return spec;
}

inline void write_folder(const std::filesystem::path& folder, const models::ModelSpec& spec) {
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "config.json") << models::config_json(spec);
  std::vector<TensorSpec> specs;
  for (const models::ParameterSpec& row : models::describe(spec).parameters) {
    if (row.tied_to.empty()) specs.push_back({row.name, DType::kFloat32, row.shape});
  }
  SafetensorsWriter writer(folder / "model.safetensors", specs);
  for (const models::ParameterSpec& row : models::describe(spec).parameters) {
    if (!row.tied_to.empty()) continue;
    std::vector<float> values(static_cast<std::size_t>(row.numel()), 1.0F);
    if (row.init == models::InitKind::kNormal) {
      fill_normal(values.data(), 0, row.numel(), 1, row.name, 0.0F,
                  static_cast<float>(row.init_std));
    }
    writer.write(row.name, std::as_bytes(std::span(values)));
  }
  writer.finish();
}

}  // namespace tessera::cli
