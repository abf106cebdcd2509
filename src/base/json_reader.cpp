#include "base/json_reader.h"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "base/printable.h"
#include "tessera/error.h"

namespace tessera {

nlohmann::json parse_json(std::string_view text, std::string_view where, int max_depth) {
  using nlohmann::json;
  std::vector<std::set<std::string>> open_objects;  // the keys seen in each
  const auto check = [&](int depth, json::parse_event_t event, json& parsed) {
    switch (event) {
      case json::parse_event_t::object_start:
      case json::parse_event_t::array_start:
        TESSERA_CHECK(depth < max_depth, ErrorKind::kFormat, where,
                      ": found JSON nested deeper than ", max_depth, " levels");
        if (event == json::parse_event_t::object_start) open_objects.emplace_back();
        break;
      case json::parse_event_t::object_end:
        open_objects.pop_back();
        break;
      case json::parse_event_t::key: {
        const auto& key = parsed.get_ref<const std::string&>();
        TESSERA_CHECK(open_objects.back().insert(key).second, ErrorKind::kFormat, where,
                      ": found the key ", printable(key), " twice in one object");
        break;
      }
      default:
        break;
    }
    return true;
  };
  try {
    return json::parse(text.begin(), text.end(), check);
  } catch (const json::parse_error& error) {
    throw Error(ErrorKind::kFormat,
                concat(where, ": malformed JSON at byte ", error.byte, ": ", complaint_of(error)));
  } catch (const json::exception& error) {
    throw Error(ErrorKind::kFormat, concat(where, ": malformed JSON: ", complaint_of(error)));
  }
}

nlohmann::json parse_json_object(std::string_view text, std::string_view where, int max_depth) {
  nlohmann::json value = parse_json(text, where, max_depth);
  TESSERA_CHECK(value.is_object(), ErrorKind::kFormat, where, ": found a JSON ", value.type_name(),
                ", expected an object");
  return value;
}

std::string complaint_of(const nlohmann::json::exception& error) {
  // "[json.exception.parse_error.101] parse error at line 1, column 2: what is wrong"
  std::string_view text = error.what();
  if (text.starts_with('[')) text.remove_prefix(std::min(text.find("] ") + 2, text.size()));
  if (text.starts_with("parse error at ")) {
    text.remove_prefix(std::min(text.find(": ") + 2, text.size()));
  }
  std::string shown = printable(text, 200);
  return shown.substr(1, shown.size() - 2);  // it is a sentence of its own, and has quotes inside
}

}  // namespace tessera
