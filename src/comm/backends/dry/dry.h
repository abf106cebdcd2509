// Collectives of one rank of a dry run: nobody else is there.
//
// Fake tensors (dry/fake_operations.h) are left as they are; whatever has values, which is messages of
// control and counts, comes out as if every rank had sent what this one sends. Each collective and
// each message is noted. Next: ../backend.h.
#pragma once

#include <functional>
#include <memory>

#include "comm/backends/backend.h"
#include "comm/batch.h"

namespace tessera::comm {

/// Noted as it is issued, by the rank's thread.
struct DryCollective {
  std::string group;  ///< "gather of ranks 0,1"
  int ranks = 0;
  Entry entry;
  std::int64_t sent_bytes = 0;  ///< by this rank
};
/// One end of a message, noted as it is posted.
struct DryMessage {
  std::string tag;  ///< to_string(P2PTag)
  bool sends = false;
  int peer = 0;  ///< rank of the world
  std::int64_t bytes = 0;
  at::ScalarType dtype = at::kFloat;
};
/// Who is told of them; an empty one is told nothing.
struct DryNotes {
  std::function<void(const DryCollective&)> collective = {};
  std::function<void(const DryMessage&)> message = {};
};

std::unique_ptr<Connections> open_dry(DryNotes notes);

}  // namespace tessera::comm
