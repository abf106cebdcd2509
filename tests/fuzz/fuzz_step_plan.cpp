// Input: the text of a plan's file. What is read writes itself back, and the checker says something
// about it; what holds runs in the simulator, which comes to the same peak.
#include "capture/plan_json.h"
#include "capture/plan_text.h"
#include "capture/simulate_plan.h"
#include "fsdp/agreed/step_plan_check.h"
#include "fuzz/hostile_input.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tessera;
  fuzz::value_or_error(ErrorKind::kFormat, [&] {
    const auto file = capture::parse_plan(fuzz::text_of(data, size), "x");
    const auto again = capture::to_json(file);
    fuzz::require(capture::parse_plan(again, "x") == file, "the same plan");
    if (!fsdp::faults_of(file.plan).empty()) return;
    const auto peak = fsdp::peak_gathered_bytes(file.plan);
    fuzz::require(fsdp::faults_of(file.plan, peak).empty(), "the peak is enough");
    fuzz::require(!capture::to_text(file.plan, {}, 3).empty() || file.plan.stages.empty(), "words");
    if (file.plan.stages.size() != 1) return;
    const auto step = simulate(file.plan, capture::default_profile(file.plan.units), 3);
    fuzz::require(step.peak_bytes <= peak, "no more than the peak of all classes");
    fuzz::require(step.step_ms >= 0.0, "a time");
  });
  return 0;
}
