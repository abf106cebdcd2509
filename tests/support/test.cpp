#include "support/test.h"

#include <chrono>

namespace tessera {

bool Says::all_in(const std::string& text, std::ostream* why) const {
  const auto missing = std::ranges::find_if(
      parts_, [&](const auto& part) { return text.find(part) == std::string::npos; });
  if (missing == parts_.end()) return true;
  if (why != nullptr) *why << "which does not say " << ::testing::PrintToString(*missing);
  return false;
}

void Says::DescribeTo(std::ostream* out) const {
  *out << "says " << ::testing::PrintToString(parts_);
}

void Says::DescribeNegationTo(std::ostream* out) const {
  *out << "does not say all of " << ::testing::PrintToString(parts_);
}

std::string refusal_of(ErrorKind kind, const std::function<void()>& action,
                       std::source_location caller) {
  try {
    action();
  } catch (const Error& error) {
    const ::testing::ScopedTrace trace(caller.file_name(), static_cast<int>(caller.line()), "");
    EXPECT_EQ(to_string(error.kind()), to_string(kind)) << error.what();
    return error.what();
  }
  return "";
}

std::string refusal_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return concat(to_string(error.kind()), ": ", error.what());
  }
  return "";
}

std::string error_of(ErrorKind kind, const std::function<void()>& action,
                     std::source_location caller) {
  auto message = refusal_of(kind, action, caller);
  const ::testing::ScopedTrace trace(caller.file_name(), static_cast<int>(caller.line()), "");
  EXPECT_NE(message, "") << "no error was thrown";
  return message;
}

std::string thrown_by(const std::function<void()>& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

double seconds_of(const std::function<void()>& action) {
  const auto begin = std::chrono::steady_clock::now();
  action();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace tessera
