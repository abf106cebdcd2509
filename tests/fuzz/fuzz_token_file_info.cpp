// Input: the text of a NAME.json for NAME.bin, and the first bytes of a shard.
#include "fuzz/hostile_input.h"
#include "io/token_source.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using tessera::fuzz::require;
  tessera::fuzz::value_or_error(tessera::ErrorKind::kFormat, [&] {
    const auto info = tessera::parse_token_file_info(tessera::fuzz::text_of(data, size), "x");
    require(info.num_tokens > 0 && info.vocab_size > 0, "positive counts");
    require(info.num_tokens <= info.num_tokens * size_of(info.dtype), "a size that fits");
  });
  tessera::fuzz::value_or_error(tessera::ErrorKind::kFormat, [&] {
    const auto info = tessera::parse_shard_header(std::as_bytes(std::span(data, size)), "x");
    require(!info || info->num_tokens > 0, "positive counts of a shard");
    require(!info || info->header_bytes <= static_cast<std::int64_t>(size), "a whole header");
  });
  return 0;
}
