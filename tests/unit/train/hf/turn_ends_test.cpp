// Drawn folders: which ends of turns are none of the ids at which generation stops.
#include "train/hf/turn_ends.h"

#include <nlohmann/json.hpp>
#include <random>

#include "support/temporary_folder.h"

namespace tessera::train::turn_ends_test {
namespace {

using Json = nlohmann::ordered_json;

/// A folder as the hub has them, and what it means.
struct Drawn {
  TemporaryFolder folder;
  models::ModelSpec spec;
  std::map<std::string, std::int64_t> ids;
  std::vector<std::int64_t> stops;
  std::string eos;                    ///< "" = none
  std::vector<std::string> in_turns;  ///< ends that the template has
};

class Draw {
 public:
  explicit Draw(unsigned seed) : engine_(seed) {}
  bool coin() { return engine_() % 2 == 0; }
  std::size_t below(std::size_t count) { return engine_() % count; }

  std::unique_ptr<Drawn> folder() {
    auto drawn = std::make_unique<Drawn>();
    std::int64_t next = static_cast<std::int64_t>(below(100));
    for (const char* name : {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"}) {
      drawn->ids[name] = next;
      next += 1 + static_cast<std::int64_t>(below(9));
    }
    write_tokenizer(*drawn);
    write_ends(*drawn);
    return drawn;
  }

 private:
  Json token(const std::string& content) {
    return coin() ? Json(content) : Json{{"content", content}, {"special", true}};
  }

  void write_tokenizer(Drawn& drawn) {
    Json about = Json::object();
    if (below(4) > 0) {
      const char* ends[] = {"<|im_end|>", "<|endoftext|>", "<|no token|>"};
      drawn.eos = ends[below(3)];
      if (coin()) {
        about["eos_token"] = token(drawn.eos);
        if (coin())
          drawn.folder.write("special_tokens_map.json", R"({"eos_token": "<|im_start|>"})");
      } else {
        drawn.folder.write("special_tokens_map.json", Json{{"eos_token", token(drawn.eos)}}.dump());
      }
    }
    write_tokens(drawn, about);
    std::string text = "{% for m in messages %}<|im_start|>{{ m.content }}";
    for (const char* name : {"<|im_end|>", "<|eot_id|>", "<|eot|>"}) {  // the last is no token
      if (below(3) != 0) continue;
      text += name;
      if (drawn.ids.contains(name)) drawn.in_turns.emplace_back(name);
    }
    text += "{% endfor %}";
    switch (below(5)) {
      case 4:
        drawn.folder.write("chat_template.json", Json{{"chat_template", text}}.dump());
        break;
      case 0:
        drawn.folder.write("chat_template.jinja", text);
        about["chat_template"] = "<|eot_id|>";  // of an older version: not looked at
        break;
      case 1:
        about["chat_template"] = text;
        break;
      case 2:
        about["chat_template"] = {{{"name", "tool_use"}, {"template", "<|eot_id|>"}},
                                  {{"name", "default"}, {"template", text}}};
        break;
      default:
        drawn.in_turns.clear();
    }
    drawn.folder.write("tokenizer_config.json", about.dump());
  }

  void write_tokens(Drawn& drawn, Json& about) {
    const std::size_t place = below(5);
    if (place == 0) {
      for (const auto& [name, id] : drawn.ids) {
        about["added_tokens_decoder"][std::to_string(id)] = {{"content", name}};
      }
      return;
    }
    if (place == 1 || place == 2) {
      const char* const name = place == 1 ? "added_tokens.json" : "vocab.json";
      drawn.folder.write(name, Json(drawn.ids).dump());
      return;
    }
    Json added = Json::array(), vocab = Json::object();
    if (place == 3) {
      for (const auto& [name, id] : drawn.ids) vocab[name] = id;
    } else {
      for (const auto& [name, id] : drawn.ids) added.push_back({{"id", id}, {"content", name}});
      vocab["<|im_end|>"] = 1;  // a model may hold anything, also tokens of these names
    }
    const Json whole{{"added_tokens", added}, {"model", {{"vocab", vocab}, {"added_tokens", {7}}}}};
    drawn.folder.write("tokenizer.json", whole.dump());
  }

  std::vector<std::int64_t> some_ids(const Drawn& drawn) {
    std::vector<std::int64_t> some;
    for (const auto& [name, id] : drawn.ids) {
      if (coin()) some.push_back(id);
    }
    return some;
  }

  void write_ends(Drawn& drawn) {
    drawn.spec.eos_token_ids = some_ids(drawn);
    drawn.stops = drawn.spec.eos_token_ids;
    if (coin()) return;
    const auto own = some_ids(drawn);
    Json says = Json::object();
    if (own.size() == 1 && coin()) says["eos_token_id"] = own[0];
    if (own.size() != 1 || !says.contains("eos_token_id")) says["eos_token_id"] = own;
    drawn.folder.write("generation_config.json", says.dump());
    if (!own.empty()) drawn.stops = own;
  }

  std::mt19937 engine_;
};

// Property: an end is named exactly where generation does not stop at it, by each file that gives
// it; of several ends in a template one that stops is enough, since a tool call may end
// differently.
TEST(TurnEnds, ThoseThatGenerationDoesNotStopAtAreNamed) {
  Draw draw(20261128);
  std::size_t named = 0, silent = 0;
  for (int i = 0; i < 300; ++i) {
    const auto drawn = draw.folder();
    const auto stops_at = [&](const std::string& name) {
      return drawn->ids.contains(name) &&
             std::ranges::find(drawn->stops, drawn->ids.at(name)) != drawn->stops.end();
    };
    std::vector<std::string> expected;
    if (!drawn->eos.empty() && !stops_at(drawn->eos)) expected.push_back(drawn->eos);
    const auto& turns = drawn->in_turns;
    if (!turns.empty() && std::ranges::none_of(turns, stops_at) &&
        std::ranges::find(expected, turns[0]) == expected.end()) {
      expected.push_back(turns[0]);
    }
    const TextEnds ends = text_ends(drawn->folder.path(), drawn->spec);
    EXPECT_EQ(ends.ids, drawn->stops);
    std::vector<std::string> found;
    for (const TurnEnd& turn : turns_that_go_on(drawn->folder.path(), ends)) {
      found.push_back(turn.token);
      const auto id = drawn->ids.find(turn.token);
      EXPECT_EQ(turn.id, id == drawn->ids.end() ? std::nullopt : std::optional(id->second));
    }
    EXPECT_EQ(found, expected) << i;
    (expected.empty() ? silent : named) += 1;
  }
  EXPECT_GT(named, 50U);
  EXPECT_GT(silent, 50U);
}

TEST(TurnEnds, AFolderWithoutATokenizerNamesNone) {
  const TemporaryFolder folder;
  EXPECT_TRUE(turns_that_go_on(folder.path(), {{1}, "config.json"}).empty());
  EXPECT_EQ(text_ends("", {}).ids, std::vector<std::int64_t>{});
}

// The tokens of such a file are not known: an end that is none of those that are is no mistake.
TEST(TurnEnds, AVocabularyThatIsNotReadNamesNone) {
  for (const char* vocabulary : {"tokenizer.model", "tekken.json"}) {
    const TemporaryFolder folder;
    folder.write("tokenizer_config.json",
                 R"({"eos_token": "</s>", "added_tokens_decoder": {"1": {"content": "<s>"}}})");
    EXPECT_EQ(turns_that_go_on(folder.path(), {{1}, "config.json"}).size(), 1U);
    folder.write(vocabulary, "");
    EXPECT_TRUE(turns_that_go_on(folder.path(), {{1}, "config.json"}).empty());
  }
}

TEST(TurnEnds, AFileThatIsNoTokenizerIsNamed) {
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                           "chat_template.json", "added_tokens.json"}) {
    const TemporaryFolder folder;
    folder.write(name, "[1,");
    EXPECT_REFUSED(kFormat, turns_that_go_on(folder.path(), {{1}, "config.json"}), name);
  }
}

}  // namespace
}  // namespace tessera::train::turn_ends_test
