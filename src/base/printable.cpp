#include "base/printable.h"

namespace tessera {
namespace {

bool is_continuation(char c) { return (static_cast<unsigned char>(c) & 0xC0U) == 0x80U; }

/// Bytes of the UTF-8 sequence that starts at `at`, 0 where it is broken or a control code. Only
/// the form is checked: the text goes to a terminal, which copes with unassigned code points.
std::size_t sequence_length(std::string_view text, std::size_t at) {
  const auto lead = static_cast<unsigned char>(text[at]);
  if (lead < 0x20U || lead == 0x7FU) return 0;
  if (lead < 0x80U) return 1;
  std::size_t length = 0;
  if (lead >= 0xC3U && lead <= 0xDFU) length = 2;  // C2 holds the C1 control codes
  if (lead >= 0xE0U && lead <= 0xEFU) length = 3;
  if (lead >= 0xF0U && lead <= 0xF4U) length = 4;
  if (length == 0 || at + length > text.size()) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if (!is_continuation(text[at + i])) return 0;
  }
  return length;
}

}  // namespace

std::string printable(std::string_view text, std::size_t max_bytes) {
  static constexpr std::string_view kHex = "0123456789abcdef";
  std::string out = "'";
  std::size_t at = 0;
  while (at < text.size() && at < max_bytes) {
    const std::size_t length = sequence_length(text, at);
    if (length == 0) {
      const auto byte = static_cast<unsigned char>(text[at]);
      out += "\\x";
      out += kHex[byte >> 4U];
      out += kHex[byte & 0xFU];
      ++at;
    } else {
      out += text.substr(at, length);
      at += length;
    }
  }
  out += at < text.size() ? "...'" : "'";
  return out;
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

}  // namespace tessera
