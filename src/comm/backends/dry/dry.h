// Collectives of one rank in a dry run, where no other rank exists.
//
// Fake tensors (dry/fake_operations.h) are left as they are. Tensors with values, which are control
// messages and counts, come out as if every rank had sent what this one sends. Each collective and
// each message is noted. Next: ../backend.h.
#pragma once

#include <functional>
#include <memory>

#include "comm/backends/backend.h"
#include "comm/batch.h"

namespace tessera::comm {

/// A collective, noted by the rank's thread when it is issued.
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
/// The functions that hear of collectives and messages. An empty one is not called.
struct DryNotes {
  std::function<void(const DryCollective&)> collective = {};
  std::function<void(const DryMessage&)> message = {};
};

std::unique_ptr<Connections> open_dry(DryNotes notes);

}  // namespace tessera::comm
