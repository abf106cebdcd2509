#include "train/config/config_codec.h"

#include <charconv>

#include "base/text/byte_size.h"
#include "base/text/printable.h"
#include "base/text/wildcard.h"
#include "train/config/config_names.h"

namespace tessera::train {
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

void refuse_unknown(std::string_view context, const std::string& name,
                    const std::vector<std::string>& names) {
  const auto close = close_name(name, names);
  throw Error(ErrorKind::kConfig, concat(context, ": unknown key ", printable(name),
                                         close ? "; the nearest is " + in_quotes(*close)
                                               : ", expected one of " + tessera::joined(names)));
}

DType Codec<DType>::from(const ConfigValue& v, std::string_view key, const Limit&) {
  const DTypeChoice choice = Codec<DTypeChoice>::from(v, key, {});
  TESSERA_CHECK(
      choice.dtype, ErrorKind::kConfig, key,
      ": found \"auto\", expected a dtype; leave the key out of the rule to keep the policy's");
  return *choice.dtype;
}

FrozenRule Codec<FrozenRule>::from(const ConfigValue& v, std::string_view key, const Limit&) {
  const auto* word = std::get_if<std::string>(&v.value);
  if (const bool* flag = std::get_if<bool>(&v.value)) {
    return *flag ? FrozenRule::kYes : FrozenRule::kNo;
  }
  if (word != nullptr && equal_ignoring_case(*word, "shard")) return FrozenRule::kShard;
  if (word != nullptr && equal_ignoring_case(*word, "replicate")) return FrozenRule::kReplicate;
  refuse_value(key, v, "true, false, \"shard\" or \"replicate\"");
}

std::optional<ConfigValue> Codec<FrozenRule>::to(FrozenRule rule) {
  if (rule == FrozenRule::kShard) return ConfigValue{std::string("shard")};
  if (rule == FrozenRule::kReplicate) return ConfigValue{std::string("replicate")};
  return ConfigValue{rule == FrozenRule::kYes};
}

namespace {

const KeyText kMatchText{"", "patterns of parameters' names"};

void check_match(const std::vector<std::string>& match, std::string_view name) {
  TESSERA_CHECK(!match.empty(), ErrorKind::kConfig, name,
                ".match: found no pattern, expected at least one, as in match = [\"*norm\"]");
  for (const std::string& pattern : match) {
    TESSERA_CHECK(!pattern.empty(), ErrorKind::kConfig, name, ".match: found an empty pattern");
  }
}

}  // namespace

const std::vector<TableKey<PrecisionRule>>& ListedTable<PrecisionRule>::keys() {
  using R = PrecisionRule;
  static const std::vector<TableKey<R>> keys = {
      table_key<R>("match", &R::match, kMatchText),
      table_key<R>("param_dtype", &R::param_dtype, {"", "of forward and backward"}),
      table_key<R>("reduce_dtype", &R::reduce_dtype, {"", "of gradients on the wire"}),
      table_key<R>("storage_dtype", &R::storage_dtype, {"", "of what a rank keeps"}),
      table_key<R>("accumulate_dtype", &R::accumulate_dtype, {"", "of sums of gradients"}),
      table_key<R>("grad_dtype", &R::grad_dtype, {"", "of gradients as backward forms them"}),
      table_key<R>("pin", &R::pin,
                   {"", "true computes in float32 at least, false undoes the model's own pin"}),
      table_key<R>("widen", &R::widen, {"", "a pin may widen what is kept, too"}),
      table_key<R>("frozen", &R::frozen, {"", "is not trained, and how it is kept"}),
  };
  return keys;
}

const std::vector<TableKey<OptimizerRule>>& ListedTable<OptimizerRule>::keys() {
  using R = OptimizerRule;
  static const Limit at_least_0{.low = 0, .words = "at least 0"};
  static const std::vector<TableKey<R>> keys = {
      table_key<R>("match", &R::match, kMatchText),
      table_key<R>("lr_scale", &R::lr_scale, {"", "lr is multiplied by it"}, at_least_0),
      table_key<R>("weight_decay", &R::weight_decay, {"", "over no_decay"}, at_least_0),
      table_key<R>("split_fused", &R::split_fused,
                   {"",
                    "false: Muon steps gate and up (or queries, keys and values) of a fused weight "
                    "as one matrix, by default each alone"}),
  };
  return keys;
}

const std::vector<TableKey<DataSource>>& ListedTable<DataSource>::keys() {
  static const std::vector<TableKey<DataSource>> keys = {
      table_key<DataSource>("path", &DataSource::path, {"files", "files as data.path"}),
      table_key<DataSource>("weight", &DataSource::weight,
                            {"", "how often its rows are drawn, by default 1"}),
  };
  return keys;
}

void ListedTable<PrecisionRule>::check(const PrecisionRule& rule, std::string_view name) {
  check_match(rule.match, name);
}

void ListedTable<OptimizerRule>::check(const OptimizerRule& rule, std::string_view name) {
  check_match(rule.match, name);
}

void ListedTable<DataSource>::check(const DataSource& source, std::string_view name) {
  TESSERA_CHECK(!source.path.empty(), ErrorKind::kConfig, name,
                ".path: found nothing, expected the files of this source");
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
