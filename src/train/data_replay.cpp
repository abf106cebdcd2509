#include "train/data_replay.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/joined.h"
#include "base/log.h"
#include "base/printable.h"
#include "nn/loss.h"
#include "tessera/error.h"

namespace tessera::train {
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
    : file_(path) {
  const bool prefixed =
      prefix == StepsPrefix::kPreferred && file_.header().find("steps/input_ids") != nullptr;
  input_name_ = prefixed ? "steps/input_ids" : "input_ids";
  label_name_ = prefixed ? "steps/labels" : "labels";
  check_shapes();
  check_values(vocabulary);
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
  // What collators make stands beside the ids; what hangs below a prefix are mostly results.
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

void ReplayedBatches::check_values(const Vocabulary& vocabulary) const {
  const TensorInfo& inputs = find(input_name_);
  const TensorInfo& labels = find(label_name_);
  for (std::int64_t step = 0; step < steps_; ++step) {
    std::int64_t kept = 0;
    for (std::int64_t row = 0; row < rows_; ++row) {
      const at::Tensor ids = read(inputs, step, {row, row + 1});
      const at::Tensor wanted = read(labels, step, {row, row + 1});
      const auto* id = ids.const_data_ptr<std::int64_t>();
      const auto* label = wanted.const_data_ptr<std::int64_t>();
      for (std::int64_t t = 0; t < columns_; ++t) {
        TESSERA_CHECK(id[t] >= 0 && id[t] < vocabulary.size, ErrorKind::kFormat,
                      shown(file_.path()), ": found the token id ", id[t], " in ", input_name_,
                      " (row ", row, ", column ", t, "), expected 0 to ", vocabulary.size - 1,
                      ", the model's vocabulary");
        TESSERA_CHECK(t == 0 || label[t] == nn::kIgnoredLabel ||
                          (label[t] >= 0 && label[t] < vocabulary.size),
                      ErrorKind::kFormat, shown(file_.path()), ": found the label ", label[t],
                      " in ", label_name_, " (row ", row, ", column ", t,
                      "), expected -100 or 0 to ", vocabulary.size - 1);
        if (t > 0 && label[t] != nn::kIgnoredLabel) ++kept;  // column 0 is predicted by nothing
      }
    }
    TESSERA_CHECK(kept > 0, ErrorKind::kFormat, shown(file_.path()), ": found no kept label in ",
                  label_name_, steps_ > 1 ? concat(" of step ", step + 1) : std::string(),
                  ", expected at least one that is not -100 after column 0");
  }
}

MicroBatch ReplayedBatches::load(std::int64_t step, RowRange rows) const {
  TESSERA_INVARIANT(step >= 1 && rows.begin >= 0 && rows.end <= rows_, "rows outside the step");
  const std::int64_t index = (step - 1) % steps_;
  MicroBatch batch;
  batch.input_ids = read(find(input_name_), index, rows);
  batch.targets = nn::next_token_targets(read(find(label_name_), index, rows));
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

}  // namespace tessera::train
