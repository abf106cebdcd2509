#include "base/threads/shapes_only.h"

namespace tessera::base {
namespace {

thread_local int t_scopes = 0;

}  // namespace

ShapesOnly::ShapesOnly() { ++t_scopes; }
ShapesOnly::~ShapesOnly() { --t_scopes; }
bool shapes_only() { return t_scopes > 0; }

}  // namespace tessera::base
