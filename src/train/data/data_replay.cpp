#include "train/data/data_replay.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/text/printable.h"
#include "grad/torch_dtype.h"
#include "models/patch_grid.h"
#include "nn/loss.h"
#include "tessera/error.h"

namespace tessera::train {
namespace {

constexpr std::int64_t kImageType = 1;

const TensorInfo& find(const SafetensorsFile& file, const std::string& name) {
  const TensorInfo* tensor = file.header().find(name);
  TESSERA_CHECK(tensor != nullptr, ErrorKind::kFormat, shown(file.path()), ": found no tensor ",
                name,
                " with pixel_values, expected pixel_values, image_position_ids and "
                "mm_token_type_ids");
  return *tensor;
}

/// Errors: kFormat unless it has integers of 32 or 64 bits.
void require_integers(const SafetensorsFile& file, const TensorInfo& tensor,
                      const std::string& name) {
  TESSERA_CHECK(tensor.dtype == DType::kInt64 || tensor.dtype == DType::kInt32, ErrorKind::kFormat,
                shown(file.path()), ": found ", to_string(tensor.dtype), " in ", name,
                ", expected int64");
}

/// Errors: kFormat unless it has the shape of `ids`.
void require_shape_of(const SafetensorsFile& file, const TensorInfo& tensor,
                      const std::string& name, const TensorInfo& ids, const std::string& ids_name) {
  TESSERA_CHECK(tensor.shape == ids.shape, ErrorKind::kFormat, shown(file.path()), ": found ", name,
                " ", shape_text(tensor.shape), ", expected the shape of ", ids_name, " ",
                shape_text(ids.shape));
}

const TensorInfo& find_integers(const SafetensorsFile& file, const std::string& name) {
  const TensorInfo& tensor = find(file, name);
  require_integers(file, tensor, name);
  return tensor;
}

models::Images read_images(const SafetensorsFile& file, const models::ImagePatches& patches) {
  const TensorInfo& pixels = find(file, "pixel_values");
  const TensorInfo& positions = find_integers(file, "image_position_ids");
  const std::int64_t values = 3 * patches.patch_size * patches.patch_size;
  TESSERA_CHECK(pixels.shape.size() == 3 && pixels.shape[2] == values &&
                    is_floating(pixels.dtype) && !is_float8(pixels.dtype),
                ErrorKind::kFormat, shown(file.path()), ": found pixel_values ",
                to_string(pixels.dtype), " ", shape_text(pixels.shape), ", expected floating [N,P,",
                values, "]");
  const std::vector<std::int64_t> expected{pixels.shape[0], pixels.shape[1], 2};
  TESSERA_CHECK(positions.shape == expected, ErrorKind::kFormat, shown(file.path()),
                ": found image_position_ids ", shape_text(positions.shape), ", expected ",
                shape_text(expected));
  models::Images images;
  images.position_ids = read_integers(file, positions, 0, positions.numel()).view(positions.shape);
  const at::Tensor stored =
      at::empty(pixels.shape, at::TensorOptions().dtype(to_scalar_type(pixels.dtype)));
  const auto bytes = file.range(pixels, 0, pixels.numel());
  if (!bytes.empty()) std::memcpy(stored.mutable_data_ptr(), bytes.data(), bytes.size());
  images.pixel_values = stored.to(at::kFloat);
  return images;
}

/// One row of ids and types.
struct Row {
  std::int64_t number = 0;
  const std::int64_t* ids = nullptr;
  const std::int64_t* types = nullptr;
  std::int64_t columns = 0;
};

/// Lengths of the row's runs of image tokens.
std::vector<std::int64_t> runs_of(const Row& row, std::int64_t image_id,
                                  const SafetensorsFile& file) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t t = 0; t < row.columns; ++t) {
    const bool image = row.ids[t] == image_id;
    TESSERA_CHECK(row.types[t] == (image ? kImageType : 0), ErrorKind::kFormat, shown(file.path()),
                  ": found type ", row.types[t], " in mm_token_type_ids (row ", row.number,
                  ", column ", t, ") at the token id ", row.ids[t],
                  ", expected 1 at every image token (id ", image_id, ") and 0 elsewhere");
    if (!image) continue;
    if (t > 0 && row.ids[t - 1] == image_id) {
      ++lengths.back();
    } else {
      lengths.push_back(1);
    }
  }
  return lengths;
}

