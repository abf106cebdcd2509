// WorldOptions::compare_entries: the records that the ranks of a group exchange before each
// collective.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "comm/batch.h"

namespace tessera::comm {

struct EntryRecord {
  std::uint64_t fingerprint;
  /// the entry's text, cut off where it is longer; ends in 0
  char text[512 - sizeof(std::uint64_t)];
};

void write_record(const Entry& entry, EntryRecord& record);
/// `records` has those of all ranks, in rank order; `self` is this rank's index. Errors: kComm
/// naming this rank and the first one whose entry differs, by their numbers in `members`, and both
/// entries.
void require_same_entries(std::span<const EntryRecord> records, int self,
                          const std::vector<int>& members, const std::string& group);

}  // namespace tessera::comm
