// Schedules for programs that compare them with their own: reads commands, a line each, and answers
// each with a line, then the rows of CSV that it says. The last row is not of the schedule: it has
// the live micro-batches of each rank.
//   make KIND RANKS STAGES_PER_RANK MICRO_BATCHES
//       "made ROWS" or "refused WHY"; compute_only, then compute_comms
//   draw SEED
//       likewise, a random valid schedule
//   read FILE
//       "valid ROWS", "found WHAT" or "refused WHY"; the file, written again
#include <algorithm>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/kinds.h"
#include "pipeline/schedule_csv.h"
#include "pipeline/validate.h"
#include "tessera/error.h"
#include "unit/pipeline/random_schedule.h"

namespace tessera::pipeline {
namespace {

void print_answer(std::string_view word, const Schedule& schedule, const std::string& rows) {
  std::cout << word << ' ' << std::ranges::count(rows, '\n') + 1 << '\n' << rows;
  const std::vector<int> peaks = peak_live_chunks(schedule);
  for (std::size_t rank = 0; rank < peaks.size(); ++rank) {
    std::cout << (rank > 0 ? "," : "") << peaks[rank];
  }
  std::cout << '\n';
}

void make(std::istream& words) {
  std::string kind;
  Shape shape;
  words >> kind >> shape.ranks >> shape.stages_per_rank >> shape.micro_batches;
  const Schedule schedule = make_schedule(kind_named(kind), shape);
  print_answer("made", schedule, to_csv(schedule) + to_csv(lower(schedule)));
}

void draw(std::istream& words) {
  std::uint64_t seed = 0;
  words >> seed;
  testing::Dice dice(seed);
  const auto order =
      dice.chance(50) ? testing::MicroBatchOrder::kKept : testing::MicroBatchOrder::kAny;
  const Schedule schedule = testing::random_schedule(dice, order);
  print_answer("made", schedule, to_csv(schedule) + to_csv(lower(schedule, dice.roll(4))));
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
  print_answer("valid", schedule_of(program), to_csv(program));
}

void answer(const std::string& line) {
  std::istringstream words(line);
  std::string command;
  words >> command;
  try {
    command == "make" ? make(words) : command == "draw" ? draw(words) : read(words);
  } catch (const Error& error) {
    std::cout << "refused " << error.what() << '\n';
  }
}

}  // namespace
}  // namespace tessera::pipeline

int main() {
  for (std::string line; std::getline(std::cin, line);) tessera::pipeline::answer(line);
}
