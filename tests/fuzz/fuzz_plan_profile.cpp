// Input: the text of a profile's file. What is read writes itself back.
#include "capture/plan_profile.h"
#include "fuzz/hostile_input.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tessera;
  fuzz::value_or_error(ErrorKind::kFormat, [&] {
    const auto profile = capture::parse_profile(fuzz::text_of(data, size), "x");
    fuzz::require(capture::parse_profile(capture::to_json(profile), "x") == profile,
                  "the same profile");
    fuzz::require(capture::slowest_of({profile, profile}) == profile, "as slow as itself");
  });
  return 0;
}
