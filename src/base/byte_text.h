// Bytes that a model writes one by one, as text that a terminal can show.
//
// Valid UTF-8 passes as soon as a character is complete; every byte that belongs to none, and
// control codes other than line feed, carriage return and tab, become \xNN. The same bytes give the
// same text however they come in.
#pragma once

#include <string>

namespace tessera {

class ByteText {
 public:
  /// What can be shown now that this byte is there: nothing while a character is incomplete.
  std::string add(unsigned char byte);
  /// What is left over of an incomplete character.
  std::string finish();

 private:
  std::string pending_;  // the beginning of a character
};

}  // namespace tessera
