#include "base/threads/shapes_only.h"

#include "base/pass_local.h"

namespace tessera::base {
namespace {

using ShapesHere = PassLocal<PassValue::kShapesOnly, int>;

}  // namespace

ShapesOnly::ShapesOnly() { ++ShapesHere::here(); }
ShapesOnly::~ShapesOnly() { --ShapesHere::here(); }
bool shapes_only() { return ShapesHere::here() > 0; }

}  // namespace tessera::base
