// The fields of a struct, listed once next to it, for everything that visits them: files
// (json_fields.h), hashes (../fields_hash.h) and differences (below).
//
//   template <class V>
//   constexpr void fields(V& visit, Of<PlanUnit>) {
//     visit("name", &PlanUnit::name, TextLimit{256});
//     visit("bytes", &PlanUnit::bytes, IntRange{0, kMostBytes});
//     visit("gathers", &PlanUnit::gathers);
//   }
//
// A visitor takes a Field, a pointer to the member and the range of its values in files. It takes a
// pointer and no value, so that one list serves one value, two values that are compared, or none.
// The order is that of files. A list that lacks a member does not compile (lists_all). A struct
// that files have as a list of its values has row() in place of fields(). Where the range depends
// on other values (the number of a unit, below their count), it is a type that the struct defines,
// and readers and comparisons have rules for that type. Pure.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/text/words.h"
#include "tessera/error.h"

namespace tessera {

/// Names the struct whose fields are listed.
template <class T>
struct Of {};

/// The form of a missing value in files.
enum class Missing : std::uint8_t {
  kNever,      ///< there is always a value
  kNull,       ///< the key has the value null
  kLeftOut,    ///< the key is left out: the value is that of a new M
  kOlder,      ///< as kLeftOut, but only in older files: the key is always written
  kNotInFile,  ///< files never have it
};

struct Field {
  // NOLINTNEXTLINE(google-explicit-constructor): lists of fields name them by literals
  constexpr Field(const char* in_files) : key(in_files), says(in_files) {}
  constexpr Field(const char* in_files, const char* as_text, Missing how = Missing::kNever)
      : key(in_files), says(as_text), missing(how) {}
  constexpr Field(const char* in_files, Missing how)
      : key(in_files), says(in_files), missing(how) {}

  std::string_view key;   ///< in files; empty: the member's fields are among these
  std::string_view says;  ///< in differences; by default the key with blanks for underscores
  Missing missing = Missing::kNever;
};

// --------------------------------------------------------------------------- ranges of values in
// files

/// Any value of the type.
struct AnyValue {};

struct IntRange {
  std::int64_t min = 1;
  std::int64_t max = std::int64_t{1} << 31;
};

struct NumberRange {
  double min = 0.0;  ///< included
  double max = std::numeric_limits<double>::max();
};

enum class Letters : std::uint8_t {
  kAny,
  kPrintable,  ///< no control bytes: messages and tables show the text
};

struct TextLimit {
  std::size_t most_bytes = 0;
  Letters letters = Letters::kAny;
};

/// A list of limited length: "expected a list of at most 64 stages".
template <class Item = AnyValue>
struct List {
  std::int64_t most = 0;
  std::string_view of = {};
  Item item = {};
};
List(std::int64_t, std::string_view) -> List<AnyValue>;
template <class Item>
List(std::int64_t, std::string_view, Item) -> List<Item>;

/// Whether files have the value as text: to_string(value), read by from_text().
template <class T>
concept HasText = requires(std::string_view text) {
  { from_text(Of<T>{}, text) } -> std::same_as<std::optional<T>>;
  { expected_text(Of<T>{}) } -> std::convertible_to<std::string_view>;
};

/// A std::array with one element for each word of E: an object with these words as keys.
template <class E>
struct ByWord {
  static constexpr auto words() { return words_of(E{}); }
};

// ---------------------------------------------------------------------------------------- visiting

namespace detail {

struct NoVisitor {
  template <class M, class Range = AnyValue>
  constexpr void operator()(const Field&, M, const Range& = {}) {}
};

template <class Visit>
struct EachField {
  const Visit& visit;
  template <class M, class Range = AnyValue>
  constexpr void operator()(const Field& field, M member, const Range& range = {}) {
    visit(field, member, range);
  }
};

/// Stands for a value of any type, where nothing is evaluated. Clang wants a body for types that
/// other sources cannot see.
struct AnyMember {
  template <class M>
  operator M() const {  // NOLINT(google-explicit-constructor): it must convert
    std::abort();
  }
};

template <class T, class... Members>
consteval std::size_t members_of() {
  if constexpr (requires { T{Members{}..., AnyMember{}}; }) {
    return members_of<T, Members..., AnyMember>();
  } else {
    return sizeof...(Members);
  }
}

template <class T>
inline constexpr bool kIsOptional = false;
template <class T>
inline constexpr bool kIsOptional<std::optional<T>> = true;
template <class T>
inline constexpr bool kIsVector = false;
template <class T>
inline constexpr bool kIsVector<std::vector<T>> = true;
template <class T>
inline constexpr bool kIsMap = false;
template <class T>
inline constexpr bool kIsMap<std::map<std::string, T, std::less<>>> = true;

}  // namespace detail

template <class T>
concept HasFields = requires(detail::NoVisitor& visit) { fields(visit, Of<T>{}); };
template <class T>
concept HasRow = requires(detail::NoVisitor& visit) { row(visit, Of<T>{}); };

namespace detail {

template <class T, class Visit>
constexpr void go_through(const Visit& visit) {
  EachField<Visit> each{visit};
  if constexpr (HasFields<T>) {
    fields(each, Of<T>{});
  } else {
    row(each, Of<T>{});
  }
}

}  // namespace detail

template <class T>
consteval std::size_t count_fields() {
  std::size_t count = 0;
  detail::go_through<T>([&](const Field&, auto, const auto&) { ++count; });
  return count;
}

/// The base whose fields a struct lists among its own; void where it has none.
template <class T>
struct BaseOf {
  using Type = void;
};

/// Whether each member is a field, also each of the base, which counts as one member of the struct.
template <class T>
consteval bool lists_all() {
  using Base = typename BaseOf<T>::Type;
  std::size_t members = detail::members_of<T>();
  if constexpr (!std::is_void_v<Base>) members += detail::members_of<Base>() - 1;
  return members == count_fields<T>();
}

/// Calls visit(field, pointer to member, range) for each field.
template <class T, class Visit>
constexpr void each_field(const Visit& visit) {
  static_assert(lists_all<T>(), "a member of this struct is no field of it");
  detail::go_through<T>(visit);
}

/// Returns the keys in files, also those of members whose fields are among these.
template <class T>
std::vector<std::string_view> keys_of() {
  std::vector<std::string_view> keys;
  each_field<T>([&]<class M, class C>(const Field& field, M C::*, const auto&) {
    if constexpr (HasFields<M>) {
      if (field.key.empty()) {
        for (const auto key : keys_of<M>()) keys.push_back(key);
        return;
      }
    }
    if (field.missing != Missing::kNotInFile) keys.push_back(field.key);
  });
  return keys;
}

// ------------------------------------------------------------------------------------- differences

enum class Side : std::uint8_t { kBefore, kAfter };

/// Lists the differences of two values, one line each: "where, what: before, after"; for two lists
/// the first place where they differ. `Rules` may have text(value, range, side), which prints a
/// value in another form, and differ(differences, where, what, before, after, range), which
/// compares two values in another way.
template <class Rules>
class Differences {
 public:
  explicit Differences(const Rules& rules) : rules_(rules) {}

