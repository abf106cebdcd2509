#include "comm/backends/entry_record.h"

#include <algorithm>
#include <cstring>

#include "tessera/error.h"

namespace tessera::comm {
namespace {

std::string text_of(const EntryRecord& record) {
  const char* const begin = record.text;
  return {begin, std::find(begin, begin + sizeof(record.text) - 1, '\0')};
}

}  // namespace

void write_record(const Entry& entry, EntryRecord& record) {
  record = {};
  record.fingerprint = entry.fingerprint;
  to_string(entry).copy(record.text, sizeof(record.text) - 1);
}

void require_same_entries(std::span<const EntryRecord> records, int self,
                          const std::vector<int>& members, const std::string& group) {
  const auto here = static_cast<std::size_t>(self);
  for (std::size_t other = 0; other < records.size(); ++other) {
    if (records[other].fingerprint == records[here].fingerprint) continue;
    const std::size_t first = std::min(here, other), second = std::max(here, other);
    throw Error(ErrorKind::kComm,
                concat("ranks disagree: rank ", members[first], " issues ", text_of(records[first]),
                       " but rank ", members[second], " issues ", text_of(records[second]),
                       " (group ", group, ")"));
  }
}

}  // namespace tessera::comm
