// All ranks of a test are threads that share one card.
#include "support/drawn_place.h"

const char* const tessera::test::kPlaces[] = {"cuda:0", "cuda:0 side", nullptr};
