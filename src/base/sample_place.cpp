#include "base/sample_place.h"

#include <utility>

namespace tessera {
namespace {

// A thread is a rank, so this is per rank.
thread_local std::optional<SamplePlace> t_place;

}  // namespace

std::optional<SamplePlace> sample_place() { return t_place; }

SampleScope::SampleScope(std::optional<SamplePlace> place)
    : outer_(std::exchange(t_place, place)) {}

SampleScope::~SampleScope() { t_place = outer_; }

}  // namespace tessera
