#include "base/text/printable.h"

#include <array>
#include <utility>

#include "base/text/three_digits.h"

namespace tessera {
namespace {

unsigned char byte_at(std::string_view text, std::size_t at) {
  return static_cast<unsigned char>(text[at]);
}

std::string escaped(std::string_view bytes) {
  static constexpr std::string_view kHex = "0123456789abcdef";
  std::string out;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    out += "\\x";
    out += kHex[byte_at(bytes, i) >> 4U];
    out += kHex[byte_at(bytes, i) & 0xFU];
  }
  return out;
}

/// Returns the number of bytes of the UTF-8 character that `lead` begins; 0 if it begins none.
std::size_t length_of(unsigned char lead) {
  if (lead < 0x80U) return 1;
  if (lead >= 0xC2U && lead <= 0xDFU) return 2;
  if (lead >= 0xE0U && lead <= 0xEFU) return 3;
  if (lead >= 0xF0U && lead <= 0xF4U) return 4;
  return 0;
}

/// The second bytes that count as part of a character.
enum class Second {
  kAnyContinuation,  ///< any with the right form, which terminals accept
  kOfUnicode,        ///< no overlong form, no surrogate, nothing above U+10FFFF
};

/// Whether `byte` can follow the first bytes of a character. Source: Unicode 15, table 3-7.
bool continues(std::string_view character, unsigned char byte, Second second) {
  unsigned char low = 0x80;
  unsigned char high = 0xBF;
  if (character.size() == 1 && second == Second::kOfUnicode) {
    const unsigned char lead = byte_at(character, 0);
    if (lead == 0xE0U) low = 0xA0;
    if (lead == 0xEDU) high = 0x9F;
    if (lead == 0xF0U) low = 0x90;
    if (lead == 0xF4U) high = 0x8F;
  }
  return low <= byte && byte <= high;
}

/// Whether it is a control character: C0 (except the three that lay text out), delete, C1.
bool is_control(std::string_view character) {
  const unsigned char first = byte_at(character, 0);
  if (character.size() == 1) {
    return (first < 0x20U && first != '\n' && first != '\r' && first != '\t') || first == 0x7FU;
  }
  return first == 0xC2U && byte_at(character, 1) < 0xA0U;
}

/// Returns the number of bytes at the start of `text` that a message shows as they are; 0 where it
/// shows the first byte as \xNN, also for characters that lay text out and for all that begin as C1
/// does.
std::size_t shown_length(std::string_view text) {
  const unsigned char lead = byte_at(text, 0);
  const std::size_t length = length_of(lead);
  if (lead < 0x20U || lead == 0x7FU || lead == 0xC2U || length > text.size()) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if (!continues(text.substr(0, i), byte_at(text, i), Second::kAnyContinuation)) return 0;
  }
  return length;
}

// The beginning of the stack that c10::Error appends to its message.
constexpr std::string_view kStack = "\nException raised from ";

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }

}  // namespace

std::string printable(std::string_view text, std::size_t max_bytes) {
  std::string out = "'";
  std::size_t at = 0;
  while (at < text.size() && at < max_bytes) {
    const std::size_t length = shown_length(text.substr(at));
    if (length == 0) {
      out += escaped(text.substr(at++, 1));
    } else {
      out += text.substr(at, length);
      at += length;
    }
  }
  out += at < text.size() ? "...'" : "'";
  return out;
}

std::size_t character_begin(std::string_view text, std::size_t at) {
  while (at > 0 && continues({}, byte_at(text, at), Second::kAnyContinuation)) --at;
  return at;
}

std::string shown(const std::filesystem::path& path) { return printable(path.native(), 1024); }

std::string shape_text(std::span<const std::int64_t> shape) {
  constexpr std::size_t kMaxDims = 8;
  std::string out = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) out += ", ";
    if (i == kMaxDims) {
      out += "...";
      break;
    }
    out += std::to_string(shape[i]);
  }
  return out + "]";
}

std::string size_text(std::int64_t bytes) {
  static constexpr std::array<std::string_view, 5> kUnits{"KiB", "MiB", "GiB", "TiB", "PiB"};
  if (bytes < 1024) return concat(bytes, " B");
  double value = static_cast<double>(bytes) / 1024.0;
  std::size_t unit = 0;
  // 1,023.5 and more would be written with four digits.
  while (value >= 1023.5 && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  return concat(three_digits(value), " ", kUnits[unit]);
}

std::string one_line(std::string_view what) {
  what = what.substr(0, what.find(kStack));
  std::string line;
  for (std::size_t i = 0; i < what.size();) {
    std::size_t end = i;
    while (end < what.size() && is_space(what[end])) ++end;
    const std::string_view gap = what.substr(i, end - i);
    if (gap.find('\n') == gap.npos) {
      line += gap;  // spaces within a line stay as they are
    } else if (!line.empty() && end < what.size()) {
      line += ' ';
    }
    if (end < what.size()) line += what[end++];
    i = end;
  }
  return line;
}

std::string ByteText::add(unsigned char byte) {
  std::string out;
  // A byte that does not continue the character ends it as broken, and begins another one.
  if (!pending_.empty() && !continues(pending_, byte, Second::kOfUnicode)) out = finish();
  pending_ += static_cast<char>(byte);
  const std::size_t length = length_of(byte_at(pending_, 0));
  if (length == 0) return out + finish();
  if (pending_.size() < length) return out;
  const std::string character = std::exchange(pending_, {});
  return out + (is_control(character) ? escaped(character) : character);
}

std::string ByteText::finish() { return escaped(std::exchange(pending_, {})); }

}  // namespace tessera
