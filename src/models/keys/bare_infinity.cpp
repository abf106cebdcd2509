#include "models/keys/bare_infinity.h"

#include <cstddef>

namespace tessera::models {
namespace {

constexpr std::string_view kInfinity = "Infinity";
constexpr std::string_view kSpelled = R"({"__float__": "Infinity"})";
constexpr std::string_view kKey = "time_step_limit";

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

/// Where in a text it stands, as far as the word's place needs to be known.
class Place {
 public:
  /// Takes the text from `at` up to the next place that matters, and returns where that is.
  std::size_t pass(std::string_view json, std::size_t at) {
    const char c = json[at];
    if (c == '"') return pass_string(json, at);
    if (c == '{' || c == '[') {
      ++depth_;
      if (depth_ == 2) in_list_ = c == '[';
    } else if (c == '}' || c == ']') {
      --depth_;
    } else if (c == ',' && depth_ == 1) {
      key_ = {};
    }
    return at + 1;
  }

  bool takes_infinity() const { return depth_ == 2 && in_list_ && key_ == kKey; }

 private:
  std::size_t pass_string(std::string_view json, std::size_t at) {
    const std::size_t begin = ++at;
    while (at < json.size() && json[at] != '"') at += json[at] == '\\' ? 2 : 1;
    if (at >= json.size()) return json.size();
    std::size_t next = at + 1;
    while (next < json.size() && is_space(json[next])) ++next;
    const bool is_key = next < json.size() && json[next] == ':';
    if (depth_ == 1 && is_key) key_ = json.substr(begin, at - begin);
    return at + 1;
  }

  int depth_ = 0;
  bool in_list_ = false;  ///< what was opened last at depth 2
  std::string_view key_;  ///< of the value at depth 1
};

}  // namespace

std::string spell_bare_infinity(std::string_view json) {
  std::string result;
  if (json.find(kInfinity) == std::string_view::npos) return result = json;
  Place place;
  const auto ends_word = [&](std::size_t at) {
    return at >= json.size() || is_space(json[at]) || json[at] == ',' || json[at] == ']';
  };
  for (std::size_t at = 0; at < json.size();) {
    const bool begins_word =
        at > 0 && (is_space(json[at - 1]) || json[at - 1] == ',' || json[at - 1] == '[');
    if (begins_word && place.takes_infinity() && json.substr(at).starts_with(kInfinity) &&
        ends_word(at + kInfinity.size())) {
      result += kSpelled;
      at += kInfinity.size();
      continue;
    }
    const std::size_t next = place.pass(json, at);
    result += json.substr(at, next - at);
    at = next;
  }
  return result;
}

}  // namespace tessera::models
