#include "train/config/config_keys.h"

#include <filesystem>
#include <random>
#include <regex>

#include "base/text/fields.h"
#include "support/temporary_folder.h"
#include "train/config/config_codec.h"
#include "train/config/config_names.h"
#include "train/config/config_resolve.h"
#include "unit/train/config/config_fixture.h"

namespace tessera::train::config_keys_test {
namespace {

TEST(ConfigKeys, NamesAreUniqueAndDescribed) {
  std::set<std::string> names;
  for (const ConfigKey& key : config_keys()) {
    EXPECT_TRUE(names.insert(key.full_name()).second) << key.full_name();
    EXPECT_FALSE(key.help.empty()) << key.full_name();
    EXPECT_FALSE(key.type.empty()) << key.full_name();
    EXPECT_FALSE(key.default_text.empty()) << key.full_name();
  }
  EXPECT_EQ(names.size(),
            106u);  // rows of the interface's table: adding a key changes this on purpose
}

TEST(ConfigKeys, KeysOfASectionAreAdjacent) {
  std::set<std::string> seen;
  std::string section;
  for (const ConfigKey& key : config_keys()) {
    if (key.section == section) continue;
    section = key.section;
    EXPECT_TRUE(seen.insert(section).second) << section;
  }
}

TEST(ConfigKeys, DefaultsPassTheirOwnLimits) {
  for (const ConfigKey& key : config_keys()) {
    Config config;
    if (const std::optional<ConfigValue> value = key.get(config)) {
      EXPECT_NO_THROW(key.set(config, *value)) << key.full_name();
    }
    EXPECT_EQ(config, Config{}) << key.full_name();
  }
}

TEST(ConfigKeys, HelpHasEveryKeyWithTypeAndDefault) {
  const std::string help = config_help();
  for (const ConfigKey& key : config_keys()) {
    EXPECT_THAT(help, Says("  " + key.full_name() + "  " + key.type)) << help;
    EXPECT_THAT(help, Says(key.default_text + "\n"));
  }
}

/// Expects each member of the struct behind a list of tables to be a key, and each key to be in the
/// help.
template <class S>
void expect_keys_in_help(const std::string& list) {
  const auto& keys = ListedTable<S>::keys();
  EXPECT_EQ(keys.size(), detail::members_of<S>()) << list << " has a member that is no key";
  const ConfigKey* of_list = find_key(list);
  ASSERT_NE(of_list, nullptr) << list;
  for (const auto& key : keys) {
    EXPECT_FALSE(key.text.help.empty()) << list << " " << key.name;
    EXPECT_THAT(of_list->help, Says(key.name + " (" + key.type + "): " + key.text.help));
  }
}

TEST(ConfigKeys, KeysOfTablesInListsHaveTypeAndHelp) {
  expect_keys_in_help<PrecisionRule>("precision.rule");
  expect_keys_in_help<OptimizerRule>("optimizer.rule");
  expect_keys_in_help<DataSource>("data.source");
}

TEST(ConfigKeys, HelpStaysWithin100ColumnsWhereTextWraps) {
  const std::string help = config_help();
  std::size_t begin = 0;
  for (std::size_t end = help.find('\n'); end != std::string::npos; end = help.find('\n', begin)) {
    if (help.compare(begin, 6, "      ") == 0) {
      EXPECT_LE(end - begin, 100u) << help.substr(begin, end - begin);
    }
    begin = end + 1;
  }
}

TEST(ConfigValueText, RoundsTripsThroughToml) {
  EXPECT_EQ(to_toml(ConfigValue{1e-3}), "0.001");
  EXPECT_EQ(to_toml(ConfigValue{1.0}), "1.0");
  EXPECT_EQ(to_toml(ConfigValue{1e300}), "1e+300");
  EXPECT_EQ(to_toml(ConfigValue{std::int64_t{-3}}), "-3");
  EXPECT_EQ(to_toml(ConfigValue{std::string("a\"\\\n\x7f")}), R"("a\"\\\u000A\u007F")");
  EXPECT_EQ(to_toml(ConfigValue{ConfigValue::Array{{true}, {std::string("x")}}}), "[true, \"x\"]");
}

// Answers to unknown names: the key that was meant, or that there is none.

std::string in_file(const std::string& name) { return advice_on_key(name, KeysIn::kFile); }

std::string refused(const std::string& text) {
  return error_of(ErrorKind::kConfig, [&] { parse_config(text, "run.toml"); });
}

std::vector<std::string> words_of(std::string_view text) {
  std::istringstream all{std::string(text)};
  return {std::istream_iterator<std::string>(all), {}};
}

TEST(OtherNames, EveryKeyThatTheTableNamesIsThereAndNoneOfTheirsIs) {
  std::set<std::string> theirs;
  for (const OtherName& other : other_keys()) {
    for (const std::string& name : words_of(other.theirs)) {
      EXPECT_TRUE(theirs.insert(name).second) << name << " stands twice";
      EXPECT_EQ(find_key(name), nullptr) << name;
      for (const ConfigKey& key : config_keys()) EXPECT_NE(key.name, name) << key.full_name();
    }
    EXPECT_TRUE(other.here.empty() || find_key(other.here) != nullptr) << other.here;
    EXPECT_FALSE(other.here.empty() && other.note.empty()) << other.theirs;
    // Keys that the note mentions.
    static const std::regex kKey("\\b([a-z_]+)\\.[a-z_0-9]+");
    const std::string note(other.note);
    for (std::sregex_iterator key(note.begin(), note.end(), kKey), end; key != end; ++key) {
      if (!is_section((*key)[1].str()) || key->str() == "metrics.jsonl") continue;
      EXPECT_NE(find_key(key->str()), nullptr) << key->str();
    }
  }
  EXPECT_GT(theirs.size(), 100U);
  for (const OtherName& other : other_sections()) {
    EXPECT_TRUE(other.here.empty() || is_section(other.here)) << other.here;
    for (const std::string& name : words_of(other.theirs)) EXPECT_FALSE(is_section(name)) << name;
  }
}

// The same answer in a file's section, at its top (axolotl has no sections), in an unknown section,
// and on the command line with torchtitan's dashes.
TEST(OtherNames, EveryOneIsAnsweredWhereverItStands) {
  for (const OtherName& other : other_keys()) {
    for (const std::string& name : words_of(other.theirs)) {
      const std::string says = other.here.empty()
                                   ? "it is no key here"
                                   : "it is called \"" + std::string(other.here) + "\" here";
      const bool has_section = name.find('.') != std::string::npos;
      const auto expect = [&](const std::string& full) {
        EXPECT_THAT(in_file(full), Says(says)) << full;
      };
      expect(name);
      if (has_section) continue;
      for (const char* section : {"training.", "model.", "profiling.", "wandb."}) {
        expect(section + name);
      }
      std::string dashes = "Training." + name;
      std::ranges::replace(dashes, '_', '-');
      EXPECT_THAT(advice_on_key(dashes, KeysIn::kCommandLine),
                  Says(other.here.empty() ? says : "--" + std::string(other.here)));
    }
  }
}

TEST(OtherNames, TheMostUsedOfTorchtitanTransformersAndAxolotl) {
  const std::pair<const char*, const char*> keys[] = {
      {"training.learning_rate", "optimizer.lr"},
      {"optimizer.learning_rate", "optimizer.lr"},
      {"per_device_train_batch_size", "training.local_batch_size"},
      {"micro_batch_size", "training.local_batch_size"},
      {"gradient_accumulation_steps", "training.global_batch_size"},
      {"max_steps", "training.steps"},
      {"num_train_epochs", "training.steps"},
      {"sequence_len", "training.seq_len"},
      {"max_grad_norm", "training.max_norm"},
      {"adam_beta2", "optimizer.betas"},
      {"optim", "optimizer.name"},
      {"lr_scheduler_type", "lr_scheduler.decay"},
      {"lr_scheduler.decay_type", "lr_scheduler.decay"},
      {"warmup_ratio", "lr_scheduler.warmup_steps"},
      {"bf16", "precision.param_dtype"},
      {"training.mixed_precision_param", "precision.param_dtype"},
      {"gradient_checkpointing", "activation_checkpoint.mode"},
      {"base_model", "model.path"},
      {"model.hf_assets_path", "model.path"},
      {"model.flavor", "model.config"},
      {"training.dataset", "data.path"},
      {"sample_packing", "data.packing"},
      {"output_dir", "job.dump_folder"},
      {"save_steps", "checkpoint.interval"},
      {"save_total_limit", "checkpoint.keep_latest_k"},
      {"checkpoint.enable_checkpoint", "checkpoint.enable"},
      {"logging_steps", "metrics.log_freq"},
      {"eval_steps", "validation.interval"},
      {"validation.freq", "validation.interval"},
      {"compile.enable", "compile.mode"},
      {"lora_r", "lora.rank"},
      {"ddp_timeout", "comm.timeout_seconds"},
      {"parallelism.tp", "parallelism.tensor_parallel_degree"},
      {"parallelism.cp", "parallelism.context_parallel_degree"},
      {"ring_attn_func", "parallelism.context_parallel_form"},
      {"parallelism.pipeline_parallel_schedule", "pipeline.schedule"},
      {"fsdp_config", "parallelism.data_parallel_shard_degree"},
      {"optimizer.wd", "optimizer.weight_decay"},
  };
  for (const auto& [theirs, ours] : keys) {
    EXPECT_THAT(in_file(theirs), StartsWith("; it is called \"" + std::string(ours) + "\" here"));
  }
  for (const char* none :
       {"metrics.enable_wandb", "wandb_project", "load_in_4bit", "flash_attention",
        "training.gc_freq", "model.converters", "dataloader_num_workers", "push_to_hub",
        "checkpoint.async_mode", "chat_template", "trust_remote_code"}) {
    EXPECT_THAT(in_file(none), StartsWith("; it is no key here: ")) << none;
  }
  EXPECT_THAT(refused("[training]\nlearning_rate = 1e-3\n"),
              Says("2:1: unknown key 'training.learning_rate'; it is called \"optimizer.lr\""));
  EXPECT_THAT(refused("learning_rate = 1e-3\n"), Says("it is called \"optimizer.lr\" here"));
  EXPECT_THAT(refused("[profiling]\nenable_profiling = true\n"),
              Says("unknown section 'profiling'", "metrics.trace_steps"));
  EXPECT_THAT(refused("[fsdp_config]\nfsdp_version = 2\n"),
              Says("\"parallelism.data_parallel_shard_degree\""));
}

// Tries every name that begins with a section's: `lora.r` of lora_r. Naive: only where it is
// written in one word.
TEST(OtherNames, AreFoundWhereTheirFirstWordIsTheSection) {
  int found = 0;
  for (const OtherName& other : other_keys()) {
    for (const std::string& name : words_of(other.theirs)) {
      for (const std::string& section : config_sections()) {
        if (!name.starts_with(section + "_")) continue;
        const std::string rest = name.substr(section.size() + 1);
        if (find_key(section + "." + rest) != nullptr || find_other_key(rest) != nullptr) continue;
        EXPECT_EQ(in_file(section + "." + rest), advice_on(other, KeysIn::kFile)) << name;
        ++found;
      }
    }
  }
  EXPECT_GT(found, 5);
  EXPECT_EQ(advice_on_key("lora.r", KeysIn::kCommandLine), "; it is called --lora.rank here");
  EXPECT_THAT(in_file("peft.r"), Says("it is called \"lora.rank\" here"));
  for (const char* type : {"lr_scheduler.type", "lr_scheduler.name", "scheduler.type"}) {
    EXPECT_EQ(in_file(type), "; it is called \"lr_scheduler.decay\" here");
  }
}

/// One edit: a character changed, inserted, removed, or swapped with its neighbour.
std::string misspelt(std::string word, std::mt19937& random) {
  const auto below = [&](std::size_t end) {
    return std::uniform_int_distribution<std::size_t>(0, end - 1)(random);
  };
  const char letter = static_cast<char>('a' + below(26));
  const std::size_t at = below(word.size());
  switch (below(4)) {
    case 0:
      word[at] = letter;
      break;
    case 1:
      word.insert(at, 1, letter);
      break;
    case 2:
      if (word.size() > 1) word.erase(at, 1);
      break;
    default:
      if (at > 0) std::swap(word[at], word[at - 1]);
  }
  return word;
}

// Drawn: one edit in the key, in the section, in both.
TEST(MisspeltKeys, OneSlipInTheNameFindsTheKey) {
  std::mt19937 random(7);
  int found = 0;
  for (int round = 0; round < 20; ++round) {
    for (const ConfigKey& key : config_keys()) {
      const std::string name = misspelt(key.name, random);
      const std::string section = key.section.empty() ? "" : key.section + ".";
      if (find_key(section + name) != nullptr) continue;
      if (find_other_key(name) != nullptr) continue;  // "fused" of "used": another's name
      SCOPED_TRACE(section + name);
      // "lobal_batch_size" is one slip from two keys of its section.
      if (key.section == "training" && name == "lobal_batch_size") continue;
      EXPECT_EQ(in_file(section + name), "; the nearest is \"" + key.full_name() + "\"");
      ++found;
      if (key.section.empty()) continue;
      const std::string other = misspelt(key.section, random);
      if (is_section(other)) continue;
      EXPECT_THAT(in_file(other + "." + key.name), Says("\"" + key.full_name() + "\""));
    }
  }
  EXPECT_GT(found, 1000);
}

// Drawn words of 5 to 20 letters are near no key, and get no suggestion.
TEST(MisspeltKeys, AWordThatIsFarFromAllFindsNone) {
  std::mt19937 random(11);
  std::vector<std::string> sections{""};
  for (const ConfigKey& key : config_keys()) sections.push_back(key.section + ".");
  for (int round = 0; round < 2000; ++round) {
    std::string word;
    while (word.size() < 5 + random() % 16) word += static_cast<char>('a' + random() % 26);
    const std::string full = sections[random() % sections.size()] + word;
    EXPECT_THAT(in_file(full),
                AllOf(Says("--help-keys"), Not(Says("nearest")), Not(Says("called"))))
        << full;
    EXPECT_THAT(advice_on_section(word), StartsWith(", expected one of job, model, "));
  }
}

TEST(MisspeltKeys, ARightKeyInAWrongSectionIsFoundWhereItsNameSaysEnough) {
  EXPECT_EQ(in_file("training.lr"), "; the nearest is \"optimizer.lr\"");
  EXPECT_EQ(in_file("training.seed"), "; the nearest is \"debug.seed\"");
  EXPECT_EQ(in_file("trainig.Seq_Len"), "; the nearest is \"training.seq_len\"");
  EXPECT_EQ(in_file("optimizer.betass"), "; the nearest is \"optimizer.betas\"");
  EXPECT_EQ(in_file("train.steps"), "; the nearest is \"training.steps\"");
  EXPECT_EQ(in_file("eval.interval"), "; the nearest is \"validation.interval\"");
  // Naive: [metrics] enable is checkpoint.enable, [data] name optimizer.name.
  for (const char* vague : {"metrics.enable", "data.name", "training.rank", "pipeline.mode"}) {
    EXPECT_THAT(in_file(vague), Not(Says("nearest"))) << vague;
  }
  EXPECT_EQ(in_file("steps"),
            ", expected a key with its section: \"training.steps\", \"validation.steps\"");
  EXPECT_EQ(in_file("parallelism.zzz"),
            "; there is none like it, tessera --help-keys parallelism lists those of "
            "[parallelism]");
  EXPECT_EQ(advice_on_section("optimiser"), "; the nearest is [optimizer]");
  EXPECT_EQ(advice_on_section("optim"), "; it is called [optimizer] here");
}

TEST(MisspeltKeys, AVeryLongWordIsAnsweredAtOnce) {
  EXPECT_THAT(in_file(std::string(1 << 20, 'x')), Says("none like it"));
}

// Every file of configs/ reads, is valid for training, and divides over two ranks, or over those
// that share its experts.
TEST(ShippedConfigs, AreValidOnAsFewRanksAsTheyAskFor) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(TESSERA_CONFIGS)) {
    if (entry.path().extension() != ".toml") continue;
    SCOPED_TRACE(entry.path().string());
    ++files;
    Config config;
    ASSERT_NO_THROW(config = load_config(entry.path().string()));
    EXPECT_NO_THROW(validate(config, Verb::kTrain));
    const int ranks = std::max(2, config.parallelism.expert_parallel_degree);
    EXPECT_NO_THROW(resolve_batch(config.training,
                                  resolve_parallelism(config.parallelism, ranks).data_ranks()));
  }
  EXPECT_GE(files, 1);
}

// It serves every family, and patterns that match nothing are refused: what decays none of them is
// no decay.
TEST(ShippedConfigs, FinetuningDecaysNothing) {
  const Config config = load_config(std::string(TESSERA_CONFIGS) + "/finetune.toml");
  EXPECT_EQ(config.optimizer.effective_weight_decay(), 0.0);
  EXPECT_LE(*config.optimizer.lr, 5e-5) << "of a whole model that is trained already";
}

}  // namespace
}  // namespace tessera::train::config_keys_test
