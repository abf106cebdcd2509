#include "train/generate.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "comm/device.h"
#include "comm/host_read.h"
#include "models/family.h"
#include "moe/routing.h"
#include "tessera/error.h"
#include "train/config/config_resolve.h"
#include "train/parallelize.h"
#include "train/report/device_limits.h"

namespace tessera::train {
std::shared_ptr<Sharded<models::LanguageModel>> parallelize_to_generate(const ModelSource& source,
                                                                        const Config& config,
                                                                        World& world) {
  TESSERA_INVARIANT(source.folder != nullptr, "a model without weights");
  const Mesh mesh = world.mesh(mesh_shape(resolve_parallelism(config.parallelism, world.size())));
  ModelParts parts = model_parts(source, config, mesh, Purpose::kInference);
  TESSERA_CHECK(parts.model->writer() != nullptr, ErrorKind::kConfig,
                "config.json architectures: found ",
                models::traits(source.spec.family).architecture,
                ", expected a family without a module of its own; text of this one cannot be "
                "generated yet");
  const auto device = comm::facts_of(world.device());
  require_16_bits(parts.contract.parameters, device.name, device.capability);
  return parallelize(std::move(parts), source, config, mesh);
}

models::WritesText& decoder_of(const Sharded<models::LanguageModel>& model) {
  models::WritesText* const writer = model.module()->writer();
  TESSERA_INVARIANT(writer != nullptr, "a model that writes no text");
  return *writer;
}

namespace {

/// [1, T]
at::Tensor row_of(const std::vector<std::int64_t>& ids) {
  at::Tensor row = at::empty({1, static_cast<std::int64_t>(ids.size())}, at::kLong);
  std::copy(ids.begin(), ids.end(), row.mutable_data_ptr<std::int64_t>());
  return row;
}

}  // namespace

void check_prompt(const models::ModelSpec& spec, const std::vector<std::int64_t>& prompt) {
  TESSERA_CHECK(!prompt.empty(), ErrorKind::kUsage,
                "prompt: found no token, expected at least one");
  for (std::size_t i = 0; i < prompt.size(); ++i) {
    TESSERA_CHECK(prompt[i] >= 0 && prompt[i] < spec.vocab_size, ErrorKind::kUsage,
                  "prompt: found the token id ", prompt[i], " at position ", i, ", expected 0 to ",
                  spec.vocab_size - 1, ", the model's vocabulary");
  }
  TESSERA_CHECK(std::cmp_less_equal(prompt.size(), spec.max_position_embeddings), ErrorKind::kUsage,
                "prompt: found ", prompt.size(), " tokens, expected at most ",
                spec.max_position_embeddings, ", the model's max_position_embeddings");
}

EndedBy generate(models::WritesText& model, const std::vector<std::int64_t>& prompt,
                 const GenerateOptions& options,
                 const std::function<void(std::int64_t)>& on_token) {
  const c10::NoGradGuard no_grad;
  const models::ModelSpec& spec = model.spec();
  check_prompt(spec, prompt);
  const auto given = static_cast<std::int64_t>(prompt.size());
  // The last token is never put in, so it needs no position.
  const std::int64_t most =
      std::min(options.max_new_tokens, spec.max_position_embeddings - given + 1);
  models::DecoderCache cache = model.make_cache(given + most - 1);
  std::vector<std::int64_t> text = prompt;
  at::Tensor next = comm::uploaded(row_of(prompt), options.device);
  for (std::int64_t made = 0; made < most; ++made) {
    const moe::ScoreChecks scores;
    const auto read =
        comm::read_on_host({model.decode(next, cache), scores.noted().flags()}, "logits");
    scores.noted().check(read[1]);
    const at::Tensor logits = read[0].to(at::kFloat).contiguous();
    const auto count = options.ids_below == 0 ? logits.size(1) : options.ids_below;
    const std::int64_t token =
        choose_token({logits.const_data_ptr<float>(), static_cast<std::size_t>(count)},
                     options.sampling, given + made);
    on_token(token);
    if (std::ranges::find(options.end_tokens, token) != options.end_tokens.end()) {
      return EndedBy::kEndToken;
    }
    text.push_back(token);
    const bool refills = models::outgrows(spec, cache.length(), cache.length() + 1);
    if (refills) cache = model.make_cache(given + most - 1);
    next = comm::uploaded(row_of(refills ? text : std::vector{token}), options.device);
  }
  return most < options.max_new_tokens ? EndedBy::kPositions : EndedBy::kCount;
}

}  // namespace tessera::train
