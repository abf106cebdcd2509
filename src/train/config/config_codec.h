// How one C++ type of the configuration reads from and writes to a ConfigValue (used by
// config_keys.cpp).
//
// One Codec a type: its words in --help, the conversion with its error, and the way back.
// Optional<T> is T that may be absent. Next: config_keys.cpp.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/error.h"
#include "train/config/config_keys.h"

namespace tessera::train {

/// Throws kConfig: "key: found X, expected Y".
[[noreturn]] void refuse_value(std::string_view key, const ConfigValue& found,
                               std::string_view expected);

/// A word of digits that are no int64: how such a number comes from the command line.
bool is_too_long_integer(const ConfigValue& value);

bool equal_ignoring_case(std::string_view a, std::string_view b);

/// The condition on a number, and its text.
struct Limit {
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
  bool high_excluded = false;
  std::optional<double> also{};  ///< one more value that is allowed (-1 as "fill in")
  std::string words{};           ///< "at least 1"

  bool allows(double value) const {
    if (also && value == *also) return true;
    if (!std::isfinite(value)) return false;
    return value >= low && (high_excluded ? value < high : value <= high);
  }
};

template <class T>
struct Codec;

template <>
struct Codec<bool> {
  static std::string type() { return "boolean"; }
  static bool from(const ConfigValue& v, std::string_view key, const Limit&) {
    if (const bool* b = std::get_if<bool>(&v.value)) return *b;
    refuse_value(key, v, "true or false");
  }
  static std::optional<ConfigValue> to(bool b) { return ConfigValue{b}; }
};

template <class I>
struct IntegerCodec {
  static std::string type() { return "integer"; }
  static I from(const ConfigValue& v, std::string_view key, const Limit& limit) {
    using Range = std::numeric_limits<I>;
    const std::int64_t* i = std::get_if<std::int64_t>(&v.value);
    if (i == nullptr) {
      refuse_value(
          key, v,
          is_too_long_integer(v) ? integers_from(Range::min(), Range::max()) : "an integer");
    }
    if (!limit.allows(static_cast<double>(*i))) refuse_value(key, v, limit.words);
    if (*i > Range::max() || *i < Range::min()) {
      refuse_value(key, v, integers_from(Range::min(), Range::max()));
    }
    return static_cast<I>(*i);
  }
  static std::optional<ConfigValue> to(I i) { return ConfigValue{static_cast<std::int64_t>(i)}; }
};
template <>
struct Codec<std::int64_t> : IntegerCodec<std::int64_t> {};
template <>
struct Codec<int> : IntegerCodec<int> {};

template <>
struct Codec<double> {
  static std::string type() { return "number"; }
  static double from(const ConfigValue& v, std::string_view key, const Limit& limit) {
    double d = 0;
    if (const double* f = std::get_if<double>(&v.value)) {
      d = *f;
    } else if (const std::int64_t* i = std::get_if<std::int64_t>(&v.value)) {
      d = static_cast<double>(*i);
    } else {
      refuse_value(key, v, "a number");
    }
    const std::string finite = std::isfinite(d) ? "" : "a finite number";
    if (!limit.allows(d)) {
      refuse_value(key, v,
                   concat(finite, finite.empty() || limit.words.empty() ? "" : ", ", limit.words));
    }
    return d;
  }
  static std::optional<ConfigValue> to(double d) { return ConfigValue{d}; }
};

template <>
struct Codec<std::string> {
  static std::string type() { return "string"; }
  static std::string from(const ConfigValue& v, std::string_view key, const Limit&) {
    if (const std::string* s = std::get_if<std::string>(&v.value)) return *s;
    refuse_value(key, v, "a string");
  }
  static std::optional<ConfigValue> to(const std::string& s) { return ConfigValue{s}; }
};

/// A single string is a list of one.
template <>
struct Codec<std::vector<std::string>> {
  static std::string type() { return "list of strings"; }
  static std::vector<std::string> from(const ConfigValue& v, std::string_view key, const Limit&) {
    if (const std::string* s = std::get_if<std::string>(&v.value)) return {*s};
    const ConfigValue::Array* items = std::get_if<ConfigValue::Array>(&v.value);
    if (items == nullptr) refuse_value(key, v, "a string or a list of strings");
    std::vector<std::string> result;
    for (const ConfigValue& item : *items) {
      const std::string* s = std::get_if<std::string>(&item.value);
      if (s == nullptr) refuse_value(key, item, "strings in the list");
      result.push_back(*s);
    }
    return result;
  }
  static std::optional<ConfigValue> to(const std::vector<std::string>& list) {
    ConfigValue::Array items;
    for (const std::string& s : list) items.push_back({s});
    return ConfigValue{std::move(items)};
  }
};

/// A single integer is a list of one.
template <>
struct Codec<std::vector<std::int64_t>> {
  static std::string type() { return "list of integers"; }
  static std::vector<std::int64_t> from(const ConfigValue& v, std::string_view key,
                                        const Limit& limit) {
    const ConfigValue::Array* items = std::get_if<ConfigValue::Array>(&v.value);
    if (items == nullptr) return {Codec<std::int64_t>::from(v, key, limit)};
    std::vector<std::int64_t> result;
    for (const ConfigValue& item : *items) {
      result.push_back(Codec<std::int64_t>::from(item, key, limit));
    }
    return result;
  }
  static std::optional<ConfigValue> to(const std::vector<std::int64_t>& list) {
    ConfigValue::Array items;
    for (const std::int64_t i : list) items.push_back({i});
    return ConfigValue{std::move(items)};
  }
};

template <std::size_t N>
struct Codec<std::array<double, N>> {
  static std::string type() { return concat("list of ", N, " numbers"); }
  static std::array<double, N> from(const ConfigValue& v, std::string_view key,
                                    const Limit& limit) {
    const ConfigValue::Array* items = std::get_if<ConfigValue::Array>(&v.value);
    if (items == nullptr || items->size() != N) refuse_value(key, v, "a " + type());
    std::array<double, N> numbers{};
    for (std::size_t i = 0; i < N; ++i) numbers[i] = Codec<double>::from((*items)[i], key, limit);
    return numbers;
  }
  static std::optional<ConfigValue> to(const std::array<double, N>& numbers) {
    ConfigValue::Array items;
    for (const double each : numbers) items.push_back({each});
    return ConfigValue{std::move(items)};
  }
};

template <HasWords E>
struct Codec<E> {
  static std::string type() {
    std::string text;
    for (const auto& [word, value] : words_of(E{})) {
      if (!text.empty()) text += " | ";
      text += word;
    }
    return text;
  }
  static E from(const ConfigValue& v, std::string_view key, const Limit&) {
    const std::string* s = std::get_if<std::string>(&v.value);
    for (const auto& [word, value] : words_of(E{})) {
      if (s != nullptr && equal_ignoring_case(*s, word)) return value;
    }
    refuse_value(key, v, "one of " + type());
  }
  static std::optional<ConfigValue> to(E e) { return ConfigValue{std::string(word_of(e))}; }
};

template <class T>
struct Codec<std::optional<T>> {
  static std::string type() { return Codec<T>::type(); }
  static std::optional<T> from(const ConfigValue& v, std::string_view key, const Limit& limit) {
    return Codec<T>::from(v, key, limit);
  }
  static std::optional<ConfigValue> to(const std::optional<T>& value) {
    return value ? Codec<T>::to(*value) : std::nullopt;
  }
};

/// float32 bfloat16 float16 auto.
template <>
struct Codec<DTypeChoice> {
  static std::string type() { return "float32 | bfloat16 | float16 | auto"; }
  static DTypeChoice from(const ConfigValue& v, std::string_view key, const Limit&);
  static std::optional<ConfigValue> to(const DTypeChoice& choice);
};

/// Bytes, or "90%".
template <>
struct Codec<MemoryBudget> {
  static std::string type() { return "integer or share"; }
  static MemoryBudget from(const ConfigValue& v, std::string_view key, const Limit&);
  static std::optional<ConfigValue> to(const MemoryBudget& budget);
};

/// A dtype of a rule, which has no "auto": a key that is left out means the policy's.
template <>
struct Codec<DType> {
  static std::string type() { return "dtype"; }
  static DType from(const ConfigValue& v, std::string_view key, const Limit&);
  static std::optional<ConfigValue> to(DType dtype) {
    return ConfigValue{std::string(to_string(dtype))};
  }
};

/// true, false, or how it is kept.
template <>
struct Codec<FrozenRule> {
  static std::string type() { return "boolean | shard | replicate"; }
  static FrozenRule from(const ConfigValue& v, std::string_view key, const Limit&);
  static std::optional<ConfigValue> to(FrozenRule rule);
};

// ------------------------------------------------------------------------------------------ tables

struct KeyText {
  std::string unit;
  std::string help;
  std::string no_default = "";  ///< shown where a new table has no value
};

/// A key of S, the struct of a section of the file or of a table in a list.
template <class S>
struct TableKey {
  std::string name;
  std::string type;
  KeyText text;
  /// `full_name` is for messages.
  std::function<void(S&, const ConfigValue&, std::string_view full_name)> set;
  std::function<std::optional<ConfigValue>(const S&)> get;
};

/// The member may be that of a base.
template <class S, class T, class C>
TableKey<S> table_key(std::string name, T C::* member, KeyText text, Limit limit = {}) {
  return {std::move(name), Codec<T>::type(), std::move(text),
          [member, limit = std::move(limit)](S& table, const ConfigValue& value,
                                             std::string_view full_name) {
            table.*member = Codec<T>::from(value, full_name, limit);
          },
          [member](const S& table) { return Codec<T>::to(table.*member); }};
}

/// Describes a struct that lists of tables hold, written [[section.key]].
template <class S>
struct ListedTable;
template <>
struct ListedTable<PrecisionRule> {
  static const std::vector<TableKey<PrecisionRule>>& keys();
  static constexpr std::string_view kExpected = "a table with `match` and what is to differ";
  static void check(const PrecisionRule& rule, std::string_view name);
};
template <>
struct ListedTable<OptimizerRule> {
  static const std::vector<TableKey<OptimizerRule>>& keys();
  static constexpr std::string_view kExpected = ListedTable<PrecisionRule>::kExpected;
  static void check(const OptimizerRule& rule, std::string_view name);
};
template <>
struct ListedTable<DataSource> {
  static const std::vector<TableKey<DataSource>>& keys();
  static constexpr std::string_view kExpected = "a table with `path` and `weight`";
  static void check(const DataSource& source, std::string_view name);
};

[[noreturn]] void refuse_unknown(std::string_view context, const std::string& name,
                                 const std::vector<std::string>& names);

template <class S>
  requires requires { ListedTable<S>::keys(); }
struct Codec<std::vector<S>> {
  static std::string type() { return "list of tables"; }
  /// Describes each key, separated by "; ".
  static std::string help() {
    std::string text;
    for (const auto& key : ListedTable<S>::keys()) {
      text += concat(text.empty() ? "" : "; ", key.name, " (", key.type, "): ", key.text.help);
    }
    return text;
  }

