// Structs that list their fields (fields.h) as JSON: written in the order of the fields, and read
// from untrusted text, each value within its range.
//
// `Rules` may have json(write, value, range) and read(read, value, at, range), which replace the
// default for values of their types, and check(at, value), which is called after a whole struct was
// read. Include this in .cpp files only, as json_reader.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/text/fields.h"
#include "base/text/json_reader.h"
#include "base/text/printable.h"
#include "tessera/dtype.h"

namespace tessera {

inline std::optional<DType> from_text(Of<DType>, std::string_view text) {
  return parse_dtype(text);
}
constexpr std::string_view expected_text(Of<DType>) { return "the name of a dtype"; }

namespace detail {

/// Errors: those of the cursor, for a key that is none of these.
void require_only(const JsonCursor& at, std::span<const std::string_view> keys);
void require_list(const JsonCursor& at, std::int64_t most, std::string_view of);
[[noreturn]] void refuse_word(const JsonCursor& at, std::span<const std::string_view> words);
const std::string& text_within(const JsonCursor& at, const TextLimit& limit);

template <class Words>
std::vector<std::string_view> as_list(const Words& words) {
  std::vector<std::string_view> list;
  for (const auto& one : words) list.push_back(one.word);
  return list;
}

template <class Range>
constexpr auto item_range(const Range& range) {
  if constexpr (requires { range.item; }) {
    return range.item;
  } else {
    return AnyValue{};
  }
}

}  // namespace detail

// ----------------------------------------------------------------------------------------- writing

template <class Rules>
class JsonWriter {
 public:
  using Json = nlohmann::ordered_json;
  explicit JsonWriter(const Rules& rules) : rules_(rules) {}

  template <class T, class Range = AnyValue>
  Json operator()(const T& value, const Range& range = {}) const {
    if constexpr (requires { rules_.json(*this, value, range); }) {
      return rules_.json(*this, value, range);
    } else if constexpr (HasFields<T>) {
      Json json = Json::object();
      add(json, value);
      return json;
    } else if constexpr (HasRow<T>) {
      Json json = Json::array();
      each_field<T>([&](const Field&, auto member, const auto& of_member) {
        json.push_back((*this)(value.*member, of_member));
      });
      return json;
    } else {
      return plain(value, range);
    }
  }

  /// Appends the fields of a struct to an object.
  template <class T>
  void add(Json& json, const T& value) const {
    each_field<T>([&]<class M, class C>(const Field& field, M C::* member, const auto& range) {
      const M& of = value.*member;
      if constexpr (HasFields<M>) {
        if (field.key.empty()) return this->add(json, of);
      }
      const bool is_left_out = field.missing == Missing::kLeftOut && of == M{};
      if (is_left_out || field.missing == Missing::kNotInFile) return;
      json[std::string(field.key)] = (*this)(of, range);
    });
  }

 private:
  template <class T, class Range>
  Json plain(const T& value, const Range& range) const {
    if constexpr (requires { Range::words(); }) {
      Json json = Json::object();
      for (const auto& [word, which] : Range::words()) {
        json[std::string(word)] = (*this)(value.at(static_cast<std::size_t>(which)));
      }
      return json;
    } else if constexpr (detail::kIsOptional<T>) {
      return value ? (*this)(*value, range) : Json();
    } else if constexpr (HasWords<T>) {
      return word_of(value);
    } else if constexpr (detail::kIsVector<T>) {
      Json json = Json::array();
      const auto of_item = detail::item_range(range);
      for (const typename T::value_type& item : value) json.push_back((*this)(item, of_item));
      return json;
    } else if constexpr (detail::kIsMap<T>) {
      Json json = Json::object();
      for (const auto& [name, item] : value) json[name] = (*this)(item, range);
      return json;
    } else if constexpr (HasText<T>) {
      return to_string(value);
    } else {
      return value;
    }
  }

  const Rules& rules_;
};

/// Returns the text of a value: one line where it holds no lists or objects, else one line for each
/// item, down to `levels`.
std::string json_lines(const nlohmann::ordered_json& value, int levels = kMaxJsonDepth);

// ----------------------------------------------------------------------------------------- reading

/// The treatment of keys that no field has.
enum class OtherKeys : std::uint8_t {
  kRefused,     ///< they count as mistakes
  kPassedOver,  ///< they may be of another version
};

template <class Rules>
class JsonFieldsReader {
 public:
  JsonFieldsReader(Rules& rules, OtherKeys others) : rules_(rules), others_(others) {}

