#include "base/byte_text.h"

#include <string_view>
#include <utility>

namespace tessera {
namespace {

struct ByteRange {
  unsigned char low = 0x80, high = 0xBF;
};

/// Bytes of the character that `lead` begins, 0 if it begins none.
std::size_t length_of(unsigned char lead) {
  if (lead < 0x80U) return 1;
  if (lead >= 0xC2U && lead <= 0xDFU) return 2;
  if (lead >= 0xE0U && lead <= 0xEFU) return 3;
  if (lead >= 0xF0U && lead <= 0xF4U) return 4;
  return 0;
}

/// What the second byte may be: no overlong form, no surrogate, nothing above U+10FFFF. Source:
/// Unicode 15, table 3-7.
ByteRange second_byte(unsigned char lead) {
  switch (lead) {
    case 0xE0:
      return {.low = 0xA0};
    case 0xED:
      return {.high = 0x9F};
    case 0xF0:
      return {.low = 0x90};
    case 0xF4:
      return {.high = 0x8F};
    default:
      return {};
  }
}

std::string escaped(std::string_view bytes) {
  static constexpr std::string_view kHex = "0123456789abcdef";
  std::string out;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    out += "\\x";
    out += kHex[byte >> 4U];
    out += kHex[byte & 0xFU];
  }
  return out;
}

/// C0 but for the three that lay text out, delete, and C1.
bool is_control(std::string_view character) {
  const auto first = static_cast<unsigned char>(character[0]);
  if (character.size() == 1) {
    return (first < 0x20U && first != '\n' && first != '\r' && first != '\t') || first == 0x7FU;
  }
  return first == 0xC2U && static_cast<unsigned char>(character[1]) < 0xA0U;
}

}  // namespace

std::string ByteText::add(unsigned char byte) {
  std::string out;
  if (!pending_.empty()) {
    const auto lead = static_cast<unsigned char>(pending_[0]);
    const ByteRange range = pending_.size() == 1 ? second_byte(lead) : ByteRange{};
    // A byte that does not continue the character ends it broken, and begins anew.
    if (byte < range.low || byte > range.high) out = finish();
  }
  pending_ += static_cast<char>(byte);
  const std::size_t length = length_of(static_cast<unsigned char>(pending_[0]));
  if (length == 0) return out + finish();
  if (pending_.size() < length) return out;
  const std::string character = std::exchange(pending_, {});
  return out + (is_control(character) ? escaped(character) : character);
}

std::string ByteText::finish() { return escaped(std::exchange(pending_, {})); }

}  // namespace tessera
