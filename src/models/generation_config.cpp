#include "models/generation_config.h"

#include "base/json_reader.h"
#include "models/config_reader.h"
#include "tessera/error.h"

namespace tessera::models {

std::vector<std::int64_t> generation_end_tokens(std::string_view text, std::string_view where) {
  const nlohmann::json object = parse_json_object(text, where);
  const auto found = object.find("eos_token_id");
  if (found == object.end() || found->is_null()) return {};
  std::vector<std::int64_t> ids;
  for (const nlohmann::json& id : found->is_array() ? *found : nlohmann::json::array({*found})) {
    TESSERA_CHECK(id.is_number_integer(), ErrorKind::kFormat, where, ": eos_token_id: found ",
                  shown(*found), ", expected a token id or a list of them");
    ids.push_back(id.get<std::int64_t>());
  }
  return ids;
}

}  // namespace tessera::models
