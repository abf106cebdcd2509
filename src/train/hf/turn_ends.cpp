#include "train/hf/turn_ends.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

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

/// tokenizer.json, or null where there is none; `whole`, or without its model, which is most of it.
nlohmann::json tokenizer(const fs::path& folder, bool whole) {
  const std::string text = text_of(folder, "tokenizer.json", kMostTokenizerBytes);
  if (text.empty()) return nullptr;
  const auto wanted = [whole](int depth, nlohmann::json::parse_event_t event,
                              const nlohmann::json& parsed) {
    return whole || event != nlohmann::json::parse_event_t::key || depth != 1 || parsed != "model";
  };
  auto parsed = nlohmann::json::parse(text, wanted, /*allow_exceptions=*/false);
  TESSERA_CHECK(parsed.is_object(), ErrorKind::kFormat, shown(folder / "tokenizer.json"),
                ": found no JSON object, expected a tokenizer");
  return parsed;
}

/// The tokens of a tokenizer, by name: those that are added to the vocabulary at once, special ones
/// among them, and the vocabulary where one is not among those.
class Tokens {
 public:
  Tokens(const fs::path& folder, const nlohmann::json& about) : folder_(folder) {
    if (const auto found = about.find("added_tokens_decoder");
        found != about.end() && found->is_object()) {
      for (const auto& [key, token] : found->items()) {
        std::int64_t id = 0;
        const auto [end, failed] = std::from_chars(key.data(), key.data() + key.size(), id);
        if (failed == std::errc{} && end == key.data() + key.size()) add(word_of(token), id);
      }
    }
    const nlohmann::json file = tokenizer(folder, /*whole=*/false);
    if (const auto added = file.find("added_tokens"); added != file.end() && added->is_array()) {
      for (const nlohmann::json& token : *added) {
        if (token.is_object() && token.contains("id")) add(word_of(token), token["id"]);
      }
    }
    add_all(object_of(folder, "added_tokens.json"));
  }

  std::optional<std::int64_t> id_of(const std::string& token) {
    if (!ids_.contains(token) && !has_vocabulary_) add_vocabulary();
    const auto found = ids_.find(token);
    return found == ids_.end() ? std::nullopt : std::optional(found->second);
  }
  /// Whether the files that were read list every token, after an id was asked for in vain.
  bool lists_all() const { return lists_all_; }

 private:
  void add(const std::string& token, const nlohmann::json& id) {
    if (id.is_number_integer()) ids_.emplace(token, id.get<std::int64_t>());
  }
  void add_all(const nlohmann::json& object) {
    for (const auto& [token, id] : object.items()) add(token, id);
  }
  void add_vocabulary() {
    constexpr std::array kNotRead{"tokenizer.model", "sentencepiece.bpe.model", "spiece.model",
                                  "tekken.json",     "qwen.tiktoken",           "vocab.txt"};
    std::error_code ignored;
    has_vocabulary_ = true;
    const nlohmann::json file = tokenizer(folder_, /*whole=*/true);
    const nlohmann::json none = nlohmann::json::object();
    const auto model = file.find("model");
    const auto vocab =
        model != file.end() && model->is_object() ? model->value("vocab", none) : none;
    if (vocab.is_array()) {  // of Unigram: [token, score], in the order of ids
      for (std::size_t id = 0; id < vocab.size(); ++id) {
        const nlohmann::json& entry = vocab[id];
        if (entry.is_array() && !entry.empty() && entry[0].is_string()) add(entry[0], id);
      }
    } else if (vocab.is_object()) {
      add_all(vocab);
    }
    const nlohmann::json in_own_file = object_of(folder_, "vocab.json");
    add_all(in_own_file);
    const bool is_elsewhere = std::ranges::any_of(
        kNotRead, [&](const char* name) { return fs::exists(folder_ / name, ignored); });
    lists_all_ = !vocab.empty() || !in_own_file.empty() || (!ids_.empty() && !is_elsewhere);
  }

  fs::path folder_;
  std::map<std::string, std::int64_t> ids_;
  bool has_vocabulary_ = false;
  bool lists_all_ = false;
};

/// The template that transformers finds; of several the one named "default", or all of them.
std::string chat_template(const fs::path& folder, const nlohmann::json& about) {
  if (auto own = text_of(folder, "chat_template.jinja", kMostConfigBytes); !own.empty()) return own;
  const auto found = about.find("chat_template");
  if (found == about.end() ||
      found->is_null()) {  // of a processor, as older versions of transformers write it
    return text_at(object_of(folder, "chat_template.json"), "chat_template");
  }
  if (!found->is_array()) return text_at(about, "chat_template");
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

namespace {

/// The tokenizer's eos_token.
std::optional<TurnEnd> end_of_tokenizer(const fs::path& folder, const nlohmann::json& about,
                                        Tokens& tokens) {
  constexpr auto kMap = "special_tokens_map.json";
  for (const auto& [file, object] :
       {std::pair("tokenizer_config.json", about), std::pair(kMap, object_of(folder, kMap))}) {
    const std::string token = word_of(object.value("eos_token", nlohmann::json()));
    if (token.empty()) continue;
    const auto id = tokens.id_of(token);
    if (!id && !tokens.lists_all()) return std::nullopt;
    return TurnEnd{token, id, concat("eos_token of ", file)};
  }
  return std::nullopt;
}

}  // namespace

std::vector<TurnEnd> turns_that_go_on(const fs::path& folder, const TextEnds& ends) {
  const nlohmann::json about = object_of(folder, "tokenizer_config.json");
  Tokens tokens(folder, about);
  const auto stops_at = [&](const TurnEnd& turn) {
    return turn.id && std::ranges::find(ends.ids, *turn.id) != ends.ids.end();
  };
  std::vector<TurnEnd> found;
  if (auto end = end_of_tokenizer(folder, about, tokens)) found.push_back(std::move(*end));
  std::erase_if(found, stops_at);
  std::vector<TurnEnd> written;  // a turn of one kind may end otherwise than that of another
  const std::string text = chat_template(folder, about);
  for (const std::string_view name : kEndsOfTurns) {
    if (text.find(name) == std::string::npos) continue;
    const auto id = tokens.id_of(std::string(name));
    if (id) written.push_back({std::string(name), id, "the chat template"});
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
