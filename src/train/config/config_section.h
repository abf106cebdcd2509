// How the key table is written: a Section adds the keys of one struct of config.h, with the ranges
// of their numbers. Used by config_keys.cpp and config_keys_precision.cpp only.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "train/config/config_codec.h"

namespace tessera::train {

// Products of two such counts (steps x rows) fit into 63 bits.
inline constexpr double kMostCount = 1'000'000'000;

inline Limit at_least(double low) { return {.low = low, .words = concat("at least ", low)}; }
inline Limit between(double low, double high) {
  return {.low = low, .high = high, .words = concat("a value from ", low, " to ", high)};
}
inline Limit count_from(int low) {
  return {.low = static_cast<double>(low),
          .high = kMostCount,
          .words = concat("at least ", low, " and at most ", std::int64_t{1'000'000'000})};
}
inline Limit below_one() {
  return {.low = 0, .high = 1, .high_excluded = true, .words = "numbers from 0 to 1, 1 excluded"};
}
inline Limit positive_or_minus_one() {
  return {
      .low = 1, .high = kMostCount, .also = -1, .words = "-1 or at least 1 and at most 1000000000"};
}

struct Text {
  std::string unit;
  std::string help;
  std::string no_default = "";  ///< shown where the default Config has no value
};

// All keys of one section: S is its struct.
template <class S>
class Section {
 public:
  Section(std::vector<ConfigKey>& keys, std::string name, S Config::* section)
      : keys_(keys), name_(std::move(name)), section_(section) {}

  template <class T>
  Section& key(const std::string& name, T S::* member, const Text& text, const Limit& limit = {}) {
    ConfigKey key;
    key.section = name_;
    key.name = name;
    key.type = Codec<T>::type();
    key.unit = text.unit;
    key.help = text.help;
    const std::string full = key.full_name();
    const auto section = section_;
    key.set = [full, limit, section, member](Config& config, const ConfigValue& value) {
      config.*section.*member = Codec<T>::from(value, full, limit);
    };
    key.get = [section, member](const Config& config) {
      return Codec<T>::to(config.*section.*member);
    };
    const std::optional<ConfigValue> value = key.get(Config{});
    key.default_text = value ? to_toml(*value) : text.no_default;
    keys_.push_back(std::move(key));
    return *this;
  }

 private:
  std::vector<ConfigKey>& keys_;
  std::string name_;
  S Config::* section_;
};

/// config_keys_precision.cpp: [precision], [activation_checkpoint], [lora], [grad_scaler].
void add_precision(std::vector<ConfigKey>& keys);

}  // namespace tessera::train
