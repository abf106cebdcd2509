// The manifest of the largest plan that is shipped for: Qwen3-235B on 1,024 ranks.
#include <optional>

#include "io/checkpoint_folder.h"
#include "layout/bucket_plan.h"
#include "layout/local_part.h"
#include "support/temporary_folder.h"
#include "unit/io/checkpoint_cases.h"

namespace tessera::large_checkpoint_test {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kLayers = 94;
constexpr std::int64_t kExperts = 128;
constexpr std::int64_t kHidden = 4096;
constexpr std::int64_t kExpertHidden = 1536;
constexpr std::int64_t kHeads = 64;
constexpr std::int64_t kKvHeads = 4;
constexpr std::int64_t kHeadDim = 128;
constexpr std::int64_t kVocabulary = 151936;
constexpr int kRanks = 1024;

/// A parameter of ours and the tensors that it is in files.
struct Parameter {
  std::vector<std::string> names;
  layout::FileShape file;

  std::vector<std::int64_t> shape() const {
    auto all = file.shape;
    if (file.count > 1) all.insert(all.begin(), file.count);
    return all;
  }
};
using Unit = std::vector<Parameter>;

Parameter one(const std::string& name, std::vector<std::int64_t> shape) {
  return {{name}, {1, std::move(shape)}};
}

Unit layer(std::int64_t index) {
  const std::string stem = concat("model.layers.", index, ".");
  const std::string attention = stem + "self_attn.";
  Parameter gate_up{{}, {2 * kExperts, {kExpertHidden, kHidden}}};
  Parameter down{{}, {kExperts, {kHidden, kExpertHidden}}};
  for (std::int64_t e = 0; e < kExperts; ++e) {
    const std::string expert = concat(stem, "mlp.experts.", e, ".");
    gate_up.names.push_back(expert + "gate_proj.weight");
    gate_up.names.push_back(expert + "up_proj.weight");
    down.names.push_back(expert + "down_proj.weight");
  }
  return {one(attention + "q_proj.weight", {kHeads * kHeadDim, kHidden}),
          one(attention + "k_proj.weight", {kKvHeads * kHeadDim, kHidden}),
          one(attention + "v_proj.weight", {kKvHeads * kHeadDim, kHidden}),
          one(attention + "o_proj.weight", {kHidden, kHeads * kHeadDim}),
          one(attention + "q_norm.weight", {kHeadDim}),
          one(attention + "k_norm.weight", {kHeadDim}),
          one(stem + "input_layernorm.weight", {kHidden}),
          one(stem + "post_attention_layernorm.weight", {kHidden}),
          one(stem + "mlp.gate.weight", {kExperts, kHidden}),
          std::move(gate_up),
          std::move(down)};
}

struct Kept {
  std::string prefix;
  DType dtype;
};
/// The tensors of bf16 shards with AdamW: moments, and the remainders of their master.
const std::vector<Kept> kKept = {{"model/", DType::kBFloat16},
                                 {"optim/exp_avg/", DType::kFloat32},
                                 {"optim/exp_avg_sq/", DType::kFloat32},
                                 {"optim/master_remainder/", DType::kInt16}};

void add(CheckpointManifest& part, const std::string& tensor, const CheckpointTensor& head,
         const TensorBox& box, layout::Range range, int rank) {
  auto& entry = part.tensors.try_emplace(tensor, head).first->second;
  entry.pieces.push_back(
      {rank_file(rank), piece_key(tensor, entry.pieces.size() + 1), box, range.begin, range.end});
}

/// A piece of a unit and the rank that holds it.
struct Held {
  int rank = 0;
  std::size_t parameter = 0;
  layout::Piece piece;
};

/// Slices of the unit's bucket over all ranks.
std::vector<Held> cut(const Unit& unit) {
  std::vector<layout::PlanItem> items;
  for (const auto& parameter : unit) {
    items.push_back({parameter.names.front(), product(parameter.shape()), {}});
  }
  const auto plan = layout::plan_unit("u", items, {.ranks = kRanks, .alignment_bytes = 256});
  const auto& bucket = plan.buckets.at(0);
  std::vector<Held> held;
  for (std::size_t i = 0; i < unit.size(); ++i) {
    for (int r = 0; r < kRanks; ++r) {
      const auto owned = bucket.owned(bucket.parameters[i], r);
      if (owned.empty()) continue;
      for (auto& piece : layout::pieces({}, unit[i].shape(), unit[i].file, {}, owned)) {
        held.push_back({r, i, std::move(piece)});
      }
    }
  }
  return held;
}

/// Returns each rank's part of the manifest, as checkpoint/snapshot.cpp writes it.
std::vector<CheckpointManifest> parts_of_ranks() {
  std::vector<CheckpointManifest> parts(kRanks);
  for (int r = 0; r < kRanks; ++r) parts[static_cast<std::size_t>(r)].files[rank_file(r)] = {};
  const auto add_unit = [&](const Unit& unit, const std::vector<Held>& held) {
    for (const auto& [rank, index, piece] : held) {
      auto& part = parts[static_cast<std::size_t>(rank)];
      const std::string& name = unit[index].names[piece.tensor];
      for (const auto& [prefix, dtype] : kKept) {
        std::optional<DType> source;
        if (prefix == kModelPrefix) source = DType::kBFloat16;
        add(part, prefix + name, {dtype, unit[index].file.shape, source, {}}, piece.box,
            piece.in_box, rank);
      }
      if (piece.in_box.begin != 0) continue;
      add(part, "optim/step/" + name, {DType::kInt64, {}, std::nullopt, {}}, {}, {0, 1}, rank);
    }
  };
  const auto of_layer = cut(layer(0));  // the same for every layer
  for (std::int64_t i = 0; i < kLayers; ++i) add_unit(layer(i), of_layer);
  const Unit rest = {one("model.embed_tokens.weight", {kVocabulary, kHidden}),
                     one("model.norm.weight", {kHidden}),
                     one("lm_head.weight", {kVocabulary, kHidden})};
  add_unit(rest, cut(rest));
  return parts;
}

TEST(LargeCheckpoint, Qwen3Of235BillionOnAThousandRanksHasASmallManifest) {
  const TemporaryFolder folder;
  CheckpointManifest manifest;
  manifest.world_size = kRanks;
  manifest.optimizer = "AdamW";
  auto parts = parts_of_ranks();
  std::vector<CheckpointPlan> plans;
  std::int64_t largest = 0;
  for (auto& part : parts) {
    plans.push_back(plan_of(part));
    largest = std::max(largest, std::ssize(part_text(part)));
    merge(manifest, part);
    part = {};
  }
  EXPECT_LT(largest, 1 << 20) << "of one rank";
  ASSERT_EQ(manifest.tensors.size(), 5 * (kLayers * (3 * kExperts + 9) + 3));
  // Their bytes are not read here.
  for (int r = 0; r < kRanks; ++r) std::ofstream(folder / rank_file(r));
  std::ofstream(folder / "config.json") << "{}";
  manifest.files["config.json"] = {2, Hash128Stream().add("{}").digest()};
  std::size_t pieces = 0;
  for (const auto& [name, tensor] : manifest.tensors) pieces += tensor.pieces.size();
  const auto plan = sum_of(plans);
  const std::int64_t at_most = check_manifest_plan({}, kRanks, plan);
  write_manifest(folder.path(), std::move(manifest));

  const auto size = static_cast<std::int64_t>(fs::file_size(folder / kManifestFile));
  const auto tensors = static_cast<std::int64_t>(fs::file_size(folder / kTensorsFile));
  EXPECT_LT(size, 4 << 20);
  EXPECT_LE(size, at_most);
  EXPECT_LE(tensors, plan.tensors);
  // The worst case of a block, too, is far from what would be refused.
  const std::int64_t block_at_most = kBlockBytes + plan.head + plan.pieces;
  EXPECT_LT(block_at_most, kMaxBlockBytes / 8);
  RecordProperty("manifest_bytes", std::to_string(size));
  RecordProperty("tensors_bytes", std::to_string(tensors));
  RecordProperty("block_at_most", std::to_string(block_at_most));
  RecordProperty("pieces", std::to_string(pieces));
  RecordProperty("largest_part_bytes", std::to_string(largest));

  // One of 1,024 ranks owns elements of an expert or two of every layer: a tenth of the blocks.
  const auto checkpoint = CheckpointFolder::open(folder.path());
  const auto& blocks = checkpoint.manifest().blocks;
  for (const auto& block : blocks) EXPECT_LE(block.bytes, block_at_most) << block.first;
  std::set<std::size_t> read;
  for (std::int64_t i = 0; i < kLayers; ++i) {
    for (const auto& [prefix, dtype] : kKept) {
      for (const char* matrix : {"gate_proj", "up_proj", "down_proj"}) {
        const auto name = concat(prefix, "model.layers.", i, ".mlp.experts.77.", matrix, ".weight");
        const auto* tensor = checkpoint.find(name);
        ASSERT_NE(tensor, nullptr) << name;
        EXPECT_EQ(tensor->dtype, dtype);
        read.insert(static_cast<std::size_t>(
            std::ranges::upper_bound(blocks, name, {}, &CheckpointBlock::first) - blocks.begin()));
      }
    }
  }
  EXPECT_LT(8 * read.size(), blocks.size());
  RecordProperty("blocks", std::to_string(blocks.size()));
  RecordProperty("blocks_read", std::to_string(read.size()));
}

}  // namespace
}  // namespace tessera::large_checkpoint_test
