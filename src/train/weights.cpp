#include "train/weights.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstddef>
#include <span>

#include "base/philox.h"
#include "fsdp/finite_copy.h"
#include "grad/torch_dtype.h"
#include "io/read_box.h"
#include "tessera/error.h"
#include "train/progress.h"
#include "train/shard_pieces.h"

namespace tessera::train {
namespace {

/// Calls fill(part of the shard, part of a piece) for at most kLoadChunk elements at a time.
template <class Fill>
void in_chunks(const ShardView& view, const layout::FileShape& file, LoadingProgress& progress,
               const Fill& fill) {
  for (const layout::Piece& piece : pieces_of(view, file)) {
    for (std::int64_t begin = 0; begin < piece.local.size(); begin += kLoadChunk) {
      const auto end = std::min(begin + kLoadChunk, piece.local.size());
      const layout::Piece part = part_of(piece, begin, end);
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

void load_weights(const ShardedBase& model, const TensorSource& folder, const FileForms& forms,
                  Loaded what) {
  const at::NoGradGuard no_grad;
  LoadingProgress progress = progress_of(model, "loading weights");
  for (const auto& view : model.shards()) {
    const auto& name = view.contract->name;
    if (models::is_adapter(name) != (what == Loaded::kAdapters)) continue;
    const FileForm form = forms.of(*view.contract);
    in_chunks(view, form.file, progress, [&](const at::Tensor& part, const layout::Piece& piece) {
      fsdp::finite_copy(part, read_parameter(folder, *view.contract, form, piece),
                        "parameter " + name);
    });
  }
}

void load_buffers(const ShardedBase& model, const TensorSource& folder) {
  const at::NoGradGuard no_grad;
  for (auto& view : model.buffers()) {
    const auto& contract = *view.contract;
    // What training adds (expert_bias.h) begins with the zeros that it was made with.
    if (folder.find(contract.name) == nullptr) continue;
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
    const auto range = static_cast<float>(spec->init_std);
    const auto fill = [&](float* out, std::int64_t begin, std::int64_t end) {
      spec->init == models::InitKind::kUniform
          ? fill_uniform(out, begin, end, seed, name, -range, range)
          : fill_normal(out, begin, end, seed, name, 0.0F, range);
    };
    const layout::FileShape own = as_one_tensor(*view.contract);
    in_chunks(view, own, progress, [&](const at::Tensor& part, const layout::Piece& piece) {
      auto drawn = at::empty({part.numel()}, at::TensorOptions().dtype(at::kFloat));
      draw_rows(piece, own.shape, drawn.data_ptr<float>(), fill);
      part.copy_(drawn);
    });
  }
}

}  // namespace tessera::train
