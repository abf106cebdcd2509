// Warnings of `convert` about a folder with which others will generate.

#include "cli/byte_model.h"
#include "cli/program.h"
#include "support/test.h"

namespace tessera::cli::convert_test {
namespace {

/// Converts the model, whose config ends a text at 5, with these files in its folder.
std::string said(const std::vector<std::pair<std::string, std::string>>& files) {
  const TemporaryFolder folder;
  auto spec = byte_spec();
  spec.tessera_tokenizer.clear();
  spec.eos_token_ids = {5};
  write_folder(folder / "model", spec);
  for (const auto& [name, text] : files) folder.write("model/" + name, text);
  const Outcome outcome = succeeded(run_program(folder, {"convert", "model", "out"}));
  for (const auto& [name, text] : files) EXPECT_EQ(read_file(folder / "out" / name), text);
  return outcome.err;
}

// Naive: a base model that was tuned on chats is exported with the end of a text alone, and
// generation continues with the next question.
TEST(Convert, WarnsWhereGenerationDoesNotStopAtTheEndOfATurn) {
  const std::string tokens =
      R"("added_tokens_decoder": {"5": {"content": "<|endoftext|>"}, "7": {"content": "<|im_end|>"}})";
  const std::string chat = R"({"eos_token": "<|im_end|>", )" + tokens + "}";
  const std::string base = R"({"eos_token": "<|endoftext|>", )" + tokens + "}";
  const std::string jinja = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}";
  EXPECT_THAT(said({{"tokenizer_config.json", chat}}),
              Says("convert: warning: a turn ends with '<|im_end|>' (token 7; eos_token "
                   "of tokenizer_config.json in 'model')",
                   "but eos_token_id is 5 (config.json)",
                   "write \"eos_token_id\": [5, 7] into generation_config.json of "
                   "'out'"));
  EXPECT_THAT(said({{"tokenizer_config.json", base}, {"chat_template.jinja", jinja}}),
              Says("a turn ends with '<|im_end|>' (token 7; the chat template in 'model')"));
  EXPECT_THAT(said({{"tokenizer_config.json", base}}), Not(Says("a turn ends")));
  EXPECT_THAT(said({{"tokenizer_config.json", chat},
                    {"chat_template.jinja", jinja},
                    {"generation_config.json", R"({"eos_token_id": [7, 5]})"}}),
              Not(Says("a turn ends")));
  // transformers reads it first.
  EXPECT_THAT(
      said({{"tokenizer_config.json", base}, {"generation_config.json", R"({"eos_token_id": 7})"}}),
      Says("'<|endoftext|>' (token 5; eos_token of tokenizer_config.json in 'model'), "
           "but eos_token_id is 7 (generation_config.json)"));
}

// Naive: each warning lists the end of its own turn alone, and after the last one is followed
// generation still does not stop at the other.
TEST(Convert, TheLastWarningHasTheEndsOfAllTurns) {
  const std::string jinja = "{% for m in messages %}{{ m.content }}<|eot_id|>{% endfor %}";
  for (const auto& [end, turn] : {std::pair(7, 8), {8, 7}, {0, 259}, {131, 4}}) {
    const std::string chat =
        concat(R"({"eos_token": "<|im_end|>", "added_tokens_decoder": {")", end,
               R"(": {"content": "<|im_end|>"}, ")", turn, R"(": {"content": "<|eot_id|>"}}})");
    const std::pair<std::string, std::string> tokenizer{"tokenizer_config.json", chat};
    const std::pair<std::string, std::string> chats{"chat_template.jinja", jinja};
    const std::string warned = said({tokenizer, chats});
    EXPECT_THAT(warned, Says(concat("a turn ends with '<|im_end|>' (token ", end, ";"),
                             concat("a turn ends with '<|eot_id|>' (token ", turn, ";")));
    const std::string ids = concat("\"eos_token_id\": [5, ", end, ", ", turn, "]");
    const std::size_t last = warned.rfind("warning: a turn ends");
    ASSERT_NE(last, std::string::npos) << warned;
    EXPECT_THAT(warned.substr(last), Says(concat("write ", ids, " into generation_config")));
    EXPECT_THAT(said({tokenizer, chats, {"generation_config.json", concat("{", ids, "}")}}),
                Not(Says("a turn ends")));
  }
}

TEST(Convert, WarnsOfAnEndThatIsNoToken) {
  const std::string chat =
      R"({"eos_token": "<|im_end|>", "added_tokens_decoder": {"5": {"content": "<|endoftext|>"}}})";
  EXPECT_THAT(said({{"tokenizer_config.json", chat}}),
              AllOf(Says("warning: eos_token of tokenizer_config.json in 'model' is "
                         "'<|im_end|>', which is no token of its tokenizer"),
                    Not(Says("a turn ends"))));
}

// Naive: the folder alone is named, and the message reads as if some weights were malformed.
TEST(Convert, AConfigThatIsNoJsonIsNamed) {
  const TemporaryFolder folder;
  write_folder(folder / "model", byte_spec());
  folder.write("model/config.json", "{\"model_type\": ");
  EXPECT_THAT(run_program(folder, {"convert", "model", "out"}).err,
              Says("'model/config.json': malformed JSON"));
}

TEST(Convert, AFileOfATokenizerThatCannotBeReadIsCopiedAndSaid) {
  EXPECT_THAT(said({{"tokenizer_config.json", "{"}}),
              Says("warning: whether generation stops at the end of a turn is not known: "));
}

}  // namespace
}  // namespace tessera::cli::convert_test
