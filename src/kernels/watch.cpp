#include "kernels/watch.h"

#include <torch/library.h>

#include <utility>

#include "base/pass_local.h"

namespace tessera::kernels {
namespace {

using WatcherHere = base::PassLocal<base::PassValue::kWatcher, Watcher*>;

void run_watched(const c10::OperatorHandle& operation, c10::DispatchKeySet keys,
                 c10::Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kWatchKey);
  if (auto* const watcher = WatcherHere::here()) return watcher->run(operation, below, stack);
  const c10::impl::ExcludeDispatchKeyGuard once(kWatchKey);
  operation.redispatchBoxed(below, stack);
}

/// Registers the key once a process; nothing is watched before a thread includes the key.
c10::DispatchKey registered_key() {
  static const torch::Library library = [] {
    torch::Library all(torch::Library::IMPL, "_", std::make_optional(kWatchKey), __FILE__,
                       __LINE__);
    all.fallback(torch::CppFunction::makeFromBoxedFunction<&run_watched>());
    return all;
  }();
  return kWatchKey;
}

}  // namespace

WatchScope::WatchScope(Watcher& watcher)
    : outer_(std::exchange(WatcherHere::here(), &watcher)), watched_(registered_key()) {}

WatchScope::~WatchScope() { WatcherHere::here() = outer_; }

Watcher* watcher_of_this_thread() { return WatcherHere::here(); }

}  // namespace tessera::kernels
