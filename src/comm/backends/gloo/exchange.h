// Exchange: one batch in flight as sends and receives between pairs of ranks.
//
// It only posts and waits: the Steps of each op (ops/steps.h) say what is posted. Private to
// point_to_point.cpp. Threads: start_exchange() on the issuing thread, then wait() on one thread at
// a time.
#pragma once

#include <cstdint>
#include <memory>

#include "comm/backends/gloo/transport.h"
#include "comm/batch.h"

namespace tessera::comm {

/// Posts all transfers of the first round. `of` is the log's entry for the batch; `fingerprint` is
/// part of the tags. Errors: LostRank.
std::unique_ptr<Work> start_exchange(std::shared_ptr<Channel> channel, Batch batch,
                                     std::shared_ptr<const Entry> of, std::uint64_t fingerprint);

}  // namespace tessera::comm
