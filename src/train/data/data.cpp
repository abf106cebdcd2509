#include "train/data/data.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "base/text/printable.h"
#include "comm/host_read.h"
#include "io/token_source.h"
#include "nn/loss.h"
#include "tessera/error.h"
#include "train/config/config_resolve.h"
#include "train/data/data_replay.h"

namespace tessera::train {
namespace {

// Rows of seq_len + 1 tokens that do not overlap; the remainder is dropped.
class TokenBatches final : public BatchSource {
 public:
  TokenBatches(std::unique_ptr<TokenSource> tokens, std::int64_t seq_len, RowOrder order)
      : tokens_(std::move(tokens)), seq_len_(seq_len), order_(order) {}

  std::int64_t rows_in_step() const override { return order_.rows_in_step(); }
  std::int64_t row_tokens() const override { return seq_len_; }

  MicroBatch load(std::int64_t step, RowRange rows) const override {
    MicroBatch batch{at::empty({rows.size(), seq_len_}, at::kLong),
                     at::empty({rows.size(), seq_len_}, at::kLong)};
    auto* inputs = batch.input_ids.mutable_data_ptr<std::int64_t>();
    auto* targets = batch.targets.mutable_data_ptr<std::int64_t>();
    std::vector<std::int64_t> row(static_cast<std::size_t>(seq_len_) + 1);
    std::vector<std::uint8_t> mask(tokens_->has_mask() ? row.size() : 0);
    for (std::int64_t i = rows.begin; i < rows.end; ++i, inputs += seq_len_, targets += seq_len_) {
      const std::int64_t begin = order_.data_row(step, i) * (seq_len_ + 1);
      tokens_->copy(begin, row);
      std::copy(row.begin(), row.end() - 1, inputs);
      std::copy(row.begin() + 1, row.end(), targets);
      if (mask.empty()) continue;
      tokens_->copy_mask(begin, mask);
      for (std::size_t t = 1; t < mask.size(); ++t) {
        if (mask[t] == 0) targets[t - 1] = nn::kIgnoredLabel;
      }
    }
    return batch;
  }

