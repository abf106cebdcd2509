#include "check/machine.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>
#include <variant>

#include "base/text/byte_size.h"
#include "base/text/printable.h"
#include "base/text/toml_reader.h"
#include "base/text/wildcard.h"
#include "tessera/error.h"

namespace tessera::check {
namespace {

// NVIDIA's data sheets of the SXM boards: dense products on tensor cores in bfloat16 and products
// in float32 outside of them; NVLink's 900 GB/s are both directions together. A port of 400 Gb/s
// for each GPU is that of DGX H100 and H200. None says how long a message takes.
const std::array<Machine, 2>& shipped() {
  constexpr ProductFlops kHopper{.bfloat16 = 989e12, .float32 = 67e12};
  static const std::array<Machine, 2> machines{Machine{.name = "h100",
                                                       .source = MachineSource::kPublished,
                                                       .memory = 80'000'000'000,
                                                       .memory_bandwidth = 3.35e12,
                                                       .ranks_per_host = 8,
                                                       .bandwidth = 450e9,
                                                       .host_bandwidth = 50e9,
                                                       .latency = {},
                                                       .flops = kHopper},
                                               Machine{.name = "h200",
                                                       .source = MachineSource::kPublished,
                                                       .memory = 141'000'000'000,
                                                       .memory_bandwidth = 4.8e12,
                                                       .ranks_per_host = 8,
                                                       .bandwidth = 450e9,
                                                       .host_bandwidth = 50e9,
                                                       .latency = {},
                                                       .flops = kHopper}};
  return machines;
}

// --------------------------------------------------------------------------------------- reading

class Reader {
 public:
  explicit Reader(std::string_view source) : source_(source) {}

  template <class T>
  T read(const TomlValue::Table& table, const std::string& prefix = {}) const {
    T made;
    const auto keys = keys_of<T>();
    for (const TomlEntry& entry : table) {
      if (std::ranges::find(keys, entry.name) == keys.end()) refuse_unknown(entry, prefix, keys);
    }
    each_field<T>([&](const Field& field, auto member, const auto& range) {
      const auto entry = std::ranges::find(table, field.key, &TomlEntry::name);
      const std::string key = concat(prefix, field.key);
      if (entry != table.end()) return take(made.*member, entry->value, key, range);
      TESSERA_CHECK(field.missing != Missing::kNever, ErrorKind::kConfig, source_, ": found no ",
                    key, ", expected it");
    });
    return made;
  }

 private:
  [[noreturn]] void refuse_unknown(const TomlEntry& entry, const std::string& prefix,
                                   const std::vector<std::string_view>& keys) const {
    const auto close = close_name(entry.name, {keys.begin(), keys.end()});
    throw Error(
        ErrorKind::kConfig,
        concat(place_text(source_, entry.at), "unknown key ", printable(concat(prefix, entry.name)),
               close ? concat("; the nearest is ", in_quotes(concat(prefix, *close)))
                     : concat(", expected one of ", joined(keys))));
  }
  [[noreturn]] void refuse(const TomlValue& value, const std::string& key,
                           const std::string& expected) const {
    const bool is_list = std::holds_alternative<TomlValue::Array>(value.value);
    const bool is_table = std::holds_alternative<TomlValue::Table>(value.value);
    const std::string found = is_list ? "an array" : is_table ? "a table" : described(value);
    throw Error(ErrorKind::kConfig, concat(place_text(source_, value.at), key, ": found ", found,
                                           ", expected ", expected));
  }
  /// Texts may hold what no message shows.
  static std::string described(const TomlValue& value) {
    const auto* text = std::get_if<std::string>(&value.value);
    return text == nullptr ? describe(value) : printable(*text);
  }
  static std::optional<double> number(const TomlValue& value) {
    if (const auto* found = std::get_if<double>(&value.value)) return *found;
    const auto* whole = std::get_if<std::int64_t>(&value.value);
    return whole == nullptr ? std::nullopt : std::optional(static_cast<double>(*whole));
  }

