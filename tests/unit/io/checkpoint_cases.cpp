#include "unit/io/checkpoint_cases.h"

#include <cmath>
#include <fstream>

#include "io/checkpoint_folder.h"
#include "io/safetensors.h"
#include "support/temporary_folder.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

const std::vector<DType> kDTypes = {DType::kFloat32, DType::kBFloat16, DType::kInt64,
                                    DType::kFloat64};

/// The box itself, or cut a few times along its dims.
std::vector<TensorBox> random_boxes(Random& random, const std::vector<std::int64_t>& shape) {
  std::vector<TensorBox> boxes{TensorBox::whole(shape)};
  for (std::int64_t cuts = pick(random, 0, 4); cuts > 0 && !shape.empty(); --cuts) {
    const auto at = static_cast<std::size_t>(pick(random, 0, std::ssize(boxes) - 1));
    const auto d = static_cast<std::size_t>(pick(random, 0, std::ssize(shape) - 1));
    if (boxes[at].size[d] < 2) continue;
    const std::int64_t first = pick(random, 1, boxes[at].size[d] - 1);
    TensorBox rest = boxes[at];
    rest.offset[d] += first;
    rest.size[d] -= first;
    boxes[at].size[d] = first;
    boxes.push_back(rest);
  }
  return boxes;
}

std::vector<std::byte> file_bytes(const fs::path& path) {
  const std::string text = read_file(path);
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

CheckpointFile entry_of(const fs::path& path) {
  const auto bytes = file_bytes(path);
  return {std::ssize(bytes), Hash128Stream().add(bytes).digest()};
}

/// The elements of a piece, picked one by one out of the whole tensor.
std::vector<std::byte> piece_values(const CheckpointTensor& tensor, const CheckpointPiece& piece,
                                    const std::vector<std::byte>& whole) {
  const auto size = size_of(tensor.dtype);
  std::vector<std::byte> values;
  for (std::int64_t i = piece.begin; i < piece.end; ++i) {
    // Coordinates by division, not by the functions under test.
    std::int64_t rest = i;
    std::int64_t position = 0;
    std::int64_t stride = 1;
    for (std::size_t d = tensor.shape.size(); d-- > 0;) {
      position += (piece.box.offset[d] + rest % piece.box.size[d]) * stride;
      rest /= piece.box.size[d];
      stride *= tensor.shape[d];
    }
    const auto* const element = whole.data() + position * size;
    values.insert(values.end(), element, element + size);
  }
  return values;
}

}  // namespace

CheckpointTensor random_tensor(Random& random, const std::string& name,
                               const std::vector<std::string>& files) {
  CheckpointTensor tensor;
  tensor.dtype = kDTypes[random() % kDTypes.size()];
  if (random() % 2 == 0) tensor.source_dtype = DType::kBFloat16;
  for (std::int64_t dims = pick(random, 0, 3); dims > 0; --dims) {
    tensor.shape.push_back(pick(random, random() % 8 == 0 ? 0 : 1, 9));
  }
  if (tensor.numel() == 0) return tensor;
  int number = 0;
  for (const TensorBox& box : random_boxes(random, tensor.shape)) {
    for (std::int64_t begin = 0; begin < box.numel();) {
      const std::int64_t end = pick(random, begin + 1, box.numel());
      tensor.pieces.push_back(
          {files[random() % files.size()], name + "#" + std::to_string(number++), box, begin, end});
      begin = end;
    }
  }
  std::shuffle(tensor.pieces.begin(), tensor.pieces.end(), random);
  return tensor;
}

