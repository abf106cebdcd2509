// Input: the text of a model.safetensors.index.json.
#include "fuzz/hostile_input.h"
#include "io/hf_folder.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using tessera::fuzz::require;
  tessera::fuzz::value_or_error(tessera::ErrorKind::kFormat, [&] {
    const auto index = tessera::parse_hf_index(tessera::fuzz::text_of(data, size), "x");
    require(!index.weight_map.empty(), "an index names something");
    for (const auto& [tensor, file] : index.weight_map) {
      require(!file.empty() && file != "." && file != ".." &&
                  file.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos,
              "a plain file name");
    }
  });
  return 0;
}
