// What is read off the modules is what the tables and the roles of names say.
#include "models/description.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "models/model_layout.h"
#include "models/parameter_table.h"
#include "tessera/error.h"

namespace tessera::models::description_test {
namespace {

namespace fs = std::filesystem;

ModelSpec spec_at(const fs::path& file) {
  std::stringstream text;
  text << std::ifstream(file).rdbuf();
  return parse_spec(text.str(),
                    {.unknown_keys = UnknownKeys::kRefuse, .purpose = Purpose::kInference})
      .spec;
}

std::vector<fs::path> config_files() {
  std::vector<fs::path> files;
  for (const char* root : {TESSERA_TEST_DATA, TESSERA_CONFIGS}) {
    for (const auto& entry : fs::recursive_directory_iterator(root)) {
      if (entry.path().filename() != "config.json" ||
          entry.path().parent_path().filename() == "checkpoint-version-1") {  // of no model
        continue;
      }
      files.push_back(entry.path());
    }
  }
  std::ranges::sort(files);
  return files;
}

std::vector<ModelSpec> variants(const ModelSpec& spec) {
  if (spec.num_hidden_layers > 8) return {spec};  // of thousands of rows once is enough
  std::vector<ModelSpec> all(4, spec);
  all[1].tie_word_embeddings = !spec.tie_word_embeddings;
  all[2].attention_bias = !spec.attention_bias;
  all[3].mlp_bias = spec.family == Family::kLlama;
  all[3].num_key_value_heads = spec.gemma4 ? spec.num_key_value_heads : 1;
  return all;
}

std::vector<ModelDegrees> all_degrees(const ModelSpec& spec) {
  std::vector<ModelDegrees> all;
  const bool is_large = spec.num_hidden_layers > 8;
  for (const int tp : is_large ? std::vector{2} : std::vector{1, 2, 4, 8}) {
    for (const int ep : is_large ? std::vector{1, 2} : std::vector{1, 2, 4}) {
      for (const int etp : {1, tp}) {
        for (const auto sequence : {SequenceParallel::kYes, SequenceParallel::kNo}) {
          const ModelDegrees degrees{.tp = tp, .ep = ep, .etp = etp, .sequence = sequence};
          try {
            check_degrees(spec, degrees);
          } catch (const Error&) {
            continue;
          }
          all.push_back(degrees);
        }
      }
    }
  }
  return all;
}

ModelDescription by_tables(const ModelSpec& spec, const LoraSpec& lora,
                           const ModelDegrees& degrees) {
  ModelDescription tables{parameter_table(spec, lora), buffer_table(spec), sharding_units(spec)};
  for (ParameterSpec& row : tables.parameters) {
    if (!std::ranges::count(tables.units, row.unit)) row.unit.clear();
    row.layout = layout_of(spec, row, degrees);
  }
  return tables;
}

TEST(Description, OfModulesIsThatOfTheTables) {
  int compared = 0;
  for (const fs::path& file : config_files()) {
    for (const ModelSpec& spec : variants(spec_at(file))) {
      const LoraSpec all =
          plan_lora(spec, {.rank = 2, .alpha = 4.0, .targets = adaptable_layers(spec)});
      for (const LoraSpec& lora : {LoraSpec(), all}) {
        for (const ModelDegrees& degrees : all_degrees(spec)) {
          const ModelDescription tables = by_tables(spec, lora, degrees);
          const ModelDescription modules = describe(spec, lora, degrees);
          ++compared;
          ASSERT_EQ(modules.units, tables.units) << file;
          EXPECT_TRUE(modules.buffers == tables.buffers) << file;
          ASSERT_EQ(modules.parameters.size(), tables.parameters.size()) << file;
          for (std::size_t i = 0; i < modules.parameters.size(); ++i) {
            const ParameterSpec& found = modules.parameters[i];
            const ParameterSpec& expected = tables.parameters[i];
            ASSERT_EQ(found.name, expected.name) << file;
            ASSERT_EQ(found.shape, expected.shape) << file << found.name;
            ASSERT_EQ(found.init, expected.init) << file << found.name;
            ASSERT_EQ(found.init_std, expected.init_std) << file << found.name;
            ASSERT_EQ(found.decay, expected.decay) << file << found.name;
            ASSERT_EQ(found.tied_to, expected.tied_to) << file << found.name;
            ASSERT_EQ(found.stacked, expected.stacked) << file << found.name;
            ASSERT_EQ(found.stacked_shape, expected.stacked_shape) << file << found.name;
            ASSERT_EQ(found.unit, expected.unit) << file << found.name;
            ASSERT_EQ(to_string(found.layout), to_string(expected.layout))
                << file << " tp " << degrees.tp << " ep " << degrees.ep << " etp " << degrees.etp;
            ASSERT_TRUE(found == expected) << file << found.name;
          }
        }
      }
    }
  }
  EXPECT_GT(compared, 500);
  std::cout << compared << " compared\n";
}

}  // namespace
}  // namespace tessera::models::description_test