 private:
  std::unique_ptr<TokenSource> tokens_;
  std::int64_t seq_len_;
  RowOrder order_;
};

/// First: of a name that is not there nobody knows whether it is text.
void require_there(const BatchRequest& request) {
  namespace fs = std::filesystem;
  for (const std::string& path : request.path) {
    std::error_code ignored;
    TESSERA_CHECK(fs::status(path, ignored).type() != fs::file_type::not_found, ErrorKind::kIo,
                  request.key, ": cannot open ", shown(path),
                  ": found no such file or folder, expected a text file, a folder of *.txt, "
                  "NAME.bin or X.safetensors");
  }
}

std::unique_ptr<TokenSource> open_text(const BatchRequest& request) {
  require_there(request);
  TESSERA_CHECK(request.vocabulary.reads_bytes, ErrorKind::kConfig, request.key, ": found text (",
                shown(request.path[0]),
                "), but this model has a tokenizer of its own; make NAME.bin of the text with "
                "tools/tokenize.py");
  if (request.path.size() == 1) return std::make_unique<TextCorpus>(request.path[0]);
  return std::make_unique<TextCorpus>(
      std::vector<std::filesystem::path>(request.path.begin(), request.path.end()));
}

/// For each row, whether one of its targets is kept; the first token of a row is no target.
std::vector<bool> rows_with_labels(const TokenSource& tokens, std::int64_t rows,
                                   std::int64_t seq_len) {
  std::vector<bool> kept;
  std::vector<std::uint8_t> mask(static_cast<std::size_t>(seq_len));
  for (std::int64_t row = 0; row < rows; ++row) {
    tokens.copy_mask(row * (seq_len + 1) + 1, mask);
    kept.push_back(std::ranges::any_of(mask, [](std::uint8_t target) { return target != 0; }));
  }
  return kept;
}

/// A mean over no label is not a number: better found here than in step 1000.
void check_mask(const TokenSource& tokens, const BatchRequest& request, std::int64_t rows,
                const RowOrder& order) {
  if (!tokens.has_mask()) return;
  const auto kept = rows_with_labels(tokens, rows, *request.training.seq_len);
  TESSERA_CHECK(std::ranges::count(kept, true) > 0, ErrorKind::kFormat, tokens.name(),
                ": found no kept label, expected a mask with a byte that is not 0 among the "
                "targets of its ",
                rows, " rows");
  if (std::ranges::count(kept, false) == 0) return;
  const auto step_has_label = [&](std::int64_t step) {
    for (std::int64_t i = 0; i < order.rows_in_step(); ++i) {
      if (kept[static_cast<std::size_t>(order.data_row(step, i))]) return true;
    }
    return false;
  };
  bool any = false;
  for (std::int64_t step = 1; step <= request.steps; ++step) {
    const bool has = step_has_label(step);
    any |= has;
    TESSERA_CHECK(has || request.labels == LabelsNeeded::kInAnyStep, ErrorKind::kFormat,
                  tokens.name(), ": found no kept label in the rows of step ", step,
                  ", expected at least one; raise training.global_batch_size, or take rows without "
                  "a target out of the data");
    if (any && request.labels == LabelsNeeded::kInAnyStep) return;
  }
  TESSERA_CHECK(any || request.steps == 0, ErrorKind::kFormat, tokens.name(),
                ": found no kept label in the rows of steps 1 to ", request.steps,
                ", expected at least one; raise validation.steps");
}

std::unique_ptr<BatchSource> open_tokens(const BatchRequest& request,
                                         std::unique_ptr<TokenSource> tokens) {
  const BatchSizes sizes = resolve_batch(request.training, request.data_ranks);
  require_seq_len(request.training);
  const std::int64_t seq_len = *request.training.seq_len;
  const std::int64_t rows = tokens->num_tokens() / (seq_len + 1);
  TESSERA_CHECK(rows > 0, ErrorKind::kFormat, request.key, ": found ", tokens->num_tokens(),
                " tokens in ", tokens->name(), ", expected at least one row of ", seq_len + 1,
                " (training.seq_len + 1)");
  tokens->check_ids(request.vocabulary.size);
  constexpr double kMostRows = 9e18;  // of a run: they are counted in 63 bits
  TESSERA_CHECK(static_cast<double>(request.steps) * static_cast<double>(sizes.global) <= kMostRows,
                ErrorKind::kConfig, "training.global_batch_size: found ", sizes.global,
                " rows a step for ", request.steps, " steps, expected at most ", kMostRows,
                " rows in all; lower either");
  const RowOrder order(request.seed, rows, sizes.global);
  check_mask(*tokens, request, rows, order);
  return std::make_unique<TokenBatches>(std::move(tokens), seq_len, order);
}

std::unique_ptr<BatchSource> open_replay(const BatchRequest& request) {
  auto batches = std::make_unique<ReplayedBatches>(request.path[0], StepsPrefix::kPreferred,
                                                   request.vocabulary);
  const TrainingConfig& training = request.training;
  TESSERA_CHECK(!training.seq_len || *training.seq_len == batches->row_tokens(), ErrorKind::kConfig,
                "training.seq_len: found ", *training.seq_len, ", expected ", batches->row_tokens(),
                ", the columns of ", request.path[0], "; or leave it out");
  TESSERA_CHECK(
      training.global_batch_size == -1 || training.global_batch_size == batches->rows_in_step(),
      ErrorKind::kConfig, "training.global_batch_size: found ", training.global_batch_size,
      ", expected ", batches->rows_in_step(), ", the rows of a batch of ", request.path[0],
      "; or leave it out");
  return batches;
}

std::unique_ptr<BatchSource> open_kind(const BatchRequest& request) {
  switch (data_kind(request.path, request.key)) {
    case DataKind::kText:
      return open_tokens(request, open_text(request));
    case DataKind::kTokens:
      return open_tokens(request, std::make_unique<TokenFile>(request.path[0]));
    case DataKind::kBatches:
      return open_replay(request);
  }
  throw Error(ErrorKind::kInternal, "data of an unknown kind");
}

}  // namespace

std::int64_t MicroBatch::kept_labels() const { return nn::count_kept(targets); }

models::ModelInputs MicroBatch::inputs() const {
  models::ModelInputs inputs;
  inputs.input_ids = input_ids;
  inputs.targets = targets;
  inputs.images = images;
  inputs.token_types = token_types;
  inputs.imposed_routing = imposed_routing;
  return inputs;
}

MicroBatch MicroBatch::on(at::Device device, const models::LanguageModel& model) const {
  if (device.is_cpu()) return *this;
  model.check_values(inputs());
  const auto there = [&](const at::Tensor& tensor) { return comm::uploaded(tensor, device); };
  MicroBatch batch{there(input_ids), there(targets)};
  if (images)
    batch.images = models::Images{there(images->pixel_values), there(images->position_ids)};
  if (token_types) batch.token_types = there(*token_types);
  for (const at::Tensor& indices : imposed_routing) batch.imposed_routing.push_back(there(indices));
  return batch;
}

std::unique_ptr<BatchSource> open_batches(const BatchRequest& request) {
  return open_as(request.key, [&] { return open_kind(request); });
}

std::unique_ptr<BatchSource> open_gradients_batch(const std::string& path,
                                                  const Vocabulary& vocabulary,
                                                  const std::optional<RoutingWanted>& routing) {
  auto batches = std::make_unique<ReplayedBatches>(path, StepsPrefix::kIgnored, vocabulary);
  TESSERA_CHECK(batches->steps() == 1, ErrorKind::kFormat, path, ": found ", batches->steps(),
                " batches in input_ids, expected one, [B,T]");
  if (routing) batches->impose(*routing);
  return batches;
}

Vocabulary vocabulary_of(const models::ModelSpec& spec, bool from_scratch) {
  Vocabulary vocabulary;
  vocabulary.size = spec.vocab_size;
  vocabulary.reads_bytes = from_scratch || spec.tessera_tokenizer == "bytes";
  vocabulary.images = models::image_tokens(spec);
  return vocabulary;
}

}  // namespace tessera::train
