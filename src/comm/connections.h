// Connections: two ranks of a group connect when they first send something to each other.
//
// Control messages are relayed (relay.h), so a rank exchanges something with 2 log2 N others and
// not with all. Each connection is a Gloo group of its two ranks, opened by a thread that nobody
// has to wait for: the other rank may never come. A wait for it is a wait like any other, with a
// deadline, a name for the failure watch, and an end when the World is poisoned. Collective: whom
// one rank connects to, connects to it, since both are about to run the same collective. Private to
// point_to_point.cpp.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/exchange.h"

namespace tessera::comm {

/// Gives the channel lines to those of `peers` (indices) to which it has none, for the entry
/// `sequence` of its log. Errors: PeerLost naming the rank that did not come in time.
void connect_to(const std::vector<int>& peers, Channel& channel, int epoch, std::uint64_t sequence);

}  // namespace tessera::comm
