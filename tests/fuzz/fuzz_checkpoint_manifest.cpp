// Input: the text of a checkpoint's manifest.json (its own hash is not looked at); after a zero
// byte that of its first block in tensors.jsonl, for manifests of version 2.
#include "fuzz/hostile_input.h"
#include "io/checkpoint_manifest.h"

namespace {

using tessera::fuzz::require;

void require_sound(const tessera::CheckpointTensorMap& tensors,
                   const tessera::CheckpointManifest& manifest) {
  for (const auto& [name, tensor] : tensors) {
    std::int64_t held = 0;
    for (const auto& piece : tensor.pieces) {
      require(manifest.files.contains(piece.file), "a listed file");
      require(piece.file.find('/') == std::string::npos, "a file of the folder");
      const auto last = position_in_tensor(piece.box, tensor.shape, piece.end - 1);
      require(last >= 0 && last < tensor.numel(), "a piece inside its tensor");
      require(elements_before(piece.box, tensor.shape, last) == piece.end - 1, "an inverse");
      held += piece.end - piece.begin;
    }
    require(held == tensor.numel(), "as many elements as the tensor has");
  }
}

/// Writes what was read, in as many blocks as that takes, and reads it again.
void write_again(tessera::CheckpointManifest manifest, tessera::CheckpointTensorMap tensors) {
  manifest.tensors = tensors;
  const auto texts = texts_of(std::move(manifest));
  tessera::check_manifest_hash(texts.manifest, "x");
  const auto again = tessera::parse_checkpoint_manifest(texts.manifest, "x");
  tessera::CheckpointTensorMap found;
  std::size_t at = 0;
  for (std::size_t i = 0; i < again.blocks.size(); ++i) {
    const auto bytes = static_cast<std::size_t>(again.blocks[i].bytes);
    found.merge(
        parse_checkpoint_block(std::string_view(texts.tensors).substr(at, bytes), again, i, "x"));
    at += bytes;
  }
  require(at == texts.tensors.size(), "blocks that make up their file");
  require(found == tensors, "the same tensors");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  tessera::fuzz::value_or_error(tessera::ErrorKind::kFormat, [&] {
    const auto text = tessera::fuzz::text_of(data, size);
    const auto zero = text.find('\0');
    const auto manifest = tessera::parse_checkpoint_manifest(text.substr(0, zero), "x");
    require_sound(manifest.tensors, manifest);
    const auto again = to_json(manifest);
    require(tessera::parse_checkpoint_manifest(again, "x") == manifest, "the same manifest");
    tessera::check_manifest_hash(again, "x");
    if (zero == std::string_view::npos || manifest.blocks.empty()) return;
    const auto tensors = tessera::parse_checkpoint_block(text.substr(zero + 1), manifest, 0, "x");
    require_sound(tensors, manifest);
    write_again(manifest, tensors);
  });
  return 0;
}