/// The first image of each row, and behind them the number of images. `lengths`: soft tokens of
/// each image.
std::vector<std::int64_t> first_images(const std::vector<Row>& rows,
                                       const std::vector<std::int64_t>& lengths,
                                       std::int64_t image_id, const SafetensorsFile& file) {
  std::vector<std::int64_t> first;
  std::size_t image = 0;
  for (const Row& row : rows) {
    first.push_back(static_cast<std::int64_t>(image));
    for (const std::int64_t length : runs_of(row, image_id, file)) {
      TESSERA_CHECK(image < lengths.size() && length == lengths[image], ErrorKind::kFormat,
                    shown(file.path()), ": found a run of ", length, " image tokens (row ",
                    row.number, "), expected ",
                    image < lengths.size()
                        ? concat(lengths[image], " as image ", image, " makes")
                        : concat("only ", lengths.size(), " runs, one an image"));
      ++image;
    }
  }
  TESSERA_CHECK(image == lengths.size(), ErrorKind::kFormat, shown(file.path()), ": found ", image,
                " runs of image tokens, expected ", lengths.size(),
                ", one an image of pixel_values");
  first.push_back(static_cast<std::int64_t>(image));
  return first;
}

}  // namespace

at::Tensor read_integers(const SafetensorsFile& file, const TensorInfo& tensor, std::int64_t begin,
                         std::int64_t end) {
  const auto bytes = file.range(tensor, begin, end);
  at::Tensor out = at::empty({end - begin}, at::kLong);
  auto* values = out.mutable_data_ptr<std::int64_t>();
  if (tensor.dtype == DType::kInt64) {
    if (!bytes.empty()) std::memcpy(values, bytes.data(), bytes.size());
    return out;
  }
  for (std::size_t i = 0; i < bytes.size() / sizeof(std::int32_t); ++i) {
    std::int32_t narrow = 0;
    std::memcpy(&narrow, bytes.data() + i * sizeof(narrow), sizeof(narrow));
    values[i] = narrow;
  }
  return out;
}

std::optional<ReplayedImages> ReplayedImages::open(const SafetensorsFile& file,
                                                   const models::ImageTokens& tokens,
                                                   const BatchSize& size,
                                                   const std::string& ids_name) {
  if (file.header().find("pixel_values") == nullptr) return std::nullopt;
  const TensorInfo& ids_info = find_integers(file, ids_name);
  const at::Tensor ids = read_integers(file, ids_info, 0, ids_info.numel());
  ReplayedImages result;
  result.size_ = size;
  result.images_ = read_images(file, tokens.patches);
  const auto lengths = models::patch_grid(result.images_.position_ids, tokens.patches).tokens;
  const std::string types_name =
      ids_name == "input_ids" ? "mm_token_type_ids" : "steps/mm_token_type_ids";
  const TensorInfo& types_info = find_integers(file, types_name);
  require_shape_of(file, types_info, types_name, ids_info, ids_name);
  const at::Tensor types = read_integers(file, types_info, 0, types_info.numel());
  result.token_types_ = types.view({size.steps, size.rows, size.columns});
  for (std::int64_t step = 0; step < size.steps; ++step) {
    std::vector<Row> rows;
    for (std::int64_t row = 0; row < size.rows; ++row) {
      const std::int64_t begin = (step * size.rows + row) * size.columns;
      rows.push_back({row, ids.const_data_ptr<std::int64_t>() + begin,
                      types.const_data_ptr<std::int64_t>() + begin, size.columns});
    }
    for (const std::int64_t first : first_images(rows, lengths, tokens.id, file)) {
      result.first_image_.push_back(first);
    }
  }
  return result;
}

void ReplayedImages::load(std::int64_t step_index, RowRange rows, MicroBatch& batch) const {
  const auto first = [&](std::int64_t row) {
    return first_image_[static_cast<std::size_t>(step_index * (size_.rows + 1) + row)];
  };
  const std::int64_t begin = first(rows.begin);
  const std::int64_t count = first(rows.end) - begin;
  batch.images = models::Images{images_.pixel_values.narrow(0, begin, count),
                                images_.position_ids.narrow(0, begin, count)};
  batch.token_types = token_types_.select(0, step_index).narrow(0, rows.begin, rows.size());
}

