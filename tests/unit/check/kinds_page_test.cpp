// The table of docs/check.md is the list of kinds of mistakes that check was tried with.
#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

#include "support/temporary_folder.h"
#include "support/test.h"
#include "tessera/error.h"

namespace tessera::check::kinds_page_test {
namespace {

std::string row(std::string_view kind, std::string_view use, std::string_view what,
                std::string_view seen) {
  return concat("| `", kind, "` | ", what, " | ", seen, " | ",
                use == "kKnown" ? "known" : "held back", " |");
}

std::vector<std::string> rows_of_the_list() {
  return {
#define TESSERA_MISTAKE(kind, use, what, seen) row(#kind, #use, what, seen),
#include "check/kinds.def"
#undef TESSERA_MISTAKE
  };
}

/// In the order of the page: the rows below the head of the table whose first line this is.
std::vector<std::string> rows_below(const std::string& page, const std::string& head) {
  std::vector<std::string> rows;
  const auto begin = page.find("\n" + head + "\n");
  if (begin == std::string::npos) return rows;
  std::istringstream lines(page.substr(begin + 1));
  for (std::string line; std::getline(lines, line) && line.starts_with("|");) rows.push_back(line);
  rows.erase(rows.begin(), rows.begin() + std::min<std::ptrdiff_t>(2, std::ssize(rows)));
  return rows;
}

TEST(KindsOfMistakes, TheTableOfTheDocumentationIsThisList) {
  const auto page = read_file(TESSERA_SOURCE "/docs/check.md");
  EXPECT_EQ(rows_below(page, "| kind | what is wrong | seen in | use |"), rows_of_the_list());
}

TEST(KindsOfMistakes, AThirdWasHeldBackFromTheChecker) {
  const auto rows = rows_of_the_list();
  const auto held = std::ranges::count_if(
      rows, [](const std::string& one) { return one.ends_with("| held back |"); });
  EXPECT_GE(std::ssize(rows), 25);
  EXPECT_GE(3 * held, std::ssize(rows));
}

}  // namespace
}  // namespace tessera::check::kinds_page_test
