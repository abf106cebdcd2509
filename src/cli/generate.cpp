#include "train/generate.h"

#include <algorithm>
#include <charconv>
#include <iostream>

#include "base/text/printable.h"
#include "base/threads/parallel.h"
#include "cli/arguments.h"
#include "cli/program_end.h"
#include "cli/ranks.h"
#include "io/token_source.h"
#include "tessera/error.h"
#include "tessera/world.h"
#include "train/config/config_resolve.h"
#include "train/hf/turn_ends.h"

namespace tessera::cli {
namespace {

using Ids = std::vector<std::int64_t>;

/// Dtypes as the folder has them, unless the command line says otherwise.
train::Config config_of(const GenerateArguments& arguments) {
  train::Config config;
  config.model.path = train::newest_checkpoint(arguments.model, "--model");
  config.precision.param_dtype = {};
  config.precision.storage_dtype = {};
  for (const auto& [key, value] : arguments.overrides) {
    TESSERA_CHECK(key.starts_with("precision.") || key == "model.allow_unknown_config_keys" ||
                      key == "device",
                  ErrorKind::kUsage, "--", key,
                  ": found with generate, expected only --device, --precision.KEY and "
                  "--model.allow_unknown_config_keys there");
  }
  apply(arguments.overrides, config);
  train::validate(config, train::Verb::kContract);
  return config;
}

Ids parse_ids(const std::string& text) {
  Ids ids;
  const char* at = text.data();
  const char* const end = at + text.size();
  const auto require = [&](bool holds) {
    TESSERA_CHECK(holds, ErrorKind::kUsage, "--prompt-tokens: found ", printable(text),
                  ", expected token ids with commas between, as 1,2,3");
  };
  while (true) {
    while (at != end && *at == ' ') ++at;
    std::int64_t id = 0;
    const auto [rest, failed] = std::from_chars(at, end, id);
    require(failed == std::errc{});
    ids.push_back(id);
    at = rest;
    while (at != end && *at == ' ') ++at;
    if (at == end) return ids;
    require(*at == ',');
    ++at;
  }
}

/// The bytes of the text; without any, the end of the document before.
Ids ids_of(const std::string& text, const models::ModelSpec& spec) {
  TESSERA_CHECK(spec.tessera_tokenizer == "bytes", ErrorKind::kUsage,
                "--prompt: found text for a model with a tokenizer of its own, expected "
                "--prompt-tokens 1,2,3; tools/tokenize.py --encode TEXT makes ids of text");
  if (text.empty()) return {TextCorpus::kEndOfDocument};
  Ids ids;
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  return ids;
}

/// New tokens as they come: text, or ids that --prompt-tokens takes.
class Printer {
 public:
  enum class As : std::uint8_t { kText, kIds };
  explicit Printer(As as) : as_(as) {}

  void print(std::int64_t token) {
    if (as_ == As::kIds) {
      std::cout << (any_ ? "," : "") << token;
    } else if (token < TextCorpus::kEndOfDocument) {
      std::cout << text_.add(static_cast<unsigned char>(token));
    }
    any_ = true;
    std::cout.flush();  // fails before the next token is computed in vain
  }
  void finish() {
    std::cout << text_.finish() << '\n';
    std::cout.flush();
  }

 private:
  As as_;
  ByteText text_;
  bool any_ = false;
};

Ids end_tokens(const train::ModelSource& source) {
  Ids ids = train::text_ends(source.origin, source.spec).ids;
  if (source.spec.tessera_tokenizer == "bytes") ids.push_back(TextCorpus::kEndOfDocument);
  return ids;
}

train::GenerateOptions generate_options(const GenerateArguments& arguments,
                                        const train::ModelSource& source) {
  train::GenerateOptions options;
  options.max_new_tokens = arguments.max_new_tokens;
  options.sampling = {arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed};
  options.end_tokens = end_tokens(source);
  if (source.spec.tessera_tokenizer == "bytes") {
    // Ids above stand for nothing and were never trained.
    options.ids_below = std::min(TextCorpus::kVocabSize, source.spec.vocab_size);
  }
  return options;
}

}  // namespace

int run_generate(const GenerateArguments& arguments) {
  const train::Config config = config_of(arguments);
  const train::ModelSource source = train::open_as(
      "--model", [&] { return train::open_model(config.model, {}, train::Purpose::kInference); });
  const Ids prompt = arguments.prompt ? ids_of(*arguments.prompt, source.spec)
                                      : parse_ids(*arguments.prompt_tokens);
  train::check_prompt(source.spec, prompt);
  train::GenerateOptions options = generate_options(arguments, source);
  base::heed_cpu_quota();
  const auto world = World::of_one(world_options(config));
  options.device = world->device();
  const auto model = train::parallelize_to_generate(source, config, *world);
  Printer printer(arguments.prompt ? Printer::As::kText : Printer::As::kIds);
  const train::EndedBy end = train::generate(train::decoder_of(*model), prompt, options,
                                             [&](std::int64_t token) { printer.print(token); });
  printer.finish();
  if (end == train::EndedBy::kPositions) {
    std::cerr << "tessera: generate: ended at the model's max_position_embeddings, "
              << source.spec.max_position_embeddings << '\n';
  }
  return kDone;
}

}  // namespace tessera::cli
