#include "comm/sent_bytes.h"

namespace tessera::comm {

bool is_relayed(const Op& op, int ranks) {
  return std::visit([&](const auto& one) { return one.is_relayed(ranks); }, op);
}

std::int64_t sent_bytes(const Op& op, int ranks, int rank) {
  return std::visit([&](const auto& one) { return one.sent_bytes(ranks, rank); }, op);
}

std::int64_t sent_bytes(const Batch& batch, int ranks, int rank) {
  std::int64_t bytes = 0;
  for (const Op& op : batch.ops) bytes += sent_bytes(op, ranks, rank);
  return bytes;
}

}  // namespace tessera::comm
