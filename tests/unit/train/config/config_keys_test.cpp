#include "train/config/config_keys.h"

#include <gmock/gmock.h>

#include <set>

#include "base/text/fields.h"
#include "train/config/config_codec.h"
#include "unit/train/config/config_fixture.h"

namespace tessera::train::config_keys_test {
namespace {

using ::testing::HasSubstr;

TEST(ConfigKeys, NamesAreUniqueAndDescribed) {
  std::set<std::string> names;
  for (const ConfigKey& key : config_keys()) {
    EXPECT_TRUE(names.insert(key.full_name()).second) << key.full_name();
    EXPECT_FALSE(key.help.empty()) << key.full_name();
    EXPECT_FALSE(key.type.empty()) << key.full_name();
    EXPECT_FALSE(key.default_text.empty()) << key.full_name();
  }
  EXPECT_EQ(names.size(),
            100u);  // rows of the interface's table: adding a key changes this on purpose
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
    EXPECT_THAT(help, HasSubstr("  " + key.full_name() + "  " + key.type)) << help;
    EXPECT_THAT(help, HasSubstr(key.default_text + "\n"));
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
    EXPECT_THAT(of_list->help, HasSubstr(key.name + " (" + key.type + "): " + key.text.help));
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

}  // namespace
}  // namespace tessera::train::config_keys_test
