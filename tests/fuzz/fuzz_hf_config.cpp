// Input: the text of a config.json.
#include <cmath>

#include "fuzz/hostile_input.h"
#include "models/model_spec.h"

namespace {

using tessera::fuzz::require;
using namespace tessera::models;

void check(const ModelSpec& spec) {
  require(spec.num_attention_heads % spec.num_key_value_heads == 0, "equal groups of heads");
  require(spec.head_dim > 0 && spec.head_dim % 2 == 0, "pairs for rope");
  require(std::isfinite(spec.rope.theta) && spec.rope.theta >= 1, "a usable theta");
  require(!spec.pad_token_id || (*spec.pad_token_id >= 0 && *spec.pad_token_id < spec.vocab_size),
          "padding inside the vocabulary");
  require(parse_spec(config_json(spec)).spec == spec, "written and read back equal");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using tessera::Error;
  using tessera::ErrorKind;
  const std::string_view text = tessera::fuzz::text_of(data, size);
  for (const UnknownKeys unknown : {UnknownKeys::kRefuse, UnknownKeys::kWarn}) {
    tessera::fuzz::value_or_error(ErrorKind::kFormat, [&] {
      try {
        SpecOptions options;
        options.unknown_keys = unknown;
        check(parse_spec(text, options).spec);
      } catch (const Error& error) {
        require(error.kind() == ErrorKind::kConfig || error.kind() == ErrorKind::kFormat,
                "a refusal of the file");
        throw Error(ErrorKind::kFormat, error.what());
      }
    });
  }
  return 0;
}
