#include "train/data/data.h"

#include <ATen/ops/empty.h>

#include <sstream>
#include <string>

#include "comm/group.h"
#include "comm/host_read.h"
#include "models/context/context_work.h"
#include "nn/loss.h"
#include "tessera/error.h"
#include "train/config/config_resolve.h"
#include "train/data/data_replay.h"
#include "train/data/token_batches.h"

namespace tessera::train {

std::int64_t MicroBatch::unmasked_targets() const { return nn::count_kept(targets); }

models::ModelInputs MicroBatch::inputs() const {
  models::ModelInputs inputs;
  inputs.input_ids = input_ids;
  inputs.targets = targets;
  inputs.images = images;
  inputs.token_types = token_types;
  inputs.imposed_routing = imposed_routing;
  inputs.documents = documents;
  inputs.fillers = fillers;
  inputs.cut = cut;
  return inputs;
}

namespace {

/// Returns the cut of rows on the host, where documents can be read.
std::optional<layout::ContextCut> cut_of(const MicroBatch& batch,
                                         const models::LanguageModel& model) {
  const nn::ContextRegion& region = model.context();
  if (!region.cuts()) return std::nullopt;
  return models::context_cut(model.spec(), region.axis.size, region.parts, batch.input_ids.size(1),
                             batch.documents.starts);
}

}  // namespace

MicroBatch MicroBatch::on(at::Device device, const models::LanguageModel& model) const {
  if (device.is_cpu()) {
    MicroBatch here = *this;
    here.cut = cut_of(*this, model);
    return here;
  }
  model.check_values(inputs());
  const auto there = [&](const at::Tensor& tensor) { return comm::uploaded(tensor, device); };
  const bool embeds = models::has_embedding(model.stages());
  const auto sizes_alone = [&](const at::Tensor& ids) {
    return at::empty({1}, ids.options().device(device)).expand(ids.sizes());
  };
  MicroBatch batch{embeds ? there(input_ids) : sizes_alone(input_ids),
                   models::has_head(model.stages()) ? there(targets) : targets};
  if (images && embeds)
    batch.images = models::Images{there(images->pixel_values), there(images->position_ids)};
  if (token_types) batch.token_types = there(*token_types);
  if (documents.are_packed()) batch.documents.starts = there(documents.starts);
  if (fillers) batch.fillers = there(*fillers);
  for (const at::Tensor& indices : imposed_routing) batch.imposed_routing.push_back(there(indices));
  batch.cut = cut_of(*this, model);
  return batch;
}

std::unique_ptr<BatchSource> open_batches(const BatchRequest& request) {
  const bool is_replayed =
      request.sources.empty() && data_kind(request.path, request.key) == DataKind::kBatches;
  if (!is_replayed) return open_token_batches(request);
  return open_as(request.key, [&] { return open_replay(request); });
}

void require_same_at_all(const BatchSource& source, std::string_view key, World& world) {
  std::string text;
  for (const std::string& line : source.opened_from()) text += line + "\n";
  const auto differs = comm::first_that_differs(world.control(), text, "the same data");
  if (!differs) return;
  std::istringstream of_rank(differs->of_rank), of_first(differs->of_first);
  std::string here, first;
  while (here == first) {
    if (!std::getline(of_rank, here)) here = "nothing more";
    if (!std::getline(of_first, first)) first = "nothing more";
  }
  throw Error(ErrorKind::kFormat,
              concat(key, ": found ", here, " on rank ", differs->rank, ", expected ", first,
                     ", as on rank 0; all hosts must have the same files, and what lies next to "
                     "them"));
}

std::unique_ptr<BatchSource> open_gradients_batch(const std::string& path,
                                                  const Vocabulary& vocabulary,
                                                  const std::optional<RoutingWanted>& routing) {
  auto batches = std::make_unique<ReplayedBatches>(path, StepsPrefix::kIgnored, vocabulary);
  TESSERA_CHECK(batches->steps() == 1, ErrorKind::kFormat, path, ": found ", batches->steps(),
                " batches in input_ids, expected one, [B,T]");
  batches->check_labels(1);  // looks at all of it: what is wrong is refused before the first step
  if (routing) batches->impose(*routing);
  return batches;
}

Vocabulary vocabulary_of(const models::ModelSpec& spec, bool from_scratch) {
  Vocabulary vocabulary;
  vocabulary.size = spec.vocab_size;
  vocabulary.reads_bytes = from_scratch || spec.tessera_tokenizer == "bytes";
  vocabulary.images = models::image_tokens(spec);
  vocabulary.lengths_count = nn::longest_short_row(spec.rope).has_value();
  return vocabulary;
}

}  // namespace tessera::train
