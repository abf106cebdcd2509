#include "tessera/wide_scope.h"

#include "base/pass_local.h"

namespace tessera {
namespace {

using WideHere = base::PassLocal<base::PassValue::kWideScopes, int>;

}  // namespace

WideScope::WideScope() { ++WideHere::here(); }
WideScope::~WideScope() { --WideHere::here(); }
bool WideScope::is_open() { return WideHere::here() > 0; }

}  // namespace tessera
