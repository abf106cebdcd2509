#include "train/generate.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "fsdp/finite_copy.h"
#include "grad/torch_dtype.h"
#include "models/adapters.h"
#include "models/expert_bias.h"
#include "models/family.h"
#include "nn/parameter.h"
#include "tessera/error.h"
#include "train/expert_balance.h"
#include "train/hf/model_source.h"
#include "train/hf/weights.h"

namespace tessera::train {
namespace {

/// Values pass through the storage dtype, as they do on the way into a shard.
at::Tensor load_parameter(const TensorSource& folder, const GradContract& contract,
                          const FileForm& form) {
  const std::string name = "parameter " + contract.name;
  const auto storage = to_scalar_type(contract.storage.dtype);
  at::Tensor whole =
      at::empty(contract.shape, at::TensorOptions().dtype(to_scalar_type(contract.compute.dtype)));
  const at::Tensor flat = whole.view({-1});
  for (const layout::Piece& piece :
       checkpointing::pieces_in_file({}, contract.shape, form.file, {}, {0, flat.numel()})) {
    for (std::int64_t begin = 0; begin < piece.local.size(); begin += kLoadChunk) {
      const auto end = std::min(begin + kLoadChunk, piece.local.size());
      const at::Tensor stored = at::empty({end - begin}, at::TensorOptions().dtype(storage));
      fsdp::finite_copy(
          stored, read_parameter(folder, contract, form, checkpointing::part_of(piece, begin, end)),
          name);
      fsdp::finite_copy(flat.narrow(0, piece.local.begin + begin, end - begin), stored, name);
    }
  }
  return whole;
}

void add_expert_biases(models::Decoder& decoder, const ModelSource& source) {
  const auto biases = stored_expert_biases(*source.folder, source.spec);
  if (biases.empty()) return;
  models::add_expert_biases(decoder);
  const auto buffers = decoder.named_buffers();
  for (const models::BufferSpec& bias : biases) {
    at::Tensor values = buffers[bias.name];
    values.copy_(read_elements(*source.folder, bias.name, 0, values.numel()));
  }
}

}  // namespace

std::shared_ptr<models::Decoder> load_whole_model(const ModelSource& source,
                                                  const std::vector<GradContract>& contracts) {
  TESSERA_INVARIANT(source.folder != nullptr, "a model without weights");
  verify_weights(*source.folder);
  if (source.adapters) verify_weights(*source.adapters);
  if (source.base_hash) check_base(source);
  const auto decoder =
      std::dynamic_pointer_cast<models::Decoder>(models::make_language_model(source.spec));
  TESSERA_CHECK(decoder != nullptr, ErrorKind::kConfig, "config.json architectures: found ",
                models::traits(source.spec.family).architecture,
                ", expected a family without a module of its own; text of this one cannot be "
                "generated yet");
  models::add_adapters(*decoder, source.lora);
  add_expert_biases(*decoder, source);
  const auto parameters = decoder->named_parameters();
  const FileForms forms = file_forms(source.description.parameters);
  for (const GradContract& contract : contracts) {
    at::Tensor parameter = parameters[contract.name];
    parameter.set_requires_grad(false);
    parameter.set_data(
        load_parameter(models::is_adapter(contract.name) ? *source.adapters : *source.folder,
                       contract, forms.of(contract)));
  }
  if (source.spec.tie_word_embeddings) {
    at::Tensor head = decoder->head().module()->lm_head()->weight;
    head.set_requires_grad(false);
    head.set_data(decoder->embedding().module()->weight.detach());
  }
  return decoder;
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

EndedBy generate(models::Decoder& model, const std::vector<std::int64_t>& prompt,
                 const GenerateOptions& options,
                 const std::function<void(std::int64_t)>& on_token) {
  const c10::NoGradGuard no_grad;
  const models::ModelSpec& spec = model.spec();
  check_prompt(spec, prompt);
  const auto given = static_cast<std::int64_t>(prompt.size());
  // The last token is never put in, so it needs no position.
  const std::int64_t most =
      std::min(options.max_new_tokens, spec.max_position_embeddings - given + 1);
  const bool cached = model.can_decode();
  models::DecoderCache cache = model.make_cache(cached ? given + most - 1 : 0);
  std::vector<std::int64_t> written = prompt;
  at::Tensor next = row_of(prompt);
  for (std::int64_t made = 0; made < most; ++made) {
    const at::Tensor logits =
        (cached ? model.decode(next, cache) : model.next_logits(next)).to(at::kFloat).contiguous();
    const auto count = options.ids_below == 0 ? logits.size(1) : options.ids_below;
    const std::int64_t token =
        choose_token({logits.const_data_ptr<float>(), static_cast<std::size_t>(count)},
                     options.sampling, given + made);
    on_token(token);
    if (std::ranges::find(options.end_tokens, token) != options.end_tokens.end()) {
      return EndedBy::kEndToken;
    }
    written.push_back(token);
    next = row_of(cached ? std::vector<std::int64_t>{token} : written);
  }
  return most < options.max_new_tokens ? EndedBy::kPositions : EndedBy::kCount;
}

}  // namespace tessera::train
