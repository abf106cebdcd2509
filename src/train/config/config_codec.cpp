#include "train/config/config_codec.h"

#include <charconv>

#include "base/text/byte_size.h"
#include "base/text/printable.h"
#include "base/text/wildcard.h"
#include "train/config/config_names.h"

namespace tessera::train {
namespace {

using Table = ConfigValue::Table;

std::optional<DType> rule_dtype(const ConfigValue& v, std::string_view key) {
  const DTypeChoice choice = Codec<DTypeChoice>::from(v, key, {});
  TESSERA_CHECK(
      choice.dtype, ErrorKind::kConfig, key,
      ": found \"auto\", expected a dtype; leave the key out of the rule to keep the policy's");
  return choice.dtype;
}

// One key of a rule: how it is read into the rule and written from it.
template <class Rule>
struct RuleKey {
  std::string name;
  std::function<void(Rule&, const ConfigValue&, std::string_view)> set;
  std::function<std::optional<ConfigValue>(const Rule&)> get;
};

RuleKey<PrecisionRule> dtype_key(std::string name, std::optional<DType> PrecisionRule::* member) {
  return {std::move(name),
          [member](PrecisionRule& rule, const ConfigValue& v, std::string_view key) {
            rule.*member = rule_dtype(v, key);
          },
          [member](const PrecisionRule& rule) -> std::optional<ConfigValue> {
            if (!(rule.*member)) return std::nullopt;
            return ConfigValue{std::string(to_string(*(rule.*member)))};
          }};
}

RuleKey<PrecisionRule> flag_key(std::string name, std::optional<bool> PrecisionRule::* member) {
  return {
      std::move(name),
      [member](PrecisionRule& rule, const ConfigValue& v, std::string_view key) {
        rule.*member = Codec<bool>::from(v, key, {});
      },
      [member](const PrecisionRule& rule) { return Codec<std::optional<bool>>::to(rule.*member); }};
}

/// true, false, or how it is kept.
RuleKey<PrecisionRule> frozen_key() {
  return {"frozen",
          [](PrecisionRule& rule, const ConfigValue& v, std::string_view key) {
            const std::string* word = std::get_if<std::string>(&v.value);
            if (const bool* flag = std::get_if<bool>(&v.value)) {
              rule.frozen = *flag ? FrozenRule::kYes : FrozenRule::kNo;
            } else if (word != nullptr && equal_ignoring_case(*word, "shard")) {
              rule.frozen = FrozenRule::kShard;
            } else if (word != nullptr && equal_ignoring_case(*word, "replicate")) {
              rule.frozen = FrozenRule::kReplicate;
            } else {
              refuse_value(key, v, "true, false, \"shard\" or \"replicate\"");
            }
          },
          [](const PrecisionRule& rule) -> std::optional<ConfigValue> {
            if (!rule.frozen) return std::nullopt;
            if (*rule.frozen == FrozenRule::kShard) return ConfigValue{std::string("shard")};
            if (*rule.frozen == FrozenRule::kReplicate) {
              return ConfigValue{std::string("replicate")};
            }
            return ConfigValue{*rule.frozen == FrozenRule::kYes};
          }};
}

/// At least 0.
RuleKey<OptimizerRule> number_key(std::string name, std::optional<double> OptimizerRule::* member) {
  return {std::move(name),
          [member](OptimizerRule& rule, const ConfigValue& v, std::string_view key) {
            rule.*member = Codec<double>::from(v, key, {.low = 0, .words = "at least 0"});
          },
          [member](const OptimizerRule& rule) {
            return Codec<std::optional<double>>::to(rule.*member);
          }};
}

template <class Rule>
RuleKey<Rule> match_key() {
  return {"match",
          [](Rule& rule, const ConfigValue& v, std::string_view key) {
            rule.match = Codec<std::vector<std::string>>::from(v, key, {});
          },
          [](const Rule& rule) { return Codec<std::vector<std::string>>::to(rule.match); }};
}

template <class Rule>
const std::vector<RuleKey<Rule>>& rule_keys();
template <>
const std::vector<RuleKey<PrecisionRule>>& rule_keys<PrecisionRule>() {
  static const std::vector<RuleKey<PrecisionRule>> keys = {
      match_key<PrecisionRule>(),
      dtype_key("param_dtype", &PrecisionRule::param_dtype),
      dtype_key("reduce_dtype", &PrecisionRule::reduce_dtype),
      dtype_key("storage_dtype", &PrecisionRule::storage_dtype),
      dtype_key("accumulate_dtype", &PrecisionRule::accumulate_dtype),
      dtype_key("grad_dtype", &PrecisionRule::grad_dtype),
      flag_key("pin", &PrecisionRule::pin),
      flag_key("widen", &PrecisionRule::widen),
      frozen_key(),
  };
  return keys;
}
template <>
const std::vector<RuleKey<OptimizerRule>>& rule_keys<OptimizerRule>() {
  static const std::vector<RuleKey<OptimizerRule>> keys = {
      match_key<OptimizerRule>(),
      number_key("lr_scale", &OptimizerRule::lr_scale),
      number_key("weight_decay", &OptimizerRule::weight_decay),
      {"split_fused",
       [](OptimizerRule& rule, const ConfigValue& v, std::string_view key) {
         rule.split_fused = Codec<bool>::from(v, key, {});
       },
       [](const OptimizerRule& rule) { return Codec<std::optional<bool>>::to(rule.split_fused); }},
  };
  return keys;
}

[[noreturn]] void refuse_unknown(const std::string& context, const std::string& name,
                                 const std::vector<std::string>& names) {
  const auto close = close_name(name, names);
  throw Error(ErrorKind::kConfig, concat(context, ": unknown key ", printable(name),
                                         close ? "; the nearest is " + in_quotes(*close)
                                               : ", expected one of " + tessera::joined(names)));
}

template <class Rule>
void set_rule_key(Rule& rule, const std::string& context, const std::string& name,
                  const ConfigValue& value) {
  std::vector<std::string> names;
  for (const RuleKey<Rule>& key : rule_keys<Rule>()) {
    if (key.name == name) return key.set(rule, value, context + "." + name);
    names.push_back(key.name);
  }
  refuse_unknown(context, name, names);
}

template <class Rule>
Rule read_rule(const ConfigValue& value, const std::string& context) {
  const Table* table = std::get_if<Table>(&value.value);
  if (table == nullptr) refuse_value(context, value, "a table with `match` and what is to differ");
  Rule rule;
  for (const auto& [name, item] : *table) set_rule_key(rule, context, name, item);
  TESSERA_CHECK(!rule.match.empty(), ErrorKind::kConfig, context,
                ".match: found no pattern, expected at least one, as in match = [\"*norm\"]");
  for (const std::string& pattern : rule.match) {
    TESSERA_CHECK(!pattern.empty(), ErrorKind::kConfig, context, ".match: found an empty pattern");
  }
  return rule;
}

}  // namespace

void refuse_value(std::string_view key, const ConfigValue& found, std::string_view expected) {
  throw Error(ErrorKind::kConfig,
              concat(key, ": found ", describe(found), ", expected ", expected));
}

bool is_too_long_integer(const ConfigValue& value) {
  const auto* word = std::get_if<std::string>(&value.value);
  if (word == nullptr) return false;
  const auto* const end = word->data() + word->size();
  std::int64_t parsed = 0;
  const auto found = std::from_chars(word->data() + word->starts_with('+'), end, parsed);
  return found.ec == std::errc::result_out_of_range && found.ptr == end;
}

std::string integers_from(std::int64_t low, std::int64_t high) {
  return concat("an integer from ", low, " to ", high);
}

template <class Rule>
std::vector<Rule> RuleCodec<Rule>::from(const ConfigValue& v, std::string_view key, const Limit&) {
  const ConfigValue::Array* items = std::get_if<ConfigValue::Array>(&v.value);
  if (items == nullptr) refuse_value(key, v, concat("a list of tables, written [[", key, "]]"));
  std::vector<Rule> rules;
  for (const ConfigValue& item : *items) {
    rules.push_back(read_rule<Rule>(item, concat(key, "[", rules.size() + 1, "]")));
  }
  return rules;
}

template <class Rule>
std::optional<ConfigValue> RuleCodec<Rule>::to(const std::vector<Rule>& rules) {
  ConfigValue::Array items;
  for (const Rule& rule : rules) {
    Table table;
    for (const RuleKey<Rule>& key : rule_keys<Rule>()) {
      if (std::optional<ConfigValue> value = key.get(rule)) table.push_back({key.name, *value});
    }
    items.push_back({std::move(table)});
  }
  return ConfigValue{std::move(items)};
}

template struct RuleCodec<PrecisionRule>;
template struct RuleCodec<OptimizerRule>;

namespace {

DataSource read_source(const ConfigValue& value, const std::string& context) {
  const Table* table = std::get_if<Table>(&value.value);
  if (table == nullptr) refuse_value(context, value, "a table with `path` and `weight`");
  DataSource source;
  for (const auto& [name, item] : *table) {
    const std::string key = context + "." + name;
    if (name == "path") {
      source.path = Codec<std::vector<std::string>>::from(item, key, {});
    } else if (name == "weight") {
      source.weight = Codec<double>::from(item, key, {});
    } else {
      refuse_unknown(context, name, {"path", "weight"});
    }
  }
  TESSERA_CHECK(!source.path.empty(), ErrorKind::kConfig, context,
                ".path: found nothing, expected the files of this source");
  return source;
}

}  // namespace

std::vector<DataSource> Codec<std::vector<DataSource>>::from(const ConfigValue& v,
                                                             std::string_view key, const Limit&) {
  const ConfigValue::Array* items = std::get_if<ConfigValue::Array>(&v.value);
  if (items == nullptr) refuse_value(key, v, "a list of tables, written [[data.source]]");
  std::vector<DataSource> sources;
  for (const ConfigValue& item : *items) {
    sources.push_back(read_source(item, concat(key, "[", sources.size() + 1, "]")));
  }
  return sources;
}

std::optional<ConfigValue> Codec<std::vector<DataSource>>::to(
    const std::vector<DataSource>& sources) {
  ConfigValue::Array items;
  for (const DataSource& source : sources) {
    items.push_back({Table{{"path", *Codec<std::vector<std::string>>::to(source.path)},
                           {"weight", ConfigValue{source.weight}}}});
  }
  return ConfigValue{std::move(items)};
}

DTypeChoice Codec<DTypeChoice>::from(const ConfigValue& v, std::string_view key, const Limit&) {
  if (const std::string* word = std::get_if<std::string>(&v.value)) {
    if (equal_ignoring_case(*word, "auto")) return {};
    for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      if (equal_ignoring_case(*word, to_string(dtype))) return {dtype};
    }
  }
  refuse_value(key, v, "one of " + type());
}

