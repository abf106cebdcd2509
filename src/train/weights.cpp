#include "train/weights.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstddef>

#include "base/philox.h"
#include "fsdp/finite_copy.h"
#include "fsdp/runtime.h"
#include "fsdp/unit.h"
#include "grad/torch_dtype.h"
#include "tessera/error.h"
#include "train/progress.h"

namespace tessera::train {
namespace {

/// Calls fill(part of the shard, first element, last element) for pieces of at most kLoadChunk
/// elements.
template <class Fill>
void in_chunks(const ShardView& view, LoadingProgress& progress, const Fill& fill) {
  for (auto begin = view.begin; begin < view.end; begin += kLoadChunk) {
    const auto end = std::min(begin + kLoadChunk, view.end);
    fill(view.shard.detach().narrow(0, begin - view.begin, end - begin), begin, end);
    progress.add((end - begin) * static_cast<std::int64_t>(view.shard.element_size()));
  }
}

/// Shown by rank 0: the others are about as far.
LoadingProgress progress_of(const ShardedBase& model, const char* what) {
  std::int64_t bytes = 0;
  for (const auto& view : model.shards()) bytes += static_cast<std::int64_t>(view.shard.nbytes());
  const bool shown = model.unit()->runtime().world().rank() == 0;
  return {what, bytes, shown ? LoadingProgress::Shown::kYes : LoadingProgress::Shown::kNo};
}

/// Names that other programs write and that hold nothing we need: buffers that are computed.
bool is_computed_buffer(const std::string& name) {
  return name.ends_with("rotary_emb.inv_freq") || name.ends_with("rotary_emb.cos_cached") ||
         name.ends_with("rotary_emb.sin_cached");
}

void check_shape(const TensorSource& folder, const std::string& name,
                 const std::vector<std::int64_t>& shape) {
  const auto* info = folder.find(name);
  TESSERA_CHECK(info != nullptr, ErrorKind::kFormat, folder.path().string(), ": found no tensor ",
                name, ", expected one since config.json describes it");
  TESSERA_CHECK(info->shape == shape, ErrorKind::kFormat, folder.path().string(), ": tensor ", name,
                ": found shape [", at::IntArrayRef(info->shape), "], expected [",
                at::IntArrayRef(shape), "] from config.json");
}

}  // namespace

void check_tensors(const TensorSource& folder, const models::ModelSpec& spec) {
  const auto table = models::parameter_table(spec);
  const auto buffers = models::buffer_table(spec);
  for (const auto& parameter : table) {
    if (parameter.tied_to.empty()) check_shape(folder, parameter.name, parameter.shape);
  }
  for (const auto& buffer : buffers) {
    check_shape(folder, buffer.name, buffer.shape);
    const DType dtype = folder.find(buffer.name)->dtype;
    TESSERA_CHECK(is_floating(dtype) && !is_float8(dtype), ErrorKind::kFormat,
                  folder.path().string(), ": buffer ", buffer.name, ": found dtype ",
                  to_string(dtype), ", expected a floating one");
  }
  const auto has = [](const auto& rows, const std::string& name) {
    return std::ranges::any_of(rows, [&](const auto& row) { return row.name == name; });
  };
  for (const auto& [name, tensor] : folder.tensors()) {
    // A tied head may be stored all the same; the embedding's values count.
    TESSERA_CHECK(has(table, name) || has(buffers, name) || is_computed_buffer(name),
                  ErrorKind::kFormat, folder.path().string(), ": found the tensor ", name,
                  ", expected only those of the model; is config.json the right one?");
  }
}

void check_adapters(const TensorSource& folder, const models::ModelSpec& spec,
                    const models::LoraSpec& lora) {
  const auto table = models::adapter_table(spec, lora);
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

at::Tensor read_parameter(const TensorSource& folder, const GradContract& contract,
                          std::int64_t begin, std::int64_t end) {
  auto values = read_elements(folder, contract.name, begin, end);
  for (const auto& alias : contract.aliases) {
    const auto* stored = folder.find(alias);
    if (stored == nullptr) continue;
    TESSERA_CHECK(stored->shape == contract.shape &&
                      at::equal(values.view(at::kByte),
                                read_elements(folder, alias, begin, end).view(at::kByte)),
                  ErrorKind::kFormat, folder.path().string(), ": ", alias,
                  ": found other values than in ", contract.name,
                  ", expected the same, since config.json ties the two; set tie_word_embeddings = "
                  "false there, or remove one tensor");
  }
  return values;
}

void load_weights(const ShardedBase& model, const TensorSource& folder, Loaded what) {
  const at::NoGradGuard no_grad;
  LoadingProgress progress = progress_of(model, "loading weights");
  for (const auto& view : model.shards()) {
    const auto& name = view.contract->name;
    if (models::is_adapter(name) != (what == Loaded::kAdapters)) continue;
    in_chunks(view, progress, [&](const at::Tensor& part, std::int64_t begin, std::int64_t end) {
      fsdp::finite_copy(part, read_parameter(folder, *view.contract, begin, end),
                        "parameter " + name);
    });
  }
}

void load_buffers(const ShardedBase& model, const TensorSource& folder) {
  const at::NoGradGuard no_grad;
  for (auto& view : model.buffers()) {
    const auto& contract = *view.contract;
    view.tensor.set_data(read_elements(folder, contract.name, 0, view.tensor.numel())
                             .to(to_scalar_type(contract.storage))
                             .view(contract.shape));
  }
}

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
    in_chunks(view, progress, [&](const at::Tensor& part, std::int64_t begin, std::int64_t end) {
      auto drawn = at::empty({end - begin}, at::TensorOptions().dtype(at::kFloat));
      const auto range = static_cast<float>(spec->init_std);
      if (spec->init == models::InitKind::kUniform) {
        fill_uniform(drawn.data_ptr<float>(), begin, end, seed, name, -range, range);
      } else {
        fill_normal(drawn.data_ptr<float>(), begin, end, seed, name, 0.0F, range);
      }
      part.copy_(drawn);
    });
  }
}

}  // namespace tessera::train
