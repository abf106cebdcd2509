// The hash of a struct that lists its fields (text/fields.h), over all of them. Pure.
#pragma once

#include <concepts>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "base/hash.h"
#include "base/text/fields.h"

namespace tessera {

template <class T>
void add_to(Hasher& hash, const T& value) {
  if constexpr (HasFields<T> || HasRow<T>) {
    each_field<T>([&](const Field&, auto member, const auto&) { add_to(hash, value.*member); });
  } else if constexpr (std::is_enum_v<T>) {
    hash.add(static_cast<std::uint64_t>(value));
  } else if constexpr (std::is_same_v<T, bool> || std::is_same_v<T, std::int64_t>) {
    hash.add(value);
  } else if constexpr (std::unsigned_integral<T>) {
    hash.add(std::uint64_t{value});
  } else if constexpr (std::is_convertible_v<const T&, std::string_view>) {
    hash.add(std::string_view(value));
  } else {  // a list
    hash.add(std::uint64_t{value.size()});
    for (const typename T::value_type& item : value) add_to(hash, item);
  }
}

/// Returns a hash that is the same on every rank, compiler and machine for equal values.
template <class T>
std::uint64_t hash_of(const T& value) {
  Hasher hash;
  add_to(hash, value);
  return hash.digest();
}

}  // namespace tessera
