// Input: the text of a checkpoint's manifest.json (its own hash is not looked at).
#include "fuzz/hostile_input.h"
#include "io/checkpoint_manifest.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using tessera::fuzz::require;
  tessera::fuzz::value_or_error(tessera::ErrorKind::kFormat, [&] {
    const auto manifest =
        tessera::parse_checkpoint_manifest(tessera::fuzz::text_of(data, size), "x");
    for (const auto& [name, tensor] : manifest.tensors) {
      std::int64_t held = 0;
      for (const auto& piece : tensor.pieces) {
        require(manifest.files.contains(piece.file), "a listed file");
        const auto last = position_in_tensor(piece.box, tensor.shape, piece.end - 1);
        require(last >= 0 && last < tensor.numel(), "a piece inside its tensor");
        require(elements_before(piece.box, tensor.shape, last) == piece.end - 1, "an inverse");
        held += piece.end - piece.begin;
      }
      require(held == tensor.numel(), "as many elements as the tensor has");
    }
    // What was read can be written and read again.
    const auto text = to_json(manifest);
    require(tessera::parse_checkpoint_manifest(text, "x") == manifest, "the same manifest");
    tessera::check_manifest_hash(text, "x");
  });
  return 0;
}
