#include "train/hf/weights.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <set>
#include <span>
#include <string_view>

#include "base/random.h"
#include "base/text/printable.h"
#include "checkpoint/snapshot.h"
#include "grad/finite_copy.h"
#include "grad/torch_dtype.h"
#include "io/tensor_source.h"
#include "models/family.h"
#include "tessera/error.h"
#include "train/hf/model_source.h"
#include "train/report/progress.h"

namespace tessera::train {
namespace {

/// Names that other programs write and that hold nothing we need: buffers that are computed.
bool is_computed_buffer(const std::string& name) {
  return name.ends_with("rotary_emb.inv_freq") || name.ends_with("rotary_emb.cos_cached") ||
         name.ends_with("rotary_emb.sin_cached");
}

void check_shape(const TensorSource& folder, const std::string& name,
                 const std::vector<std::int64_t>& shape, const std::string& remark = {}) {
  const auto* info = folder.find(name);
  const bool is_packed = info == nullptr && folder.find(name + "_blocks") != nullptr;
  TESSERA_CHECK(info != nullptr, ErrorKind::kFormat, folder.path().string(), ": found no tensor ",
                name, ", expected one since config.json describes it",
                is_packed ? concat("; ", name,
                                   "_blocks is there: quantization_config of config.json "
                                   "does not say how it is packed")
                          : remark);
  TESSERA_CHECK(info->shape == shape, ErrorKind::kFormat, folder.path().string(), ": tensor ", name,
                ": found shape ", shape_text(info->shape), ", expected ", shape_text(shape),
                " from config.json");
}

/// The common prefix of the names of stacked tensors: "model.layers.0.mlp.experts.".
std::string_view stem_of(const models::ParameterSpec& parameter) {
  const std::string_view first = parameter.stacked.front();
  const std::string_view last = parameter.stacked.back();
  const auto common =
      static_cast<std::size_t>(std::ranges::mismatch(first, last).in1 - first.begin());
  return first.substr(0, first.rfind('.', common == 0 ? 0 : common - 1) + 1);
}

/// Each of them, of one shape and one dtype: they become one parameter.
void check_stacked(const TensorSource& folder, const models::ParameterSpec& parameter,
                   const std::string& remark) {
  std::size_t missing = 0;
  const std::string* first_missing = nullptr;
  for (const std::string& name : parameter.stacked) {
    if (folder.find(name) != nullptr) continue;
    if (missing++ == 0) first_missing = &name;
  }
  TESSERA_CHECK(missing == 0, ErrorKind::kFormat, folder.path().string(), ": found no tensor ",
                *first_missing, missing > 1 ? concat(" (and ", missing - 1, " more)") : "",
                ", expected all ", parameter.stacked.size(), " that ", parameter.name,
                " stacks, as many as config.json describes", remark);
  const SourceTensor& first = *folder.find(parameter.stacked.front());
  for (const std::string& name : parameter.stacked) {
    check_shape(folder, name, parameter.stacked_shape);
    const SourceTensor& tensor = *folder.find(name);
    TESSERA_CHECK(tensor.dtype == first.dtype && tensor.original == first.original,
                  ErrorKind::kFormat, folder.path().string(), ": tensor ", name, ": found dtype ",
                  to_string(tensor.dtype == first.dtype ? tensor.original : tensor.dtype),
                  ", expected ",
                  to_string(tensor.dtype == first.dtype ? first.original : first.dtype), " as of ",
                  parameter.stacked.front(), ": both are part of ", parameter.name);
  }
}

/// The most likely meaning of a tensor that the model does not have.
std::string meaning_of(const std::string& name, const std::vector<models::ParameterSpec>& table) {
  for (const auto& parameter : table) {
    if (parameter.stacked.empty()) continue;
    if (name == parameter.name) {
      return concat(", expected only the ", parameter.stacked.size(), " tensors ",
                    parameter.stacked.front(), ", ... that hold its values");
    }
    if (name.starts_with(stem_of(parameter))) {
      return concat(
          ", expected only as many experts as config.json describes: ", parameter.stacked.front(),
          " to ", parameter.stacked.back(), " in ", parameter.name);
    }
  }
  return ", expected only those of the model; is config.json the right one?";
}

/// A tied head may be stored all the same; the embedding's values count.
std::set<std::string_view> known_names(const std::vector<models::ParameterSpec>& table,
                                       const std::vector<models::BufferSpec>& buffers) {
  std::set<std::string_view> names;
  for (const auto& parameter : table) {
    if (parameter.stacked.empty()) names.insert(parameter.name);
    names.insert(parameter.stacked.begin(), parameter.stacked.end());
  }
  for (const auto& buffer : buffers) names.insert(buffer.name);
  return names;
}

/// Names the keys that decide which tensors a layer has, for a tensor of a layer.
std::string about_layers(std::string_view keys, std::string_view name) {
  if (keys.empty() || name.find(".layers.") == std::string_view::npos) return {};
  return concat("; ", keys, " of config.json says which layers there are, and of which kind");
}

}  // namespace

Error not_floating(const TensorSource& folder, std::string_view what, const std::string& name,
                   DType dtype) {
  return {ErrorKind::kFormat,
          concat(folder.path().string(), ": ", what, " ", name, ": found dtype ", to_string(dtype),
                 ", expected a floating one")};
}

void check_tensors(const TensorSource& folder, const std::vector<models::ParameterSpec>& table,
                   const std::vector<models::BufferSpec>& buffers, std::string_view layer_keys) {
  for (const auto& parameter : table) {
    if (!parameter.stacked.empty()) {
      check_stacked(folder, parameter, about_layers(layer_keys, parameter.name));
    } else if (parameter.tied_to.empty()) {
      check_shape(folder, parameter.name, parameter.shape,
                  about_layers(layer_keys, parameter.name));
    }
  }
  for (const auto& buffer : buffers) {
    check_shape(folder, buffer.name, buffer.shape);
    const DType dtype = folder.find(buffer.name)->dtype;
    if (!is_floating(dtype) || is_float8(dtype)) {
      throw not_floating(folder, "buffer", buffer.name, dtype);
    }
  }
  const auto known = known_names(table, buffers);
  std::size_t unknown = 0;
  const std::string* first = nullptr;
  for (const auto& [name, tensor] : folder.tensors()) {
    if (known.contains(name) || is_computed_buffer(name)) continue;
    if (unknown++ == 0) first = &name;
  }
  TESSERA_CHECK(unknown == 0, ErrorKind::kFormat, folder.path().string(), ": found the tensor ",
                *first, unknown > 1 ? concat(" (and ", unknown - 1, " more)") : "",
                meaning_of(*first, table), about_layers(layer_keys, *first));
}

void check_tensors(const ModelSource& source) {
  auto buffers = source.description.buffers;
  const auto biases = stored_expert_biases(*source.folder, source.spec);
  buffers.insert(buffers.end(), biases.begin(), biases.end());
  auto table = source.description.parameters;
  std::erase_if(table, [](const auto& row) { return models::is_adapter(row.name); });
  check_tensors(*source.folder, table, buffers, models::traits(source.spec.family).layer_keys);
}

void check_adapters(const ModelSource& source) {
  const TensorSource& folder = *source.adapters;
  auto table = source.description.parameters;
  std::erase_if(table, [](const auto& row) { return !models::is_adapter(row.name); });
  for (const auto& row : table) {
    check_shape(folder, row.name, row.shape);
    const DType dtype = folder.find(row.name)->dtype;
    TESSERA_CHECK(dtype == DType::kFloat32, ErrorKind::kFormat, folder.path().string(),
                  ": adapter ", row.name, ": found dtype ", to_string(dtype),
                  ", expected float32, in which adapters are trained and saved");
  }
  TESSERA_CHECK(folder.tensors().size() == table.size(), ErrorKind::kFormat, folder.path().string(),
                ": found ", folder.tensors().size(), " tensors, expected ", table.size(),
                ", two of each layer that its manifest lists");
}

layout::FileShape as_one_tensor(const GradContract& contract) {
  return {1, layout::sharded_shape(contract.layout, contract.shape)};
}

namespace {

/// Calls fill(part of the shard, part of a piece) for at most kLoadChunk elements at a time.
template <class Fill>
void in_chunks(const ShardView& view, const layout::FileShape& file, LoadingProgress& progress,
               const Fill& fill) {
  for (const layout::Piece& piece : checkpointing::pieces_of(view, file)) {
    for (std::int64_t begin = 0; begin < piece.local.size(); begin += kLoadChunk) {
      const auto end = std::min(begin + kLoadChunk, piece.local.size());
      const layout::Piece part = checkpointing::part_of(piece, begin, end);
      fill(view.shard.detach().narrow(0, part.local.begin - view.begin, end - begin), part);
      progress.add((end - begin) * static_cast<std::int64_t>(view.shard.element_size()));
    }
  }
}

/// Draws the elements of a piece of the parameter's own shape: a box has some of each row.
template <class Fill>
void draw_rows(const layout::Piece& piece, std::span<const std::int64_t> shape, float* out,
               const Fill& fill) {
  const auto draw = [&](const BoxRow& row) {
    fill(out + (row.index - piece.in_box.begin), row.position, row.position + row.count);
  };
  for_each_row(piece.box, shape, piece.in_box.begin, piece.in_box.end, draw);
}

/// Shown by rank 0: the others are about as far.
LoadingProgress progress_of(const ShardedBase& model, const char* what) {
  std::int64_t bytes = 0;
  for (const auto& view : model.shards()) bytes += static_cast<std::int64_t>(view.shard.nbytes());
  const bool shown = model.rank() == 0;
  return {what, bytes, shown ? LoadingProgress::Shown::kYes : LoadingProgress::Shown::kNo};
}

}  // namespace

void verify_weights(const TensorSource& folder, int rank, int ranks) {
  std::vector<TensorSource::HashedFile> mine;
  std::int64_t bytes = 0;
  const auto files = folder.hashed_files();
  for (std::size_t i = static_cast<std::size_t>(rank); i < files.size();
       i += static_cast<std::size_t>(ranks)) {
    mine.push_back(files[i]);
    bytes += files[i].bytes;
  }
  LoadingProgress progress("verifying weights", bytes,
                           rank == 0 ? LoadingProgress::Shown::kYes : LoadingProgress::Shown::kNo);
  for (const auto& file : mine) {
    folder.verify(file);
    progress.add(file.bytes);
  }
}

at::Tensor read_elements(const TensorSource& folder, const std::string& name, std::int64_t begin,
                         std::int64_t end) {
  auto elements =
      at::empty({end - begin}, at::TensorOptions().dtype(to_scalar_type(folder.find(name)->dtype)));
  folder.read(name, begin, end,
              {static_cast<std::byte*>(elements.mutable_data_ptr()), elements.nbytes()});
  return elements;
}

namespace {

at::Tensor read_piece(const TensorSource& folder, const std::string& name,
                      const layout::Piece& piece) {
  auto elements = at::empty({piece.in_box.size()},
                            at::TensorOptions().dtype(to_scalar_type(folder.find(name)->dtype)));
  read_box(folder, name, piece.box, piece.in_box.begin, piece.in_box.end,
           {static_cast<std::byte*>(elements.mutable_data_ptr()), elements.nbytes()});
  return elements;
}

}  // namespace

at::Tensor read_parameter(const TensorSource& folder, const GradContract& contract,
                          const FileForm& form, const layout::Piece& piece) {
  const std::string& name = form.names.at(piece.tensor);
  auto values = read_piece(folder, name, piece);
  for (const auto& alias : contract.aliases) {
    const auto* stored = folder.find(alias);
    if (stored == nullptr) continue;
    TESSERA_CHECK(
        stored->shape == contract.shape &&
            at::equal(values.view(at::kByte), read_piece(folder, alias, piece).view(at::kByte)),
        ErrorKind::kFormat, folder.path().string(), ": ", alias, ": found other values than in ",
        contract.name,
        ", expected the same, since config.json ties the two; set tie_word_embeddings = "
        "false there, or remove one tensor");
  }
  return values;
}

namespace {

/// A state that such a value decays or feeds is not finite from there on: the loss would show it at
/// the first step, without a name.
void check_finite(const at::Tensor& values, const TensorSource& folder, const std::string& name) {
  TESSERA_CHECK(values.isfinite().all().item<bool>(), ErrorKind::kFormat, folder.path().string(),
                ": tensor ", name, ": found ",
                values.isnan().any().item<bool>() ? "NaN" : "an infinity",
                ", expected finite numbers: the states of its layer depend on all of them");
}

}  // namespace

void load_weights(const ShardedBase& model, const TensorSource& folder, const FileForms& forms,
                  Loaded what, std::span<const std::string> states) {
  const at::NoGradGuard no_grad;
  LoadingProgress progress = progress_of(model, "loading weights");
  for (const auto& view : model.shards()) {
    const auto& name = view.contract->name;
    if (models::is_adapter(name) != (what == Loaded::kAdapters)) continue;
    const FileForm form = forms.of(*view.contract);
    const bool is_of_states = std::ranges::any_of(
        states, [&](const std::string& pattern) { return matches_name(pattern, name); });
    in_chunks(view, form.file, progress, [&](const at::Tensor& part, const layout::Piece& piece) {
      const at::Tensor values = read_parameter(folder, *view.contract, form, piece);
      if (is_of_states) check_finite(values, folder, name);
      grad::load_values(part, values, *view.contract);
    });
  }
}

void load_buffers(const ShardedBase& model, const TensorSource& folder) {
  const at::NoGradGuard no_grad;
  for (auto& view : model.buffers()) {
    const auto& contract = *view.contract;
    // Buffers that training adds (expert_bias.h) keep the zeros that they were made with.
    if (folder.find(contract.name) == nullptr) continue;
    view.tensor.set_data(read_elements(folder, contract.name, 0, view.tensor.numel())
                             .to(view.tensor.device(), to_scalar_type(contract.storage))
                             .view(contract.shape));
  }
}

namespace {

struct Drawn {
  float* out;
  std::int64_t begin, end;  ///< of the elements of the whole tensor
  std::uint64_t seed;
  const std::string& name;
};

/// Draws values whose softplus is a step.
void draw_steps(const nn::StepRange& steps, const Drawn& of) {
  // A least step of 0 has no logarithm: steps begin at the floor.
  const double least = steps.least > 0.0 ? steps.least : steps.floor;
  const float low = std::log(static_cast<float>(least));
  const float high = std::log(static_cast<float>(steps.most));
  fill_uniform(of.out, of.begin, of.end, of.seed, of.name, std::min(low, high),
               std::max(low, high));
  const auto floor = static_cast<float>(steps.floor);
  for (float& value : std::span(of.out, static_cast<std::size_t>(of.end - of.begin))) {
    // log(exp(y) - 1) of a step y, without its cancellation.
    value = std::log(std::expm1(std::max(std::exp(value), floor)));
  }
}

void draw(const models::ParameterSpec& spec, const Drawn& of) {
  using enum models::InitKind;
  const models::InitKind init = spec.init;
  const auto range = static_cast<float>(spec.init_std);
  const auto [out, begin, end, seed, name] = of;
  const std::span<float> values(out, static_cast<std::size_t>(end - begin));
  switch (init) {
    case kOnes:
    case kZeros:
      std::ranges::fill(values, init == kOnes ? 1.0F : 0.0F);
      break;
    case kNormal:
      fill_normal(out, begin, end, seed, name, 0.0F, range);
      break;
    case kUniform:
      fill_uniform(out, begin, end, seed, name, -range, range);
      break;
    case kLogOfUniform:
      fill_uniform(out, begin, end, seed, name, 0.01F, 16.0F);
      for (float& value : values) value = std::log(value);
      break;
    case kLogOfNumber:
      for (std::int64_t i = begin; i < end; ++i) {
        out[i - begin] = std::log(static_cast<float>(i + 1));
      }
      break;
    case kInverseSoftplus:
      draw_steps(spec.steps, of);
      break;
  }
}

}  // namespace

void draw_weights(const ShardedBase& model, const std::vector<models::ParameterSpec>& table,
                  std::uint64_t seed, Loaded what) {
  const at::NoGradGuard no_grad;
  LoadingProgress progress = progress_of(model, "drawing weights");
  for (const auto& view : model.shards()) {
    const auto& name = view.contract->name;
    if (models::is_adapter(name) != (what == Loaded::kAdapters)) continue;
    const auto spec = std::find_if(table.begin(), table.end(),
                                   [&](const auto& parameter) { return parameter.name == name; });
    TESSERA_INVARIANT(spec != table.end(), name, " is not in the parameter table");
    if (spec->init == models::InitKind::kOnes || spec->init == models::InitKind::kZeros) {
      view.shard.detach().fill_(spec->init == models::InitKind::kOnes ? 1.0 : 0.0);
      continue;
    }
    const auto fill = [&](float* out, std::int64_t begin, std::int64_t end) {
      draw(*spec, {out, begin, end, seed, name});
    };
    const layout::FileShape own = as_one_tensor(*view.contract);
    in_chunks(view, own, progress, [&](const at::Tensor& part, const layout::Piece& piece) {
      auto drawn = at::empty({part.numel()}, at::TensorOptions().dtype(at::kFloat));
      draw_rows(piece, own.shape, drawn.data_ptr<float>(), fill);
      grad::load_values(part, drawn, *view.contract);
    });
  }
}

}  // namespace tessera::train
