#include "tessera/wide_scope.h"

namespace tessera {
namespace {

// A thread is a rank.
thread_local int t_wide = 0;

}  // namespace

WideScope::WideScope() { ++t_wide; }
WideScope::~WideScope() { --t_wide; }
bool WideScope::is_open() { return t_wide > 0; }

}  // namespace tessera
