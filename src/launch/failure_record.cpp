#include "launch/failure_record.h"

#include <chrono>
#include <sstream>
#include <tuple>

#include "tessera/error.h"

namespace tessera::comm {

std::string encode(const FailureRecord& record) {
  return concat(static_cast<int>(record.what), " ", record.time_ns, " ", record.rank, " ",
                record.exit_code, "\n", record.message);
}

std::optional<FailureRecord> decode_failure(const std::string& bytes) {
  const auto line_end = bytes.find('\n');
  if (line_end == std::string::npos) return std::nullopt;
  std::istringstream numbers(bytes.substr(0, line_end));
  FailureRecord record;
  int what = 0;
  std::string rest;
  if (!(numbers >> what >> record.time_ns >> record.rank >> record.exit_code) || numbers >> rest ||
      what < 0 || what > static_cast<int>(FailureClass::kNoticed)) {
    return std::nullopt;
  }
  record.what = static_cast<FailureClass>(what);
  record.message = bytes.substr(line_end + 1);
  return record;
}

std::string of_rank(int rank, std::string_view message) {
  const std::string prefix = concat("rank ", rank, ": ");
  return message.starts_with(prefix) ? std::string(message) : concat(prefix, message);
}

std::string to_string(const FailureRecord& record) { return of_rank(record.rank, record.message); }

std::optional<FailureRecord> culprit(const std::vector<FailureRecord>& failures) {
  const FailureRecord* first = nullptr;
  for (const FailureRecord& one : failures) {
    if (first == nullptr ||
        std::tie(one.what, one.time_ns) < std::tie(first->what, first->time_ns)) {
      first = &one;
    }
  }
  if (first == nullptr) return std::nullopt;
  return *first;
}

std::int64_t monotonic_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace tessera::comm
