#include "dist/drawn_place.h"

const char* const tessera::test::kPlaces[] = {"sim", "sim:0", "sim side", "sim:0 side", nullptr};
