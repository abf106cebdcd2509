#include "base/text/wildcard.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace tessera {
namespace {

std::vector<std::string_view> components(std::string_view name) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t dot = name.find('.');
    parts.push_back(name.substr(0, dot));
    if (dot == std::string_view::npos) return parts;
    name.remove_prefix(dot + 1);
  }
}

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

}  // namespace

std::size_t edit_distance(std::string_view typed, std::string_view text, Typed as) {
  const bool is_pattern = as == Typed::kPattern;
  const auto same = [&](char p, char t) {
    return (is_pattern && p == '?' && t != '.') || lower(p) == lower(t);
  };
  std::vector<std::size_t> row(text.size() + 1);  // distances of the first i characters of `typed`
  std::iota(row.begin(), row.end(), std::size_t{0});
  std::vector<std::size_t> before;
  std::vector<std::size_t> before_that;
  for (std::size_t i = 0; i < typed.size(); ++i) {
    before_that = std::exchange(before, row);
    const char p = typed[i];
    const bool is_run = is_pattern && p == '*';
    if (!is_run) ++row[0];
    for (std::size_t j = 0; j < text.size(); ++j) {
      if (is_run) {
        row[j + 1] = std::min(before[j + 1], row[j]);
        continue;
      }
      const std::size_t change = same(p, text[j]) ? 0 : 1;
      row[j + 1] = std::min({before[j] + change, before[j + 1] + 1, row[j] + 1});
      if (is_pattern && i > 0 && j > 0 && same(p, text[j - 1]) && same(typed[i - 1], text[j])) {
        row[j + 1] = std::min(row[j + 1], before_that[j - 1] + 1);
      }
    }
  }
  return row[text.size()];
}

bool wildcard_match(std::string_view pattern, std::string_view text) {
  std::size_t p = 0;
  std::size_t t = 0;
  std::size_t star = std::string_view::npos;  // the last `*`; it ends before `taken`
  std::size_t taken = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      taken = t;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == text[t])) {
      ++p;
      ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++taken;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

bool is_dotted_pattern(std::string_view pattern) {
  const std::vector<std::string_view> parts = components(pattern);
  return std::none_of(parts.begin(), parts.end(), [](std::string_view p) { return p.empty(); });
}

bool dotted_match(std::string_view pattern, std::string_view name) {
  if (!is_dotted_pattern(pattern)) return false;
  const std::vector<std::string_view> wanted = components(pattern);
  const std::vector<std::string_view> found = components(name);
  for (std::size_t first = 0; first + wanted.size() <= found.size(); ++first) {
    const auto begin = found.begin() + static_cast<std::ptrdiff_t>(first);
    if (std::equal(wanted.begin(), wanted.end(), begin, wildcard_match)) return true;
  }
  return false;
}

std::string unmatched(std::string_view source, std::string_view quoted, std::string_view found,
                      std::string_view expected) {
  return concat(source, ": found the pattern ", quoted, found, ", expected ", expected);
}

std::optional<std::string> closest_name(std::string_view pattern,
                                        const std::vector<std::string>& names) {
  const auto literals = static_cast<std::size_t>(std::count_if(
      pattern.begin(), pattern.end(), [](char c) { return c != '*' && c != '?' && c != '.'; }));
  const std::size_t width = components(pattern).size();
  std::size_t best = std::min<std::size_t>(literals / 3, 3) + 1;  // more would be a guess
  const std::string* result = nullptr;
  for (const std::string& name : names) {
    const std::vector<std::string_view> parts = components(name);
    for (std::size_t first = 0; first + width <= parts.size(); ++first) {
      const std::string_view last = parts[first + width - 1];
      const auto length = static_cast<std::size_t>(last.data() + last.size() - parts[first].data());
      const std::size_t d =
          edit_distance(pattern, std::string_view(parts[first].data(), length), Typed::kPattern);
      if (d < best) {
        best = d;
        result = &name;
      }
    }
  }
  if (result == nullptr) return std::nullopt;
  return *result;
}

std::optional<std::string> close_name(std::string_view word,
                                      const std::vector<std::string>& candidates) {
  constexpr std::size_t kLongest = 80;  // longer than any candidate
  if (word.empty() || word.size() > kLongest) return std::nullopt;
  // A swap of neighbours counts as one edit, as in patterns; but the word is no pattern.
  const bool plain_word = word.find_first_of("*?") == std::string_view::npos;
  const Typed as = plain_word ? Typed::kPattern : Typed::kWord;
  std::size_t fewest = std::clamp<std::size_t>(word.size() / 3, 1, 3) + 1;
  std::optional<std::string> best;
  for (const std::string& candidate : candidates) {
    const std::size_t found = edit_distance(word, candidate, as);
    if (found >= std::min(fewest, candidate.size())) continue;  // too far
    best = candidate;
    fewest = found;
  }
  return best;
}

}  // namespace tessera
