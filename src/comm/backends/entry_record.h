// WorldOptions::compare_entries: what the ranks of a group tell each other before each collective.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "comm/batch.h"

namespace tessera::comm {

struct EntryRecord {
  std::uint64_t fingerprint;
  char text[512 - sizeof(std::uint64_t)];  ///< of the entry, cut; ends in 0
};

void write_record(const Entry& entry, EntryRecord& record);
/// `records`: of all ranks, in rank order; `self`: this one's index. Errors: kComm naming this rank
/// and the first one whose entry differs, by their numbers in `members`, and both entries.
void require_same_entries(std::span<const EntryRecord> records, int self,
                          const std::vector<int>& members, const std::string& group);

}  // namespace tessera::comm
