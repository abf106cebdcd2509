// Tokens after a prompt, one after the other, by one process.
//
// The prompt runs through the model at once, each further token alone over the cached keys and
// values of those before it; a model that keeps none runs the whole text again for every token. The
// model is parallelize.h's, of contracts for inference: every parameter is frozen and whole in its
// compute dtype, so that nothing is gathered and what comes out is what any layout computes. Next:
// sampling.h chooses.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "models/language_model.h"
#include "tessera/shard.h"
#include "tessera/world.h"
#include "train/config/config.h"
#include "train/hf/model_source.h"
#include "train/sampling.h"

namespace tessera::train {

/// A model to generate from, its weights loaded; generate() takes its decoder_of, which lives as
/// long. `source` has a folder. Collective. Errors: as parallelize; kConfig for a family that
/// writes no text yet.
std::shared_ptr<Sharded<models::LanguageModel>> parallelize_to_generate(const ModelSource& source,
                                                                        const Config& config,
                                                                        World& world);
models::WritesText& decoder_of(const Sharded<models::LanguageModel>& model);

struct GenerateOptions {
  std::int64_t max_new_tokens = 0;
  Sampling sampling;
  std::vector<std::int64_t> end_tokens;  ///< the first of them that is chosen is the last token
  std::int64_t ids_below = 0;            ///< only these are chosen; 0 = the whole vocabulary
  c10::Device device = c10::kCPU;        ///< where the model is
};

enum class EndedBy : std::uint8_t { kCount, kEndToken, kPositions };

/// Errors: kUsage for an empty prompt, a prompt token outside the vocabulary, a prompt longer than
/// the model's max_position_embeddings.
void check_prompt(const models::ModelSpec& spec, const std::vector<std::int64_t>& prompt);

/// Calls on_token(id) for every new token as it is chosen, an end token included. Ends early where
/// the model has no further position. Errors: as check_prompt; kNumeric as choose_token.
EndedBy generate(models::WritesText& model, const std::vector<std::int64_t>& prompt,
                 const GenerateOptions& options, const std::function<void(std::int64_t)>& on_token);

}  // namespace tessera::train
