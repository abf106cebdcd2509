// Schedules for programs that compare them with their own: reads commands, a line each, and answers
// each with a line, then the rows of CSV that it says.
//   make KIND RANKS STAGES_PER_RANK MICRO_BATCHES
//       "made 2 x RANKS" or "refused WHY"; compute_only, then compute_comms
//   read FILE
//       "valid ROWS", "found WHAT" or "refused WHY"; the file, written again
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <string>

#include "pipeline/kinds.h"
#include "pipeline/schedule_csv.h"
#include "pipeline/validate.h"
#include "tessera/error.h"

namespace tessera::pipeline {
namespace {

void make(std::istream& words) {
  std::string kind;
  Shape shape;
  words >> kind >> shape.ranks >> shape.stages_per_rank >> shape.micro_batches;
  const Schedule schedule = make_schedule(kind_named(kind), shape);
  std::cout << "made " << 2 * shape.ranks << '\n' << to_csv(schedule) << to_csv(lower(schedule));
}

void read(std::istream& words) {
  std::string path;
  words >> path;
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const Program program = parse_csv(text, path);
  const Validation validation =
      has_messages(program) ? validate(program) : validate(schedule_of(program));
  if (!validation.valid()) {
    std::cout << "found " << validation.findings[0].text << '\n';
    return;
  }
  std::cout << "valid " << program.steps.size() << '\n' << to_csv(program);
}

void answer(const std::string& line) {
  std::istringstream words(line);
  std::string command;
  words >> command;
  try {
    command == "make" ? make(words) : read(words);
  } catch (const Error& error) {
    std::cout << "refused " << error.what() << '\n';
  }
}

}  // namespace
}  // namespace tessera::pipeline

int main() {
  for (std::string line; std::getline(std::cin, line);) tessera::pipeline::answer(line);
}
