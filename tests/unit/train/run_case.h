// A model that is large enough to have units of its own, trained from scratch on ranks as threads.
#pragma once

#include <ATen/Parallel.h>

#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "train/config/config.h"

namespace tessera::train {

enum class Head { kOwn, kTied };

/// Three layers: matrices above the 64 KiB below which buckets merge, norms below. Two rows a rank
/// and step at most.
inline Config run_case(const TemporaryFolder& folder, Head head) {
  folder.write("model.json", concat(R"({"architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3", "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 192, "hidden_act": "silu",
    "vocab_size": 260, "max_position_embeddings": 64, "rope_theta": 10000.0, "rms_norm_eps": 1e-06,
    "attention_bias": false, "initializer_range": 0.02, "tie_word_embeddings": )",
                                    head == Head::kTied ? "true}" : "false}"));
  std::string text;
  for (int line = 0; line < 60; ++line) text += "line " + std::to_string(line) + " of a page.\n";
  folder.write("page.txt", text);
  Config config;
  config.model.config = folder / "model.json";
  config.data.path = {folder / "page.txt"};
  config.training.steps = 3;
  config.training.seq_len = 16;
  config.optimizer.lr = 0.01;
  config.checkpoint.enable = false;
  config.job.dump_folder = (folder / "run").string();
  config.metrics.folder = folder / "run/metrics";
  return config;
}

/// The model of a folder of tests/golden/data in the place of the case's own. `change`: all of its
/// config.json, and the part that describes text.
inline void write_model(
    const TemporaryFolder& folder, const std::string& of,
    const std::function<void(nlohmann::json& model, nlohmann::json& text)>& change = {}) {
  std::ifstream in(std::string(TESSERA_TEST_DATA) + "/" + of + "/config.json");
  auto model = nlohmann::json::parse(in);
  if (change) change(model, model.contains("text_config") ? model["text_config"] : model);
  folder.write("model.json", model.dump());
}

/// Wide enough that layers are no small buckets.
inline void widen(nlohmann::json& model, nlohmann::json& text) {
  text.update({{"hidden_size", 128}, {"intermediate_size", 192}, {"vocab_size", 512}});
  if (text.contains("moe_intermediate_size")) text["moe_intermediate_size"] = 96;
  if (&text != &model) text["vocab_size_per_layer_input"] = 512;
}

/// With room for bytes, and behind them for the tokens of what is no text.
inline void make_room_for_bytes(nlohmann::json& model, nlohmann::json& text) {
  text["vocab_size"] = 264;
  if (&text == &model) return;
  text["vocab_size_per_layer_input"] = 264;
  model.update({{"image_token_id", 260}, {"video_token_id", 261}, {"audio_token_id", 262}});
}

/// `body` on ranks with one thread each; step lines are swallowed.
inline void on_ranks(int count, const std::function<void(World&)>& body,
                     ThreadBackend backend = ThreadBackend::kInProcess) {
  std::ostringstream swallowed;
  auto* const before = std::cout.rdbuf(swallowed.rdbuf());
  try {
    test::ranks(count, backend).run([&](World& world) {
      at::set_num_threads(1);
      body(world);
    });
  } catch (...) {
    std::cout.rdbuf(before);
    throw;
  }
  std::cout.rdbuf(before);
}

}  // namespace tessera::train
