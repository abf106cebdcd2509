// The tests of tests/dist on devices: each in one place, which its name draws, or in the one that
// TESSERA_TEST_PLACE names.
#pragma once

namespace tessera::test {

/// "sim": each rank a device of its own; "sim:0": all ranks one; the same with " side": not on the
/// default stream; with " nccl": over NCCL. The last one is nullptr. A program that links
/// drawn_place.cpp defines it.
extern const char* const kPlaces[];

}  // namespace tessera::test
