#include "train/whole_model.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "fsdp/finite_copy.h"
#include "grad/torch_dtype.h"
#include "models/expert_bias.h"
#include "models/family.h"
#include "models/lora.h"
#include "nn/parameter.h"
#include "tessera/error.h"
#include "train/hf/model_source.h"
#include "train/hf/weights.h"
#include "train/load_balance.h"

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
       pieces_in_file({}, contract.shape, form.file, {}, {0, flat.numel()})) {
    for (std::int64_t begin = 0; begin < piece.local.size(); begin += kLoadChunk) {
      const auto end = std::min(begin + kLoadChunk, piece.local.size());
      const at::Tensor stored = at::empty({end - begin}, at::TensorOptions().dtype(storage));
      fsdp::finite_copy(stored, read_parameter(folder, contract, form, part_of(piece, begin, end)),
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
  const FileForms forms(source.description.parameters);
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

}  // namespace tessera::train