  std::vector<std::string> take() { return std::move(lines_); }
  void line(std::string text) { lines_.push_back(std::move(text)); }
  /// Omits empty parts: the differences of a field without a name are those of its struct.
  static std::string join(const std::string& where, std::string_view what) {
    return concat(where, where.empty() || what.empty() ? "" : ", ", what);
  }

  template <class T>
  void of_fields(const std::string& where, const T& before, const T& after) {
    each_field<T>([&](const Field& field, auto member, const auto& range) {
      std::string what(field.says);
      std::ranges::replace(what, '_', ' ');
      of(where, what, before.*member, after.*member, range);
    });
  }

  template <class M, class Range = AnyValue>
  void of(const std::string& where, const std::string& what, const M& before, const M& after,
          const Range& range = {}) {
    if (before == after) return;
    if constexpr (requires { rules_.differ(*this, where, what, before, after, range); }) {
      rules_.differ(*this, where, what, before, after, range);
    } else if constexpr (HasFields<M>) {
      of_fields(join(where, what), before, after);
    } else if constexpr (detail::kIsVector<M>) {
      first(where, what, before, after, range);
    } else {
      line(concat(join(where, what), ": ", text(before, range, Side::kBefore), ", ",
                  text(after, range, Side::kAfter)));
    }
  }

  /// Adds the first place where two lists differ.
  template <class Items, class Range>
  void first(const std::string& where, const std::string& what, const Items& before,
             const Items& after, const Range& range) {
    if (before == after) return;
    using Item = typename Items::value_type;
    std::size_t i = 0;
    while (i < std::min(before.size(), after.size()) && before[i] == after[i]) ++i;
    const auto item = [&](const Items& items, Side side) {
      return i < items.size() ? text<Item>(items[i], range, side) : std::string("nothing more");
    };
    line(concat(join(where, what), " ", i + 1, " of ", before.size(), ", ", after.size(), ": ",
                item(before, Side::kBefore), ", ", item(after, Side::kAfter)));
  }

  template <class M, class Range>
  std::string text(const M& value, const Range& range, Side side) const {
    if constexpr (requires { rules_.text(value, range, side); }) {
      return rules_.text(value, range, side);
    } else if constexpr (std::is_same_v<M, bool>) {
      return value ? "yes" : "no";
    } else if constexpr (HasWords<M>) {
      return std::string(word_of(value));
    } else {
      return concat(value);
    }
  }

 private:
  const Rules& rules_;
  std::vector<std::string> lines_;
};

}  // namespace tessera
