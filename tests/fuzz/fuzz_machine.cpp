// Input: the text of a machine's description (TOML). What is read writes itself back.
#include "check/machine.h"
#include "fuzz/hostile_input.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tessera;
  fuzz::value_or_error(ErrorKind::kConfig, [&] {
    const auto machine = check::parse_machine(fuzz::text_of(data, size), "x");
    fuzz::require(check::parse_machine(check::to_toml(machine), "x") == machine,
                  "the same machine");
  });
  return 0;
}