namespace {

constexpr std::size_t kMaxNamesBytes = 256;

std::string indices_name(std::int64_t layer) { return concat("router/", layer, "/indices"); }

/// Whether some verb reads it: the choice between prefixes and of --impose-routing is the user's.
bool is_read(std::string_view name, bool images) {
  constexpr std::string_view kSteps = "steps/";
  if (name.starts_with("router/") && name.ends_with("/indices")) return true;
  if (images && (name == "pixel_values" || name == "image_position_ids")) return true;
  if (name.starts_with(kSteps)) name.remove_prefix(kSteps.size());
  return name == "input_ids" || name == "labels" || (images && name == "mm_token_type_ids");
}

}  // namespace

ReplayedBatches::ReplayedBatches(const std::string& path, StepsPrefix prefix,
                                 const Vocabulary& vocabulary)
    : file_(path), vocabulary_(vocabulary) {
  const bool prefixed =
      prefix == StepsPrefix::kPreferred && file_.header().find("steps/input_ids") != nullptr;
  input_name_ = prefixed ? "steps/input_ids" : "input_ids";
  label_name_ = prefixed ? "steps/labels" : "labels";
  check_shapes();
  warn_of_others(vocabulary.images.has_value());
  if (!vocabulary.images) return;
  const BatchSize size{steps_, rows_, columns_};
  images_ = ReplayedImages::open(file_, *vocabulary.images, size,
                                 prefixed ? "steps/input_ids" : "input_ids");
}

void ReplayedBatches::warn_of_others(bool images) const {
  std::vector<std::string> names;
  for (const TensorInfo& tensor : file_.header().tensors) {
    if (!is_read(tensor.name, images)) names.push_back(tensor.name);
  }
  if (names.empty()) return;
  // Collators write tensors next to the ids; tensors below a prefix are mostly results.
  std::ranges::stable_sort(
      names, {}, [](const auto& name) { return std::pair(name.find('/') != name.npos, name); });
  log::warn(
      shown(file_.path()), ": found ", names.size(),
      " tensor(s) that are not read: ", printable(joined(names), kMaxNamesBytes),
      "; every row runs whole from position 0, without a padding mask of its own: what is not "
      "to count has the label -100, and tensors that are not meant can be left out of the file");
}

void ReplayedBatches::impose(const RoutingWanted& routing) {
  TESSERA_INVARIANT(steps_ == 1, "routing of several steps");
  const std::vector<std::int64_t> expected{rows_ * columns_, routing.experts_per_token};
  for (const std::int64_t layer : routing.layers) {
    const TensorInfo& indices = find(indices_name(layer));
    TESSERA_CHECK(indices.shape == expected, ErrorKind::kFormat, shown(file_.path()), ": found ",
                  indices_name(layer), " ", shape_text(indices.shape), ", expected ",
                  shape_text(expected));
    const at::Tensor all = read_integers(file_, indices, 0, indices.numel());
    TESSERA_CHECK(all.ge(0).logical_and(all.lt(routing.experts)).all().item<bool>(),
                  ErrorKind::kFormat, shown(file_.path()),
                  ": found an expert outside the model's in ", indices_name(layer),
                  ", expected 0 to ", routing.experts - 1);
  }
  routing_ = routing;
}

const TensorInfo& ReplayedBatches::find(const std::string& name) const {
  const TensorInfo* tensor = file_.header().find(name);
  TESSERA_CHECK(tensor != nullptr, ErrorKind::kFormat, shown(file_.path()), ": found no tensor ",
                name, ", expected ",
                name.starts_with("router/") ? "the experts of every token, [B*T,k]"
                                            : "input_ids and labels [S,B,T] or [B,T]");
  require_integers(file_, *tensor, name);
  return *tensor;
}

void ReplayedBatches::check_shapes() {
  const TensorInfo& inputs = find(input_name_);
  const TensorInfo& labels = find(label_name_);
  const auto& shape = inputs.shape;
  TESSERA_CHECK(shape.size() == 2 || shape.size() == 3, ErrorKind::kFormat, shown(file_.path()),
                ": found ", input_name_, " ", shape_text(shape), ", expected [S,B,T] or [B,T]");
  require_shape_of(file_, labels, label_name_, inputs, input_name_);
  TESSERA_CHECK(inputs.numel() > 0, ErrorKind::kFormat, shown(file_.path()), ": found ",
                input_name_, " ", shape_text(shape), ", expected at least one row of one token");
  steps_ = shape.size() == 3 ? shape[0] : 1;
  rows_ = shape[shape.size() - 2];
  columns_ = shape.back();
}

