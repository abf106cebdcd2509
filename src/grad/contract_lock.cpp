#include "grad/contract_lock.h"

#include <algorithm>
#include <array>
#include <tuple>

#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera::grad {
namespace {

constexpr std::string_view kFirstLine = "# contract lock 1 (tessera inspect --contract --lock)";
constexpr std::array<std::string_view, 4> kKinds{"parameter ", "buffer ", "unit ", "context "};

/// Splits text into lines without their ends. Text after the last line end is a line unless empty.
std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const auto end = std::min(text.find('\n'), text.size());
    lines.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

template <class Contract>
void add_order(std::string& text, std::string_view kind, const std::vector<Contract>& contracts) {
  for (std::size_t i = 0; i < contracts.size(); ++i) {
    const std::string before =
        i == 0 ? "(first)" : printable(unit_label(contracts[i - 1].name), 1 << 20);
    const std::string own = printable(unit_label(contracts[i].name), 1 << 20);
    text += concat(kind, " ", own.substr(1, own.size() - 2), " behind ", before, "\n");
  }
}

/// Returns the lines of a contract and of its context, sorted, each once.
std::vector<std::string> lines_of(const ModelContract& contract,
                                  const std::vector<std::string>& context) {
  std::string text = to_lines(contract);
  add_order(text, "parameter", contract.parameters);
  add_order(text, "buffer", contract.buffers);
  add_order(text, "unit", contract.units);
  std::vector<std::string> lines = context;
  for (const auto& line : lines_of(text)) lines.emplace_back(line);
  std::ranges::sort(lines);
  const auto [first, last] = std::ranges::unique(lines);
  lines.erase(first, last);
  return lines;
}

/// Returns the lines after the first.
std::vector<std::string_view> checked_lines(std::string_view lock, std::string_view file) {
  auto lines = lines_of(lock);
  const auto require = [&](bool holds, std::size_t number, std::string_view expected) {
    if (holds) return;
    const std::string found =
        number < lines.size() ? printable(lines[number]) : std::string("the end of the file");
    throw Error(ErrorKind::kFormat, concat("contract.lock: ", file, ", line ", number + 1,
                                           ": found ", found, ", expected ", expected));
  };
  require(!lines.empty() && lines.front() == kFirstLine, 0, concat("'", kFirstLine, "'"));
  for (std::size_t i = 1; i < lines.size(); ++i) {
    const bool is_value = std::ranges::any_of(
        kKinds, [&](std::string_view kind) { return lines[i].starts_with(kind); });
    require(is_value, i, "a line of a parameter, buffer, unit or context");
    require(i == 1 || lines[i - 1] < lines[i], i, "lines in ascending order, each once");
  }
  lines.erase(lines.begin());
  return lines;
}

}  // namespace

std::string contract_lock(const ModelContract& contract, const std::vector<std::string>& context) {
  std::string text = concat(kFirstLine, "\n");
  for (const std::string& line : lines_of(contract, context)) text += line + "\n";
  return text;
}

std::vector<std::string> differences_from_lock(const ModelContract& contract, std::string_view lock,
                                               std::string_view file,
                                               const std::vector<std::string>& context) {
  const auto locked = checked_lines(lock, file);
  const auto now = lines_of(contract, context);
  struct Line {
    std::string_view text;
    char side = '-';
  };
  std::vector<Line> lines;
  for (const auto& line : locked) {
    if (!std::ranges::binary_search(now, line)) lines.push_back({line, '-'});
  }
  for (const auto& line : now) {
    if (!std::ranges::binary_search(locked, std::string_view(line))) lines.push_back({line, '+'});
  }
  // Sorts the old value of a line above the new one.
  std::ranges::sort(lines, {}, [](const Line& line) {
    return std::tuple(line.text.substr(0, line.text.rfind(' ')), line.side == '+', line.text);
  });
  std::vector<std::string> differences;
  for (const Line& line : lines) differences.push_back(concat(line.side, " ", line.text));
  return differences;
}

}  // namespace tessera::grad
