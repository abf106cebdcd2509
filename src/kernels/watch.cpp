#include "kernels/watch.h"

#include <torch/library.h>

#include <utility>

namespace tessera::kernels {
namespace {

thread_local Watcher* t_watcher = nullptr;

void run_watched(const c10::OperatorHandle& operation, c10::DispatchKeySet keys,
                 c10::Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kWatchKey);
  if (t_watcher != nullptr) return t_watcher->run(operation, below, stack);
  const c10::impl::ExcludeDispatchKeyGuard once(kWatchKey);
  operation.redispatchBoxed(below, stack);
}

/// Once a process; nothing comes by before a thread includes the key.
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
    : outer_(std::exchange(t_watcher, &watcher)), watched_(registered_key()) {}

WatchScope::~WatchScope() { t_watcher = outer_; }

Watcher* watcher_of_this_thread() { return t_watcher; }

}  // namespace tessera::kernels
