// Strings and the array of pointers to them that execve() and posix_spawn() take. It is made before
// a fork, since allocating is not allowed after it.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/environment.h"

namespace tessera::base {

class StringArray {
 public:
  explicit StringArray(std::vector<std::string> strings) : strings_(std::move(strings)) {
    for (std::string& one : strings_) pointers_.push_back(one.data());
    pointers_.push_back(nullptr);
  }
  /// Makes one string NAME=VALUE for each variable.
  explicit StringArray(const Environment& variables) : StringArray(entries(variables)) {}
  StringArray(const StringArray&) = delete;
  StringArray& operator=(const StringArray&) = delete;

  char* const* data() const { return pointers_.data(); }

 private:
  static std::vector<std::string> entries(const Environment& variables) {
    std::vector<std::string> all;
    for (const auto& [name, value] : variables) all.push_back(name + "=" + value);
    return all;
  }

  std::vector<std::string> strings_;
  std::vector<char*> pointers_;
};

}  // namespace tessera::base
