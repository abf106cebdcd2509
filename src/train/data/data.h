// Batches of rows: batches of input ids and targets from text and NAME.bin, or X.safetensors.
//
// One class a kind of data behind BatchSource; open_batches chooses. Sources know rows of a step,
// not ranks: who computes which row is the sampler's. Opening reads no tokens: what can be wrong
// with the data besides is found then, an id outside the vocabulary where it is read. Next:
// source_draw.h, trainer.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "models/language_model.h"
#include "models/model_spec.h"
#include "tessera/world.h"
#include "train/config/config_resolve.h"
#include "train/data/sampler.h"

namespace tessera::train {

/// Rows of one micro-batch. Shapes: both [b, T] int64, contiguous, b may be 0.
/// targets[:, t] is what position t is to predict (already shifted), -100 = nothing (nn/loss.h).
struct MicroBatch {
  at::Tensor input_ids;
  at::Tensor targets;
  /// Those of the rows; with none of them N = 0, so that the tower runs on every rank.
  std::optional<models::Images> images = std::nullopt;
  std::optional<at::Tensor> token_types = std::nullopt;  ///< [b, T] i64
  std::vector<at::Tensor> imposed_routing = {};  ///< [b*T, K] i64 a layer with experts, or empty
  std::vector<std::size_t> sources = {};         ///< [b], of each row; empty where the run has one
  nn::Documents documents = {};                  ///< that rows are packed of
  std::optional<at::Tensor> fillers = {};        ///< [b, T] bool: places that packing leaves empty
  /// How ranks of cp share the rows; none where they do not, or before on().
  std::optional<layout::ContextCut> cut = {};
  /// Targets that are not -100.
  std::int64_t unmasked_targets() const;
  /// With the targets: for the loss.
  models::ModelInputs inputs() const;
  /// The same where `model` computes: on a device by pinned memory, without a wait of the host.
  /// Layers there cannot look at values without one, so they are looked at before. Of a pipeline's
  /// rank what its stages read: without the embedding ids have sizes alone, without the head
  /// targets stay on the host. Where ranks of cp share rows, with the cut of these. Errors:
  /// kFormat, as LanguageModel::check_values.
  MicroBatch on(at::Device device, const models::LanguageModel& model) const;
};

/// The model's view of token ids.
struct Vocabulary {
  std::int64_t size = 0;  ///< ids are below this
  bool reads_bytes =
      false;  ///< trained from scratch, or its config.json says "tessera_tokenizer": "bytes"
  std::optional<models::ImageTokens> images = std::nullopt;
  /// How a document turns depends on its length (longest_short_row()). The last token of a packed
  /// document, the input of no target, then stands as a document of its own: else a document inside
  /// a row had an input more than at the row's end, which has no place for that token.
  bool lengths_count = false;
};

class BatchSource {
 public:
  virtual ~BatchSource() = default;
  /// B: rows of every step, the same number always.
  virtual std::int64_t rows_in_step() const = 0;
  /// T: inputs of a row.
  virtual std::int64_t row_tokens() const = 0;
  /// Rows `rows` of step `step` (from 1); an empty range gives [0, T]. Threads: any. Errors:
  /// kFormat for an id outside the vocabulary.
  virtual MicroBatch load(std::int64_t step, RowRange rows) const = 0;
  /// Rows of one pass, in which steps have each row once.
  virtual std::int64_t rows_in_pass() const = 0;
  /// A step may have no unmasked target; a run without one has nothing to train on. Makes the index
  /// of a mask that has none, on disk: one rank calls this. Errors: kFormat where the rows of steps
  /// 1 to `steps` have none.
  virtual void check_labels(std::int64_t steps) = 0;
  virtual std::size_t sources() const { return 1; }
  /// How much of the rows up to the end of `step` came from each of several sources; empty of one.
  virtual std::vector<double> shares(std::int64_t /*step*/) const { return {}; }
  /// A line for each of several sources.
  virtual std::vector<std::string> as_text() const { return {}; }
  /// The files that it was opened from, in lines that are equal where files, borders and rows are:
  /// names without folders, sizes, what is made of them. Not the files' contents.
  virtual std::vector<std::string> opened_from() const = 0;
};

/// A request to open a source.
struct BatchRequest {
  std::vector<std::string> path;
  std::string key = "data.path";         ///< what messages call it
  std::vector<DataSource> sources = {};  ///< in place of path
  std::optional<Packing> packing = std::nullopt;
  bool packing_is_a_must = true;  ///< else rows are a stream's where a NAME.docs.bin lacks
  TrainingConfig training;
  int data_ranks = 1;
  std::uint64_t seed = 0;
  Vocabulary vocabulary;
  std::int64_t steps = 0;  ///< that will be loaded, from 1
};

/// Opens and checks the data. Errors: kIo for what cannot be read, kFormat for what is malformed or
/// empty, kConfig for what does not fit the keys.
std::unique_ptr<BatchSource> open_batches(const BatchRequest& request);

/// Ranks that opened other files, as on hosts with copies of their own, would compute rows of
/// different orders silently. `key`: what messages call the data. Collective. Errors, on all
/// ranks alike: kFormat naming the first rank that has other data than rank 0, and what differs.
void require_same_at_all(const BatchSource& source, std::string_view key, World& world);

/// The vocabulary of a model; `from_scratch` means that it has no folder.
Vocabulary vocabulary_of(const models::ModelSpec& spec, bool from_scratch);

/// Which experts a batch file is to impose: router/<i>/indices [B*T, K] of every layer with
/// experts.
using RoutingWanted = models::RoutedExperts;

/// The one batch of `tessera gradients`: the unprefixed input_ids and labels of a file. Errors: as
/// above.
std::unique_ptr<BatchSource> open_gradients_batch(const std::string& path,
                                                  const Vocabulary& vocabulary,
                                                  const std::optional<RoutingWanted>& routing);

}  // namespace tessera::train
