#include "io/plain_file_name.h"

#include <algorithm>

namespace tessera {

bool is_plain_file_name(std::string_view name) {
  constexpr std::size_t kLongest = 255;
  return !name.empty() && name.size() <= kLongest && name != "." && name != ".." &&
         std::none_of(name.begin(), name.end(), [](char c) {
           return c == '/' || c == '\\' || static_cast<unsigned char>(c) < 0x20U || c == '\x7F';
         });
}

}  // namespace tessera