CheckpointManifest random_manifest(Random& random) {
  CheckpointManifest manifest;
  manifest.format = pick(random, CheckpointManifest::kFirstFormat, CheckpointManifest::kFormat);
  manifest.step = pick(random, 0, 1'000'000);
  manifest.world_size = pick(random, 1, 4);
  manifest.config_hash = {random(), random()};
  manifest.model_path = random() % 2 == 0 ? "" : "models/a \"quoted\"\n\xC3\xA9";
  manifest.seed = pick(random, 0, 100);
  manifest.data = {{"a.txt", "b.txt"}, pick(random, 0, 1 << 20), {random(), random()}, 16, 4};
  if (random() % 2 == 0) manifest.optimizer = "AdamW";
  if (random() % 3 == 0) {
    manifest.fused_as_one = std::vector<std::string>{"layers.0.gate_up_proj", "a\"b"};
  } else if (random() % 2 == 0) {
    manifest.fused_as_one.emplace();
  }
  if (random() % 2 == 0) {
    manifest.lora = {{pick(random, 1, 64), 0.1, 0.25, {"layers.0.q_proj", "a\"b"}},
                     {random(), random()}};
  }
  if (random() % 2 == 0) {
    manifest.loss_scale = {std::ldexp(1.0, static_cast<int>(pick(random, -126, 127))),
                           pick(random, 0, 5000), pick(random, 0, 9)};
  }
  if (random() % 2 == 0) manifest.left_out_steps = pick(random, 0, manifest.step);
  std::vector<std::string> names;
  for (std::int64_t rank = 0; rank < manifest.world_size; ++rank) {
    names.push_back("rank_" + std::to_string(rank) + ".safetensors");
    manifest.files[names.back()] = {};
  }
  for (const char* kept : {"model/", "optim/exp_avg/", "optim/step/"}) {
    for (std::int64_t i = pick(random, 0, 3); i >= 0; --i) {
      const std::string name = kept + std::string("layers.") + std::to_string(i) + ".weight";
      auto& tensor = manifest.tensors[name] = random_tensor(random, name, names);
      std::map<std::string, std::size_t> numbers;
      for (auto& piece : tensor.pieces) {
        if (manifest.format > 1) piece.key = piece_key(name, ++numbers[piece.file]);
      }
    }
  }
  return manifest;
}

WrittenCheckpoint write_random_checkpoint(Random& random, const fs::path& folder) {
  WrittenCheckpoint written;
  written.manifest = random_manifest(random);
  fs::create_directories(folder);
  std::map<std::string, std::vector<TensorSpec>> specs;
  for (const auto& [file, entry] : written.manifest.files) specs[file] = {};
  for (const auto& [name, tensor] : written.manifest.tensors) {
    auto& values = written.values[name];
    values.resize(static_cast<std::size_t>(tensor.numel() * size_of(tensor.dtype)));
    for (auto& byte : values) byte = static_cast<std::byte>(random());
    for (const auto& piece : tensor.pieces) {
      specs[piece.file].push_back({piece.key, tensor.dtype, {piece.end - piece.begin}});
    }
  }
  for (const auto& [file, tensors] : specs) {
    SafetensorsWriter writer(folder / file, tensors);
    for (const auto& [name, tensor] : written.manifest.tensors) {
      for (const auto& piece : tensor.pieces) {
        if (piece.file != file) continue;
        writer.write(piece.key, piece_values(tensor, piece, written.values[name]));
      }
    }
    writer.finish();
  }
  std::ofstream(folder / "config.json") << R"({"model_type": "qwen3"})";
  finish_checkpoint(folder, written.manifest);
  return written;
}

void write_safetensors(const fs::path& path, const std::string& name, DType dtype,
                       std::span<const std::byte> values) {
  SafetensorsWriter writer(path, {{name, dtype, {std::ssize(values) / size_of(dtype)}}});
  writer.write(name, values);
  writer.finish();
}

void finish_checkpoint(const fs::path& folder, CheckpointManifest& manifest) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    manifest.files[entry.path().filename()] = entry_of(entry.path());
  }
  if (manifest.format > 1) {
    write_manifest(folder, manifest);
  } else {
    std::ofstream(folder / "manifest.json") << to_json(manifest);
  }
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t at = 0; at < text.size();) {
    const auto end = text.find('\n', at) + 1;
    lines.push_back(text.substr(at, end - at));
    at = end;
  }
  return lines;
}

CheckpointManifest parsed(const CheckpointTexts& texts) {
  auto manifest = parse_checkpoint_manifest(texts.manifest, "x");
  CheckpointTensorMap tensors;
  const auto lines = lines_of(texts.tensors);
  EXPECT_EQ(lines.size(), manifest.blocks.size());
  for (std::size_t i = 0; i < lines.size(); ++i) {
    EXPECT_EQ(Hash128Stream().add(lines[i]).digest(), manifest.blocks[i].xxh3_128);
    tensors.merge(parse_checkpoint_block(lines[i], manifest, i, "x"));
  }
  manifest.tensors = std::move(tensors);
  return manifest;
}

}  // namespace tessera::testing
