#include "base/text/json_fields.h"

#include <algorithm>

#include "tessera/error.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

std::string in_double_quotes(std::span<const std::string_view> names) {
  std::vector<std::string> quoted;
  for (const auto name : names) quoted.push_back(concat("\"", name, "\""));
  return joined(quoted);
}

bool is_flat(const Json& value) {
  return std::ranges::none_of(value, [](const Json& item) { return item.is_structured(); });
}

void write_lines(std::string& text, const Json& value, const std::string& indent, int levels) {
  const auto dumped = [](const Json& one) {
    return one.dump(-1, ' ', false, Json::error_handler_t::replace);
  };
  if (levels == 0 || !value.is_structured() || is_flat(value)) {
    text += dumped(value);
    return;
  }
  const auto inner = indent + "  ";
  text += value.is_object() ? "{" : "[";
  bool first = true;
  for (const auto& [key, item] : value.items()) {
    text += (first ? "\n" : ",\n") + inner;
    first = false;
    if (value.is_object()) text += dumped(Json(key)) + ": ";
    write_lines(text, item, inner, levels - 1);
  }
  text += concat("\n", indent, value.is_object() ? "}" : "]");
}

}  // namespace

std::string json_lines(const nlohmann::ordered_json& value, int levels) {
  std::string text;
  write_lines(text, value, "", levels);
  return text;
}

namespace detail {

void require_only(const JsonCursor& at, std::span<const std::string_view> keys) {
  for (const auto& [key, item] : at.value().items()) {
    if (std::ranges::find(keys, key) != keys.end()) continue;
    throw Error(ErrorKind::kFormat, concat(at.where(), ": found ", printable(key),
                                           ", expected none but ", in_double_quotes(keys)));
  }
}

void require_list(const JsonCursor& at, std::int64_t most, std::string_view of) {
  if (at.value().is_array() && std::cmp_less_equal(at.value().size(), most)) return;
  at.refuse(concat("a list of at most ", most, " ", of));
}

void refuse_word(const JsonCursor& at, std::span<const std::string_view> words) {
  at.refuse(concat("one of ", in_double_quotes(words)));
}

const std::string& text_within(const JsonCursor& at, const TextLimit& limit) {
  const auto& text = at.text();
  const bool shows = limit.letters == Letters::kAny || std::ranges::all_of(text, [](char c) {
                       return static_cast<unsigned char>(c) >= 0x20 && c != '\x7f';
                     });
  if (text.size() > limit.most_bytes || !shows) {
    at.refuse(concat("at most ", limit.most_bytes,
                     limit.letters == Letters::kPrintable ? " printable bytes" : " bytes"));
  }
  return text;
}

}  // namespace detail
}  // namespace tessera