at::Tensor ReplayedBatches::read(const TensorInfo& tensor, std::int64_t step_index,
                                 RowRange rows) const {
  const std::int64_t begin = (step_index * rows_ + rows.begin) * columns_;
  return read_integers(file_, tensor, begin, begin + rows.size() * columns_)
      .view({rows.size(), columns_});
}

void ReplayedBatches::check_values(const Rows& of, const at::Tensor& ids,
                                   const at::Tensor& labels) const {
  const auto* id = ids.const_data_ptr<std::int64_t>();
  const auto* label = labels.const_data_ptr<std::int64_t>();
  const auto place = [&](std::int64_t at) {
    return concat(" (", steps_ > 1 ? concat("step ", of.step_index + 1, " of the file, ") : "",
                  "row ", of.rows.begin + at / columns_, ", column ", at % columns_, ")");
  };
  const std::int64_t size = vocabulary_.size;
  for (std::int64_t i = 0; i < ids.numel(); ++i) {
    TESSERA_CHECK(id[i] >= 0 && id[i] < size, ErrorKind::kFormat, shown(file_.path()),
                  ": found the token id ", id[i], " in ", input_name_, place(i), ", expected 0 to ",
                  size - 1, ", the model's vocabulary");
    TESSERA_CHECK(images_ || !vocabulary_.images || id[i] != vocabulary_.images->id,
                  ErrorKind::kFormat, shown(file_.path()), ": found an image token (id ", id[i],
                  ") in ", input_name_, place(i), " without pixel_values, expected their images");
    // Column 0 is predicted by nothing.
    TESSERA_CHECK(
        i % columns_ == 0 || label[i] == nn::kIgnoredLabel || (label[i] >= 0 && label[i] < size),
        ErrorKind::kFormat, shown(file_.path()), ": found the label ", label[i], " in ",
        label_name_, place(i), ", expected -100 or 0 to ", size - 1);
  }
}

void ReplayedBatches::check_labels(std::int64_t steps) {
  if (steps == 0) return;
  for (std::int64_t step = 1; step <= std::min(steps, steps_); ++step) {
    if (load(step, {0, rows_}).unmasked_targets() > 0) return;
  }
  throw Error(ErrorKind::kFormat,
              concat(shown(file_.path()), ": found no unmasked target in ", label_name_,
                     steps < steps_ ? concat(" of steps 1 to ", steps) : std::string(),
                     ", expected at least one that is not -100 after column 0"));
}

std::vector<std::string> ReplayedBatches::opened_from() const {
  std::vector<std::string> lines;
  for (const TensorInfo& tensor : file_.header().tensors) {
    if (!is_read(tensor.name, vocabulary_.images.has_value())) continue;
    lines.push_back(concat(printable(tensor.name), " ", to_string(tensor.dtype), " ",
                           shape_text(tensor.shape), " in ", shown(file_.path().filename())));
  }
  return lines;
}

MicroBatch ReplayedBatches::load(std::int64_t step, RowRange rows) const {
  TESSERA_INVARIANT(step >= 1 && rows.begin >= 0 && rows.end <= rows_, "rows outside the step");
  const std::int64_t index = (step - 1) % steps_;
  MicroBatch batch;
  batch.input_ids = read(find(input_name_), index, rows);
  const at::Tensor labels = read(find(label_name_), index, rows);
  check_values({index, rows}, batch.input_ids, labels);
  batch.targets = nn::next_token_targets(labels);
  if (images_) images_->load(index, rows, batch);
  if (!routing_) return batch;
  for (const std::int64_t layer : routing_->layers) {
    const std::int64_t k = routing_->experts_per_token;
    batch.imposed_routing.push_back(read_integers(file_, find(indices_name(layer)),
                                                  rows.begin * columns_ * k,
                                                  rows.end * columns_ * k)
                                        .view({rows.size() * columns_, k}));
  }
  return batch;
}

std::unique_ptr<BatchSource> open_replay(const BatchRequest& request) {
  auto batches = std::make_unique<ReplayedBatches>(request.path[0], StepsPrefix::kPreferred,
                                                   request.vocabulary);
  const TrainingConfig& training = request.training;
  TESSERA_CHECK(request.packing != Packing::kDocuments, ErrorKind::kConfig,
                "data.packing: found documents, but the rows of ", request.path[0],
                " are made already; leave it out");
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

}  // namespace tessera::train