  template <class M, class Range>
  void take(std::optional<M>& to, const TomlValue& value, const std::string& key,
            const Range& range) const {
    take(to.emplace(), value, key, range);
  }
  template <HasFields M>
  void take(M& to, const TomlValue& value, const std::string& key, AnyValue) const {
    const auto* table = std::get_if<TomlValue::Table>(&value.value);
    if (table == nullptr) refuse(value, key, concat("a section [", key, "]"));
    to = read<M>(*table, key + ".");
  }
  void take(std::string& to, const TomlValue& value, const std::string& key,
            const TextLimit& limit) const {
    const auto* text = std::get_if<std::string>(&value.value);
    const auto shows = [](char c) { return c >= 0x20 && c < 0x7f; };
    if (text == nullptr || text->empty() || text->size() > limit.most_bytes ||
        !std::ranges::all_of(*text, shows)) {
      refuse(value, key, concat("a printable text of at most ", limit.most_bytes, " bytes"));
    }
    to = *text;
  }
  template <HasWords M>
  void take(M& to, const TomlValue& value, const std::string& key, AnyValue) const {
    const auto* text = std::get_if<std::string>(&value.value);
    const auto found = text == nullptr ? std::nullopt : from_word<M>(*text);
    if (!found) {
      std::vector<std::string_view> words;
      for (const auto& one : words_of(M{})) words.push_back(one.word);
      refuse(value, key, concat("one of ", joined(words)));
    }
    to = *found;
  }
  void take(int& to, const TomlValue& value, const std::string& key, const IntRange& range) const {
    const auto* found = std::get_if<std::int64_t>(&value.value);
    if (found == nullptr || *found < range.min || *found > range.max) {
      refuse(value, key, integers_from(range.min, range.max));
    }
    to = static_cast<int>(*found);
  }
  void take(double& to, const TomlValue& value, const std::string& key,
            const NumberRange& range) const {
    const auto found = number(value);
    if (!found || !(*found >= range.min && *found <= range.max)) {
      refuse(value, key, concat("a number from ", range.min, " to ", range.max));
    }
    to = *found;
  }
  void take(double& to, const TomlValue& value, const std::string& key, const Bytes& range) const {
    to = amount(value, key, range, "a second, as \"50GB/s\"");
  }
  void take(std::int64_t& to, const TomlValue& value, const std::string& key,
            const Bytes& range) const {
    to = std::llround(amount(value, key, range, "as \"80GiB\""));
  }
  double amount(const TomlValue& value, const std::string& key, const Bytes& range,
                std::string_view how) const {
    auto found = number(value);
    if (const auto* text = std::get_if<std::string>(&value.value)) {
      std::string_view size = *text;
      if (how.starts_with("a second") && size.ends_with("/s")) size.remove_suffix(2);
      // Gb are a eighth of GB.
      if (!size.ends_with('b')) found = byte_amount(size);
    }
    if (!found || !(*found >= range.min && *found <= range.max)) {
      refuse(value, key,
             concat("from ", amount_text(range.min), " to ", amount_text(range.max), " ", how,
                    "; a number alone is bytes"));
    }
    return *found;
  }

  std::string_view source_;
};

// --------------------------------------------------------------------------------------- writing

std::string text_of(const std::string& value, const TextLimit&) {
  return to_toml(TomlValue{value});
}
template <HasWords M>
std::string text_of(M value, AnyValue) {
  return to_toml(TomlValue{std::string(word_of(value))});
}
std::string text_of(int value, const IntRange&) { return std::to_string(value); }
std::string text_of(double value, const NumberRange&) { return to_toml(TomlValue{value}); }
std::string text_of(double value, const Bytes&) {
  return to_toml(TomlValue{amount_text(value) + "/s"});
}
std::string text_of(std::int64_t value, const Bytes&) {
  return to_toml(TomlValue{amount_text(static_cast<double>(value))});
}

/// Those of a section stand behind it: it is the last of its table.
template <class T>
void write(std::string& out, const T& value) {
  each_field<T>([&]<class M, class C>(const Field& field, M C::* member, const auto& range) {
    const auto line = [&](const auto& known) {
      if constexpr (HasFields<std::remove_cvref_t<decltype(known)>>) {
        out += concat("\n[", field.key, "]\n");
        write(out, known);
      } else {
        out += concat(field.key, " = ", text_of(known, range), "\n");
      }
    };
    if constexpr (detail::kIsOptional<M>) {
      if (value.*member) line(*(value.*member));
    } else {
      line(value.*member);
    }
  });
}

}  // namespace

double ProductFlops::of(DType dtype) const {
  return dtype == DType::kBFloat16 || dtype == DType::kFloat16 ? bfloat16 : float32;
}

std::optional<Machine> shipped_machine(std::string_view name) {
  const auto found = std::ranges::find(shipped(), name, &Machine::name);
  return found == shipped().end() ? std::nullopt : std::optional(*found);
}

std::vector<std::string> shipped_machines() {
  std::vector<std::string> names;
  for (const Machine& machine : shipped()) names.push_back(machine.name);
  return names;
}

std::string to_toml(const Machine& machine, const std::vector<std::string>& comments) {
  std::string text;
  for (const std::string& comment : comments) text += concat("# ", comment, "\n");
  write(text, machine);
  return text;
}

Machine parse_machine(std::string_view text, std::string_view source) {
  TESSERA_CHECK(std::cmp_less_equal(text.size(), kMostMachineBytes), ErrorKind::kConfig, source,
                ": found ", text.size(), " bytes, expected a machine, of at most ",
                kMostMachineBytes);
  return Reader(source).read<Machine>(parse_toml(text, source));
}

}  // namespace tessera::check
