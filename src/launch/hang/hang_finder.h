// find_hang: finds why a run hangs or was lost, from the boards of its ranks (../rank_board.h).
//
// [Note: who left the order] Steps are alike, so the earlier issues of a rank tell what comes next:
// it follows the last place at which a group's collectives went the same way for the longest time.
// Ranks of one group that issued different things under one number are compared with that, and with
// the others of the group; the one that issued something else left the order. Where none did, waits
// are followed from rank to rank, over all groups: the rank at their end waits for no other, since
// it is gone, stopped or computes. Ranks that wait in a cycle are told apart by their earlier
// steps: what each of them waits in was never issued, or has never ended, without what another one
// waits for; the rank of which that is no longer true has left it out. Pure. Source: PyTorch's
// flight recorder analyzer compares entries of one group; it knows no order of earlier steps and
// follows no waits.
#pragma once

#include "launch/hang/hang_report.h"
#include "launch/rank_board.h"

namespace tessera::comm {

HangReport find_hang(const Boards& boards);

}  // namespace tessera::comm
