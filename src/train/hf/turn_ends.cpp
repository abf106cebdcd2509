#include "train/hf/turn_ends.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "base/mapped_file.h"
#include "base/text/json_reader.h"
#include "base/text/printable.h"
#include "io/folder.h"
#include "tessera/error.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMostConfigBytes = 16 << 20;
constexpr std::int64_t kMostTokenizerBytes = 256 << 20;  // of 256 thousand tokens it has 35 MB
// Ends of turns in published chat templates; a template that writes eos_token has the tokenizer's.
constexpr std::array<std::string_view, 9> kEndsOfTurns{
    "<|im_end|>", "<|eot_id|>", "<|eot|>",         "<end_of_turn>",        "<turn|>",
    "<|return|>", "<|end|>",    "<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>"};

/// The text of a file of the folder, "" where there is none.
std::string text_of(const fs::path& folder, const std::string& name, std::int64_t most_bytes) {
  const auto file = optional_file_inside(folder, name);
  return file ? read_text_file(*file, most_bytes) : "";
}

nlohmann::json object_of(const fs::path& folder, const std::string& name) {
  const std::string text = text_of(folder, name, kMostConfigBytes);
  if (text.empty()) return nlohmann::json::object();
  return parse_json_object(text, shown(folder / name));
}

/// The text under a key of an object, else "".
std::string text_at(const nlohmann::json& object, const char* key) {
  if (!object.is_object()) return "";
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

/// The text of a token, which is a string or an object with `content`.
std::string word_of(const nlohmann::json& token) {
  return token.is_string() ? token.get<std::string>() : text_at(token, "content");
}

/// The tokens that tokenizer.json adds to the vocabulary, special ones among them. Skips the model,
/// which is most of the file.
nlohmann::json added_tokens(const fs::path& folder) {
  const std::string text = text_of(folder, "tokenizer.json", kMostTokenizerBytes);
  if (text.empty()) return nlohmann::json::array();
  const auto without_model = [](int depth, nlohmann::json::parse_event_t event,
                                const nlohmann::json& parsed) {
    return event != nlohmann::json::parse_event_t::key || depth != 1 || parsed != "model";
  };
  const auto whole = nlohmann::json::parse(text, without_model, /*allow_exceptions=*/false);
  TESSERA_CHECK(whole.is_object(), ErrorKind::kFormat, shown(folder / "tokenizer.json"),
                ": found no JSON object, expected a tokenizer");
  const auto found = whole.find("added_tokens");
  return found != whole.end() && found->is_array() ? *found : nlohmann::json::array();
}

/// The ids of added tokens, by token.
std::map<std::string, std::int64_t> special_tokens(const fs::path& folder,
                                                   const nlohmann::json& about) {
  std::map<std::string, std::int64_t> ids;
  if (const auto found = about.find("added_tokens_decoder");
      found != about.end() && found->is_object()) {
    for (const auto& [key, token] : found->items()) {
      std::int64_t id = 0;
      const auto [end, failed] = std::from_chars(key.data(), key.data() + key.size(), id);
      if (failed == std::errc{} && end == key.data() + key.size()) ids.emplace(word_of(token), id);
    }
  }
  for (const nlohmann::json& token : added_tokens(folder)) {
    if (!token.is_object()) continue;
    const auto id = token.find("id");
    if (id != token.end() && id->is_number_integer()) {
      ids.emplace(word_of(token), id->get<std::int64_t>());
    }
  }
  return ids;
}

/// The template that transformers finds; of several the one named "default", or all of them.
std::string chat_template(const fs::path& folder, const nlohmann::json& about) {
  if (auto own = text_of(folder, "chat_template.jinja", kMostConfigBytes); !own.empty()) return own;
  const auto found = about.find("chat_template");
  if (found == about.end() || !found->is_array()) return text_at(about, "chat_template");
  std::string all;
  for (const nlohmann::json& named : *found) {
    if (text_at(named, "name") == "default") return text_at(named, "template");
    all += text_at(named, "template");
  }
  return all;
}

}  // namespace

TextEnds text_ends(const fs::path& folder, const models::ModelSpec& spec) {
  constexpr auto kGeneration = "generation_config.json";
  const std::string text = folder.empty() ? "" : text_of(folder, kGeneration, kMostConfigBytes);
  if (!text.empty()) {
    auto ids = models::generation_end_tokens(text, shown(folder / kGeneration));
    if (!ids.empty()) return {std::move(ids), kGeneration};
  }
  return {spec.eos_token_ids, "config.json"};
}

std::vector<TurnEnd> turns_that_go_on(const fs::path& folder, const TextEnds& ends) {
  const nlohmann::json about = object_of(folder, "tokenizer_config.json");
  const auto ids = special_tokens(folder, about);
  const auto stops_at = [&](const TurnEnd& turn) {
    return std::ranges::find(ends.ids, turn.id) != ends.ids.end();
  };
  std::vector<TurnEnd> found;
  const auto eos = about.find("eos_token");
  if (const auto id = eos == about.end() ? ids.end() : ids.find(word_of(*eos)); id != ids.end()) {
    found.push_back({id->first, id->second, "eos_token of tokenizer_config.json"});
  }
  std::erase_if(found, stops_at);
  std::vector<TurnEnd> written;  // a turn of one kind may end otherwise than that of another
  const std::string text = chat_template(folder, about);
  for (const std::string_view name : kEndsOfTurns) {
    const auto id = ids.find(std::string(name));
    if (id == ids.end() || text.find(name) == std::string::npos) continue;
    written.push_back({id->first, id->second, "the chat template"});
  }
  const bool is_said = !written.empty() && std::ranges::any_of(found, [&](const TurnEnd& turn) {
    return turn.id == written.front().id;
  });
  if (!written.empty() && !is_said && std::ranges::none_of(written, stops_at)) {
    found.push_back(written.front());
  }
  return found;
}

}  // namespace tessera::train
