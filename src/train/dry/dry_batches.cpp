#include "train/dry/dry_batches.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <filesystem>

#include "base/text/count_text.h"
#include "base/text/printable.h"
#include "io/safetensors.h"
#include "models/model_spec.h"
#include "tessera/error.h"
#include "train/config/config_resolve.h"

namespace tessera::train {
namespace {

constexpr std::int64_t kImageType = 1;

DataHeader header_of(const SafetensorsFile& file, const ModelSource& source) {
  const auto find = [&](const char* name) { return file.header().find(name); };
  const TensorInfo* ids = find("steps/input_ids");
  if (ids == nullptr) ids = find("input_ids");
  TESSERA_CHECK(
      ids != nullptr && (ids->shape.size() == 2 || ids->shape.size() == 3) && ids->numel() > 0,
      ErrorKind::kFormat, shown(file.path()), ": found ",
      ids == nullptr ? "no input_ids" : concat("input_ids ", shape_text(ids->shape)),
      ", expected input_ids [S,B,T] or [B,T]");
  DataHeader header{.rows = ids->shape[ids->shape.size() - 2], .columns = ids->shape.back()};
  if (ids->shape.size() == 3) header.steps = ids->shape.front();
  const auto tokens = models::image_tokens(source.spec);
  const TensorInfo* pixels = find("pixel_values");
  if (!tokens || pixels == nullptr) return header;
  const std::int64_t side = tokens->patches.patch_size;
  const std::int64_t kernel = tokens->patches.pooling_kernel_size;
  TESSERA_CHECK(pixels->shape.size() == 3 && pixels->shape[2] == 3 * side * side &&
                    pixels->shape[1] > 0 && pixels->shape[1] % (kernel * kernel) == 0,
                ErrorKind::kFormat, shown(file.path()), ": found pixel_values ",
                shape_text(pixels->shape), ", expected [N,P,", 3 * side * side,
                "], P a multiple of pooling_kernel_size^2 = ", kernel * kernel);
  header.images = pixels->shape[0];
  header.patches = pixels->shape[1];
  return header;
}

/// Sides of the largest image, in soft tokens, of at most `most` of them.
std::pair<std::int64_t, std::int64_t> sides_of(std::int64_t most,
                                               const models::ImagePatches& patches) {
  const std::int64_t longest = patches.position_embedding_size / patches.pooling_kernel_size;
  for (std::int64_t tokens = std::min(most, longest * longest); tokens > 0; --tokens) {
    for (std::int64_t width = std::min(tokens, longest); width * longest >= tokens; --width) {
      if (tokens % width == 0) return {width, tokens / width};
    }
  }
  return {0, 0};
}

/// Each chunk of attention is gone through: so many take minutes.
void require_few_chunks(const models::ModelSpec& spec, std::int64_t positions) {
  if (!spec.chunked) return;
  constexpr std::int64_t kMost = std::int64_t{1} << 16;
  std::int64_t layers = 0;
  for (std::int64_t layer = 0; layer < spec.num_hidden_layers; ++layer) {
    layers += spec.is_chunked(layer) ? 1 : 0;
  }
  const std::int64_t size = spec.chunked->attention_chunk_size;
  const std::int64_t chunks = (positions - 1) / size + 1;
  TESSERA_CHECK(layers == 0 || chunks <= kMost / layers, ErrorKind::kConfig,
                "training.seq_len: found rows of ", positions, " tokens, which are ", chunks,
                " chunks of attention (attention_chunk_size ", size, ") in each of ",
                count_text(layers, "layer"), ", expected at most ", kMost,
                " in all layers: memory and bytes of more are not counted");
}

/// None where the first path is no .safetensors file, or is not there.
std::optional<DataHeader> header_of_first(const std::vector<std::string>& paths, const char* key,
                                          const ModelSource& source) {
  if (paths.empty() || data_kind(paths, key) != DataKind::kBatches ||
      !std::filesystem::exists(paths.front())) {
    return std::nullopt;
  }
  return open_as(key, [&] { return header_of(SafetensorsFile(paths.front()), source); });
}

}  // namespace

std::optional<DataHeader> read_data_header(const Config& config, const ModelSource& source) {
  if (!config.data.source.empty()) return std::nullopt;
  return header_of_first(config.data.path, "data.path", source);
}

void check_rows_of_files(const Config& config, const ModelSource& source) {
  if (const auto data = read_data_header(config, source)) {
    check_positions(config.parallelism, data->columns);
    models::check_learned_positions(source.spec, data->columns);
  }
  constexpr const char* kKey = "validation.path";
  if (const auto validation = header_of_first(config.validation.path, kKey, source)) {
    check_positions(config.parallelism, validation->columns, kKey);
    open_as(kKey, [&] { models::check_learned_positions(source.spec, validation->columns); });
  }
}

Config with_rows_of_data(Config config, const ModelSource& source, const ParallelDims& dims) {
  check_rows_of_files(config, source);
  const auto header = read_data_header(config, source);
  if (!header) return config;
  auto& training = config.training;
  if (!training.seq_len) training.seq_len = header->columns;
  if (training.global_batch_size == -1) {
    const std::int64_t together = training.local_batch_size.value_or(1) * dims.data_ranks();
    training.global_batch_size = (header->rows + together - 1) / together * together;
  }
  return config;
}

std::string images_text(const Config& config, const ModelSource& source) {
  if (!models::image_tokens(source.spec)) return "";
  const auto header = read_data_header(config, source);
  if (!header || header->images == 0) {
    return concat("no images in a step, so that no tower is counted: ",
                  header ? "data.path has no pixel_values"
                         : "data.path is no .safetensors file that is here");
  }
  return concat(count_text(header->images, "image"), " of ", header->patches, " patches in ",
                count_text(header->rows, "row"), ", by the header of data.path");
}

DryBatches::DryBatches(const Config& config, const ModelSource& source, std::int64_t rows,
                       std::int64_t positions)
    : rows_(rows), positions_(positions) {
  check_positions(config.parallelism, positions);
  models::check_learned_positions(source.spec, positions);
  require_few_chunks(source.spec, positions);
  const auto header = read_data_header(config, source);
  if (!header || header->images == 0 || !config.training.seq_len) return;
  images_.emplace(InRows{.header = *header, .tokens = *models::image_tokens(source.spec)});
  make_images();
}

std::int64_t DryBatches::first_image(std::int64_t row) const {
  return row * images_->header.images / images_->header.rows;
}

void DryBatches::make_images() {
  InRows& of = *images_;
  const models::ImagePatches& patches = of.tokens.patches;
  const std::int64_t kernel = patches.pooling_kernel_size;
  const std::int64_t in_row = (of.header.images + of.header.rows - 1) / of.header.rows;
  // A token stands before the run of each image.
  const std::int64_t room = positions_ / in_row - 1;
  TESSERA_CHECK(room > 0, ErrorKind::kConfig, "data.path: found ", count_text(in_row, "image"),
                " in a row of ", positions_, " tokens, expected room for each of them");
  const auto sides = sides_of(std::min(room, of.header.patches / (kernel * kernel)), patches);
  of.width = sides.first;
  of.height = sides.second;
  const std::int64_t count = first_image(rows_);
  const std::int64_t values = 3 * patches.patch_size * patches.patch_size;
  of.all = {at::empty({count, of.header.patches, values}),
            at::full({count, of.header.patches, 2}, -1, at::kLong)};
  const std::int64_t width = of.width * kernel, real = width * of.height * kernel;
  auto* place = of.all.position_ids.mutable_data_ptr<std::int64_t>();
  for (std::int64_t image = 0; image < count; ++image, place += 2 * of.header.patches) {
    for (std::int64_t patch = 0; patch < real; ++patch) {
      place[2 * patch] = patch % width;
      place[2 * patch + 1] = patch / width;
    }
  }
  of.token_types = at::zeros({of.header.steps, rows_, positions_}, at::kLong);
  const std::int64_t tokens = of.width * of.height;
  for (std::int64_t row = 0; row < rows_; ++row) {
    const at::Tensor types = of.token_types.select(1, row);
    for (std::int64_t i = 0; i < first_image(row + 1) - first_image(row); ++i) {
      types.narrow(1, 1 + i * (tokens + 1), tokens).fill_(kImageType);
    }
  }
}

MicroBatch DryBatches::load(std::int64_t /*step*/, RowRange rows) const {
  const at::Tensor tokens = at::zeros({rows.size(), positions_}, at::kLong);
  MicroBatch batch{.input_ids = tokens, .targets = tokens.clone()};
  if (!images_) return batch;
  batch.token_types = images_->token_types.select(0, 0).narrow(0, rows.begin, rows.size());
  batch.input_ids.masked_fill_(batch.token_types->eq(kImageType), images_->tokens.id);
  const std::int64_t begin = first_image(rows.begin), count = first_image(rows.end) - begin;
  batch.images = models::Images{images_->all.pixel_values.narrow(0, begin, count),
                                images_->all.position_ids.narrow(0, begin, count)};
  return batch;
}

}  // namespace tessera::train
