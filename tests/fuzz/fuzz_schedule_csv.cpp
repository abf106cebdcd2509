// Input: the text of a schedule's CSV. A schedule that parses writes itself back, and validation
// says something about it; one that validates runs in the simulator.
#include "fuzz/hostile_input.h"
#include "pipeline/schedule_csv.h"
#include "pipeline/simulate.h"
#include "pipeline/validate.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tessera;
  fuzz::value_or_error(ErrorKind::kFormat, [&] {
    const pipeline::Program program = pipeline::parse_csv(fuzz::text_of(data, size), "x");
    fuzz::require(pipeline::parse_csv(pipeline::to_csv(program), "x") == program,
                  "the file reads back");
    const pipeline::Schedule schedule = pipeline::schedule_of(program);
    const pipeline::Costs costs(program.rank_of.size());
    if (pipeline::validate(schedule).valid()) {
      fuzz::require(pipeline::simulate(schedule, costs).makespan > 0.0, "a valid schedule runs");
    }
    if (pipeline::validate(program).valid()) {
      fuzz::require(pipeline::simulate(program, costs).makespan > 0.0, "a valid program runs");
    }
  });
  return 0;
}
