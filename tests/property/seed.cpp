// Property tests draw the same cases in every run unless RC_PARAMS says otherwise.
#include <cstdlib>

namespace {

[[maybe_unused]] const int kSeeded = setenv("RC_PARAMS", "seed=20130 max_success=300", 0);

}  // namespace