  template <class T, class Range = AnyValue>
  void operator()(T& value, const JsonCursor& at, const Range& range = {}) {
    if constexpr (requires { rules_.read(*this, value, at, range); }) {
      rules_.read(*this, value, at, range);
    } else if constexpr (HasFields<T>) {
      object(value, at);
    } else if constexpr (HasRow<T>) {
      list_of_fields(value, at);
    } else if constexpr (detail::kIsVector<T>) {
      list(value, at, range);
    } else {
      plain(value, at, range);
    }
  }

  /// `further`: other keys, which the caller reads.
  template <class T>
  void object(T& value, const JsonCursor& at, std::vector<std::string_view> further = {}) {
    at.require(at.value().is_object(), "an object");
    if (others_ == OtherKeys::kRefused) {
      for (const auto key : keys_of<T>()) further.push_back(key);
      detail::require_only(at, further);
    }
    members(value, at);
  }

  template <class T, class Range>
  void list(std::vector<T>& value, const JsonCursor& at, const Range& range) {
    if constexpr (requires { range.most; }) {
      detail::require_list(at, range.most, range.of);
    }
    const auto of_item = detail::item_range(range);
    value = at.list([&](const JsonCursor& one) {
      T item{};
      (*this)(item, one, of_item);
      return item;
    });
  }

 private:
  template <class T>
  void members(T& value, const JsonCursor& at) {
    each_field<T>([&]<class M, class C>(const Field& field, M C::* member, const auto& range) {
      if constexpr (HasFields<M>) {
        if (field.key.empty()) return this->members(value.*member, at);
      }
      if (field.missing == Missing::kNotInFile) return;
      const bool may_lack = field.missing == Missing::kLeftOut || field.missing == Missing::kOlder;
      if (may_lack && !at.value().contains(field.key)) return;
      const auto found = at.member(field.key);
      if (field.missing == Missing::kNull && found.value().is_null()) return;
      if constexpr (detail::kIsOptional<M>) {
        (*this)((value.*member).emplace(), found, range);
      } else {
        (*this)(value.*member, found, range);
      }
    });
    if constexpr (requires { rules_.check(at, value); }) rules_.check(at, value);
  }

  template <class T>
  void list_of_fields(T& value, const JsonCursor& at) {
    if (!at.value().is_array() || at.value().size() != count_fields<T>()) {
      at.refuse(concat("[", joined(keys_of<T>()), "]"));
    }
    std::size_t i = 0;
    each_field<T>([&](const Field&, auto member, const auto& range) {
      (*this)(value.*member, at.at(i++), range);
    });
  }

  template <class T, class Range>
  void plain(T& value, const JsonCursor& at, const Range& range) {
    if constexpr (requires { Range::words(); }) {
      by_word(value, at, Range::words());
    } else if constexpr (detail::kIsMap<T>) {
      value = at.by_name([&](const JsonCursor& one) {
        typename T::mapped_type item{};
        (*this)(item, one, range);
        return item;
      });
    } else if constexpr (HasWords<T>) {
      const auto found = from_word<T>(at.text());
      if (!found) detail::refuse_word(at, detail::as_list(words_of(T{})));
      value = *found;
    } else if constexpr (HasText<T>) {
      const auto found = from_text(Of<T>{}, at.text());
      at.require(found.has_value(), expected_text(Of<T>{}));
      value = *found;
    } else if constexpr (std::is_same_v<T, bool>) {
      value = at.boolean();
    } else if constexpr (std::is_convertible_v<const Range&, const TextLimit&>) {
      value = detail::text_within(at, range);
    } else if constexpr (std::is_same_v<T, std::string>) {
      value = at.text();
    } else if constexpr (std::is_same_v<Range, AnyValue>) {
      if constexpr (std::is_same_v<T, double>) {
        value = at.number();
      } else {
        static_assert(std::is_same_v<T, std::int64_t>, "smaller integers say their range");
        value = at.integer();
      }
    } else if constexpr (std::is_same_v<T, double>) {
      value = at.number(range);
    } else {
      value = static_cast<T>(at.integer(range));
    }
  }

  template <class T, class Words>
  void by_word(T& value, const JsonCursor& at, const Words& words) {
    at.require(at.value().is_object(), "an object");
    if (others_ == OtherKeys::kRefused) detail::require_only(at, detail::as_list(words));
    for (const auto& [word, which] : words) {
      (*this)(value.at(static_cast<std::size_t>(which)), at.member(word));
    }
  }

  Rules& rules_;
  OtherKeys others_;
};

}  // namespace tessera