std::optional<ConfigValue> Codec<DTypeChoice>::to(const DTypeChoice& choice) {
  return ConfigValue{choice.dtype ? std::string(to_string(*choice.dtype)) : std::string("auto")};
}

MemoryBudget Codec<MemoryBudget>::from(const ConfigValue& v, std::string_view key, const Limit&) {
  constexpr std::string_view kExpected =
      "bytes, at least 1, or a share as \"90%\", up to 100%; bytes may have a unit, as \"80GB\" or "
      "\"72GiB\"";
  if (const auto* bytes = std::get_if<std::int64_t>(&v.value); bytes != nullptr && *bytes >= 1) {
    return {.bytes = *bytes};
  }
  const auto* text = std::get_if<std::string>(&v.value);
  if (text == nullptr) refuse_value(key, v, kExpected);
  if (const auto bytes = byte_size(*text)) return {.bytes = *bytes};
  if (!text->ends_with('%')) refuse_value(key, v, kExpected);
  double percent = 0.0;
  const char* end = text->data() + text->size() - 1;
  const auto [rest, failed] = std::from_chars(text->data(), end, percent);
  if (failed != std::errc{} || rest != end || !(percent > 0.0 && percent <= 100.0)) {
    refuse_value(key, v, kExpected);
  }
  return {.share = percent / 100.0};
}

std::optional<ConfigValue> Codec<MemoryBudget>::to(const MemoryBudget& budget) {
  if (budget.share == 0.0) return ConfigValue{budget.bytes};
  return ConfigValue{concat(budget.share * 100.0, "%")};
}

}  // namespace tessera::train