  static std::vector<S> from(const ConfigValue& v, std::string_view key, const Limit&) {
    const auto* items = std::get_if<ConfigValue::Array>(&v.value);
    if (items == nullptr) refuse_value(key, v, concat("a list of tables, written [[", key, "]]"));
    std::vector<S> tables;
    for (const ConfigValue& item : *items) {
      tables.push_back(read(item, concat(key, "[", tables.size() + 1, "]")));
    }
    return tables;
  }
  static std::optional<ConfigValue> to(const std::vector<S>& tables) {
    ConfigValue::Array items;
    for (const S& one : tables) {
      ConfigValue::Table table;
      for (const auto& key : ListedTable<S>::keys()) {
        if (auto value = key.get(one)) table.push_back({key.name, *std::move(value)});
      }
      items.push_back({std::move(table)});
    }
    return ConfigValue{std::move(items)};
  }

 private:
  static S read(const ConfigValue& value, const std::string& context) {
    const auto* table = std::get_if<ConfigValue::Table>(&value.value);
    if (table == nullptr) refuse_value(context, value, ListedTable<S>::kExpected);
    const auto& keys = ListedTable<S>::keys();
    S made;
    for (const auto& [name, item, at] : *table) {
      const auto key = std::ranges::find(keys, name, &TableKey<S>::name);
      if (key == keys.end()) {
        std::vector<std::string> names;
        for (const auto& one : keys) names.push_back(one.name);
        refuse_unknown(context, name, names);
      }
      key->set(made, item, concat(context, ".", name));
    }
    ListedTable<S>::check(made, context);
    return made;
  }
};

}  // namespace tessera::train
