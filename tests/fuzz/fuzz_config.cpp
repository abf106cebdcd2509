// Input: the text of a run configuration (TOML). What parses also writes itself back.
#include <string>

#include "fuzz/hostile_input.h"
#include "train/config/config.h"
#include "train/config/config_resolve.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tessera;
  fuzz::value_or_error(ErrorKind::kConfig, [&] {
    const train::Config config = train::parse_config(fuzz::text_of(data, size), "x");
    fuzz::require(train::parse_config(train::to_toml(config), "x") == config,
                  "the dump reads back");
    train::validate(config, train::Verb::kTrain);
    fuzz::require(train::resolve_parallelism(config.parallelism, 8).world_size() == 8, "8 ranks");
    fuzz::require(train::resolve_batch(config.training, 8).global >= 8, "rows for 8 ranks");
  });
  fuzz::value_or_error(ErrorKind::kConfig, [&] {  // and as one value of the command line
    try {
      train::Config config;
      train::apply_override(config, "precision.rule", fuzz::text_of(data, size));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kUsage) throw;  // not UTF-8
    }
  });
  return 0;
}
